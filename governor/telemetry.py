"""The controller's metrics. The leader's process shows decisions; every process shows what it sees itself."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client import Counter, Gauge

from governor.law import Decision
from governor.reading import Reading

# Causes without their probe: which one it is, `governor_signal_saturation_ratio` shows.
CAUSES = (
    "demand",
    "ceiling",
    "override",
    "floor",
    "saturation",
    "timeouts",
    "errors",
    "stale",
    "recovering",
    "paused",
)
DIRECTIONS = ("raise", "lower", "hold")

ALLOWANCE = Gauge("governor_allowance_permits_per_second", "Allowance that the leader decided.")
IN_FORCE = Gauge("governor_in_force_permits_per_second", "Allowance in force at the bucket, as last seen.")
CEILING = Gauge("governor_ceiling_permits_per_second", "Ceiling, after an override.")
FLOOR = Gauge("governor_floor_permits_per_second", "Floor: flows when nothing is published.")
NEEDS = Gauge("governor_needs_permits_per_second", "What the objective needs.")
SAFE = Gauge("governor_safe_permits_per_second", "What the database is known to bear.")
DRAIN = Gauge("governor_drain_seconds", "Until nothing is due, at this allowance; +Inf: never.")
BLOCKED = Gauge("governor_blocked_ratio", "Share of the interval with an unmet request at the bucket.")
SIGNAL = Gauge(
    "governor_signal_saturation_ratio", "Each signal as value / target; NaN: it is missing.", ["signal"]
)
LIMITED_BY = Gauge(
    "governor_limited_by",
    "What limits the allowance, as a state set: 1 for one cause, 0 for the others.",
    ["cause"],
)
STUCK = Gauge("governor_stuck", "1 while permits are there, work is due and nothing completes.")
DECISIONS = Counter("governor_decisions", "Decisions of this process as the leader.", ["direction", "reason"])
DECIDED_LAST = Gauge(
    "governor_last_decision_timestamp_seconds", "When this process last decided; its age is the staleness."
)
LEADER = Gauge("governor_leader", "1 while this process leads.")
EPOCH = Gauge("governor_epoch", "Epoch of the lease, as last seen.")
DIFFERS = Gauge(
    "governor_settings_differ", "1 while the leader has other GOVERNOR_* settings than this process."
)
SETTINGS = Gauge("governor_settings_info", "1 for the hash of this process's settings.", ["hash"])
FAILURES = Counter("governor_failures", "Steps of the controller that failed.", ["step"])
CUTS = Counter("governor_cuts", "Fast cuts that this process made, by cause.", ["cause"])
for _direction in DIRECTIONS:
    for _cause in CAUSES:
        DECISIONS.labels(_direction, _cause)
for _step in ("bucket", "backlog", "orders", "probes", "lease", "publish", "journal", "restore", "shadow"):
    FAILURES.labels(_step)
for _cause in ("timeouts", "too_many_clients"):
    CUTS.labels(_cause)


def cause_of(decision: Decision) -> str:
    """Name what limits, without the probe."""
    return decision.limited_by.partition(":")[0]


def show(reading: Reading, decision: Decision, *, before_per_s: float | None, ceiling_per_s: float) -> None:
    """Show one decision and what it was made from."""
    ALLOWANCE.set(decision.allowance_per_s)
    CEILING.set(ceiling_per_s if reading.ceiling_per_s is None else min(ceiling_per_s, reading.ceiling_per_s))
    NEEDS.set(decision.needs_per_s)
    SAFE.set(decision.safe_per_s)
    DRAIN.set(math.inf if decision.drain_s is None else decision.drain_s)
    BLOCKED.set(math.nan if reading.blocked_ratio is None else reading.blocked_ratio)
    STUCK.set(decision.stuck)
    show_signals(reading.saturation)
    for cause in CAUSES:
        LIMITED_BY.labels(cause).set(cause == cause_of(decision))
    DECISIONS.labels(_direction_of(decision.allowance_per_s, before_per_s), cause_of(decision)).inc()
    DECIDED_LAST.set_to_current_time()


def show_signals(saturation: Mapping[str, float | None]) -> None:
    """Show the signals; those that are gone are shown no longer."""
    SIGNAL.clear()
    for name, value in saturation.items():
        SIGNAL.labels(name).set(math.nan if value is None else value)


def retire() -> None:
    """Show no decision any more: another process leads."""
    LEADER.set(0)
    SIGNAL.clear()
    LIMITED_BY.clear()
    for gauge in (ALLOWANCE, NEEDS, SAFE, DRAIN, BLOCKED):
        gauge.set(math.nan)
    STUCK.set(0)


def _direction_of(now_per_s: float, before_per_s: float | None) -> str:
    if before_per_s is None or now_per_s == before_per_s:
        return "hold"
    return "raise" if now_per_s > before_per_s else "lower"
