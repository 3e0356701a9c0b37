"""What the law is told every interval, and how bad data is kept out of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One interval of a fleet, as the leader saw it. None = the signal is missing this interval.

    NaN, infinite and negative values count as missing. A missing signal never raises the allowance.
    """

    at_s: float | None  # leader's monotonic clock, s; a new leader starts elsewhere, so it may step
    interval_s: float | None  # length of the interval, s
    oldest_due_age_s: float | None  # age of the oldest transition that is due and not done, s; >= 0
    due_depth: float | None  # transitions due and not done; >= 0
    started: float | None  # permits spent in the interval, refunds subtracted; >= 0
    # probe -> value / target: 1.0 = at target, 0 is a fine value. None = a required probe is missing, late
    # or implausible; an optional one is absent; empty = errors and timeouts are all there is.
    saturation: Mapping[str, float | None]
    allowance_per_s: float | None = None  # in force over the interval, time-weighted; None = as decided
    blocked_ratio: float | None = 0.0  # share of the interval with an unmet request at the bucket, 0..1
    completed: float | None = 0  # attempts that ended well
    failed: float | None = 0  # transient errors of the dependency; never contended, stale or poison
    timed_out: float | None = 0  # attempts that ran out of time
    arrivals_per_s: float | None = None  # forecast of what falls due over the objective: mean
    arrivals_peak_per_s: float | None = None  # and its peak second
    in_flight: float | None = 0  # started and not settled
    ceiling_per_s: float | None = None  # ceiling after an override; None = no override
    paused: bool = False  # the operator's pause: the allowance is 0, and only then
    resumed: bool = False  # the first reading after a pause, a restart or a change of leader


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """A reading with nothing in it but plain finite numbers; `missing` names the first signal without one."""

    at_s: float | None
    interval_s: float
    age_s: float
    depth: float
    started_per_s: float
    probes: dict[str, float]
    missing: str | None
    in_force_per_s: float | None
    blocked_ratio: float
    completed: float
    failed: float
    timed_out: float
    arrivals_per_s: float
    arrivals_peak_per_s: float
    ceiling_per_s: float | None
    paused: bool
    resumed: bool
    silent: frozenset[str]  # probes that are there and say nothing
    ceiling_unreadable: bool  # an override that is no number: the last one stays

    @classmethod
    def of(cls, reading: Reading, *, interval_s: float) -> Signals:
        """Clean a reading; `interval_s` stands in for an interval that is no positive number."""
        length_s = plain(reading.interval_s)
        if length_s is None or length_s < _INTERVAL_S_MIN:
            length_s = interval_s
        depth = plain(reading.due_depth)
        # Where nothing is due there is no oldest.
        age_s = 0.0 if depth == 0 else plain(reading.oldest_due_age_s)
        counts = {
            "oldest_due_age_s": age_s,
            "due_depth": depth,
            "started": plain(reading.started),
            "blocked_ratio": plain(reading.blocked_ratio),
            "completed": plain(reading.completed),
            "failed": plain(reading.failed),
            "timed_out": plain(reading.timed_out),
        }
        probes = {str(name): plain(value) for name, value in sorted(reading.saturation.items())}
        missing = [name for name, value in {**probes, **counts}.items() if value is None]
        at_s = reading.at_s
        return cls(
            at_s=float(at_s) if at_s is not None and _is_number(at_s) and math.isfinite(at_s) else None,
            interval_s=length_s,
            age_s=age_s or 0.0,
            depth=depth or 0.0,
            started_per_s=(counts["started"] or 0.0) / length_s,
            probes={name: value for name, value in probes.items() if value is not None},
            missing=missing[0] if missing else None,
            in_force_per_s=plain(reading.allowance_per_s),
            blocked_ratio=counts["blocked_ratio"] or 0.0,
            completed=counts["completed"] or 0.0,
            failed=counts["failed"] or 0.0,
            timed_out=counts["timed_out"] or 0.0,
            arrivals_per_s=plain(reading.arrivals_per_s) or 0.0,
            arrivals_peak_per_s=plain(reading.arrivals_peak_per_s) or 0.0,
            ceiling_per_s=plain(reading.ceiling_per_s),
            paused=bool(reading.paused),
            resumed=bool(reading.resumed),
            silent=frozenset(name for name, value in probes.items() if value is None),
            ceiling_unreadable=reading.ceiling_per_s is not None and plain(reading.ceiling_per_s) is None,
        )


_INTERVAL_S_MIN = 0.001  # a shorter interval is a fault of the clock
_MOST = 1e12  # beyond this no count, rate or age is believed; it also keeps products finite


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain(value: float | None) -> float | None:
    """Return a number of 0..10^12 as it is, anything else as None.

    >>> plain(0), plain(None), plain(float("nan")), plain(-1.0)
    (0.0, None, None, None)
    """
    if value is None or not _is_number(value) or not 0 <= value <= _MOST:
        return None
    return float(value)
