"""Laws that others published, in the same loop; each stands at the best point of its grid in peers.toml.

Formulas are facts taken from the sources named; nothing is copied. All get the readings that our law gets.
Where a law wants a round-trip time it gets the canary's commit latency; where it limits concurrency, its
limit L becomes a rate by Little's law, L / (time of one transition); where it wants a "throttled" answer it
gets a probe above its target, or a timeout. None of them was made for load that is not its own: the bench
shows what that costs, not that they are bad at what they were made for.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from itertools import product

from governor.law import Decision, LawSettings
from governor.reading import Reading
from governor.simulate.loop import Governs, decided

_TRANSITION_S = 0.008  # what one transition takes on the idle database of common.toml
_LATENCY = "commit_latency"


class _Peer:
    """Bounds, and what every peer asks of a reading."""

    def __init__(self, settings: LawSettings) -> None:
        self._settings = settings
        self._allowance = settings.start_per_s

    def step(self, reading: Reading) -> Decision:
        """Decide by the peer's formula, within floor and ceiling."""
        proposed = self._propose(reading)
        if math.isfinite(proposed):
            self._allowance = min(max(proposed, self._settings.floor_per_s), self._settings.ceiling_per_s)
        return decided(self._allowance, type(self).__name__)

    def _propose(self, reading: Reading) -> float:
        raise NotImplementedError

    @staticmethod
    def _values(reading: Reading) -> list[float]:
        return [value for value in reading.saturation.values() if value is not None]

    def _troubled(self, reading: Reading) -> bool:
        return max(self._values(reading), default=0.0) > 1.0 or bool(reading.timed_out)

    def _failing(self, reading: Reading) -> bool:
        return (reading.failed or 0.0) > 0.1 * (reading.completed or 0.0)


class Fixed(_Peer):
    """A constant rate, permits/s: what most fleets have."""

    def __init__(self, settings: LawSettings, *, rate_per_s: float) -> None:
        super().__init__(settings)
        self._rate_per_s = rate_per_s

    def _propose(self, reading: Reading) -> float:  # noqa: ARG002 - a fixed rate does not look
        return self._rate_per_s


class Aimd(_Peer):
    """allowance + a while all is well, allowance x b when a probe is above its target or attempts fail.

    Source: Chiu and Jain, "Analysis of the increase and decrease algorithms", 1989.
    """

    def __init__(self, settings: LawSettings, *, add_per_s: float, factor: float) -> None:
        super().__init__(settings)
        self._add_per_s, self._factor = add_per_s, factor

    def _propose(self, reading: Reading) -> float:
        if self._troubled(reading) or self._failing(reading):
            return self._allowance * self._factor
        return self._allowance + self._add_per_s


class AgeFirst(_Peer):
    """allowance x (1 + g) while the oldest message is older than the objective, x (1 - g) below half of it.

    The rule of autoscalers that follow a queue's length or age. The probes are heard (x b above target) only
    while the age is within the objective.
    """

    def __init__(self, settings: LawSettings, *, gain: float, factor: float) -> None:
        super().__init__(settings)
        self._gain, self._factor = gain, factor

    def _propose(self, reading: Reading) -> float:
        age_s, objective_s = reading.oldest_due_age_s or 0.0, self._settings.objective_s
        if age_s > objective_s:
            return self._allowance * (1 + self._gain)
        if self._troubled(reading):
            return self._allowance * self._factor
        if age_s < objective_s / 2:
            return max(self._settings.start_per_s, self._allowance * (1 - self._gain))
        return self._allowance


class Gradient2(_Peer):
    """L <- (1 - s) L + s (L x clamp(tolerance x long / short, 0.5, 1) + queue), not below half use of L.

    short is the last round-trip time, long its exponential mean over 600 samples; when long is more than
    twice short it shrinks by 5 %. Source: Netflix concurrency-limits, Gradient2Limit.
    """

    def __init__(self, settings: LawSettings, *, smoothing: float, queue: float, tolerance: float) -> None:
        super().__init__(settings)
        self._smoothing, self._queue, self._tolerance = smoothing, queue, tolerance
        self._limit = settings.start_per_s * _TRANSITION_S
        self._long, self._samples = 0.0, 0

    def _propose(self, reading: Reading) -> float:
        short = reading.saturation.get(_LATENCY)
        if not short:
            return self._allowance
        self._samples += 1
        weight = 1 / self._samples if self._samples <= 10 else 2 / (600 + 1)
        self._long += weight * (short - self._long)
        if self._long / short > 2:
            self._long *= 0.95
        if (reading.blocked_ratio or 0.0) < 0.1:
            return self._allowance
        gradient = max(0.5, min(1.0, self._tolerance * self._long / short))
        proposed = self._limit * gradient + self._queue
        self._limit += self._smoothing * (proposed - self._limit)
        self._limit = min(self._limit, self._settings.ceiling_per_s * _TRANSITION_S)
        return self._limit / _TRANSITION_S


class Vegas(_Peer):
    """q = L (1 - best / rtt); q <= log10 L: L + b; q < a: L + log10 L; q > b: L - log10 L.

    a = 3 log10 L, b = 6 log10 L, each at least its factor; best is the least round-trip time seen, taken
    anew every `probe` intervals; a timeout lowers. Source: Netflix concurrency-limits, VegasLimit, after
    Brakmo and Peterson, "TCP Vegas", 1995.
    """

    def __init__(self, settings: LawSettings, *, low: float, high: float, probe: float) -> None:
        super().__init__(settings)
        self._low, self._high, self._probe = low, high, probe
        self._limit = settings.start_per_s * _TRANSITION_S
        self._best, self._count = 0.0, 0

    def _propose(self, reading: Reading) -> float:
        rtt = reading.saturation.get(_LATENCY)
        if not rtt:
            return self._allowance
        self._count += 1
        if self._best == 0 or rtt < self._best or self._count >= self._probe:
            self._best, self._count = rtt, 0
            return self._allowance
        unit = max(1.0, math.log10(max(self._limit, 1.0)))
        queue = self._limit * (1 - self._best / rtt)
        if reading.timed_out or queue > self._high * unit:
            self._limit = max(self._limit - unit, 0.04)
        elif (reading.blocked_ratio or 0.0) < 0.1:
            return self._allowance
        elif queue <= unit:
            self._limit += self._high * unit
        elif queue < self._low * unit:
            self._limit += unit
        self._limit = min(self._limit, self._settings.ceiling_per_s * _TRANSITION_S)
        return self._limit / _TRANSITION_S


class Cubic(_Peer):
    """rate = c (t - k)^3 + w, k = (w (1 - b) / c)^(1/3), at most twice what was measured; x b when throttled.

    w is the rate at the last throttle, t the time since, s. Published: b = 0.7, c = 0.4. Source: botocore's
    adaptive retry mode (retries/adaptive.py, retries/throttling.py), after RFC 8312.
    """

    def __init__(self, settings: LawSettings, *, scale: float, factor: float) -> None:
        super().__init__(settings)
        self._scale, self._factor = scale, factor
        self._most, self._since_s, self._measured = settings.start_per_s, 0.0, 0.0

    def _propose(self, reading: Reading) -> float:
        interval_s = self._settings.interval_s
        self._measured += 0.8 * ((reading.started or 0.0) / interval_s - self._measured)
        self._since_s += interval_s
        if self._troubled(reading) or self._failing(reading):
            self._most, self._since_s = min(self._measured, self._allowance), 0.0
            return min(self._most * self._factor, 2 * self._measured)
        k = math.cbrt(self._most * (1 - self._factor) / self._scale)
        return min(self._scale * math.pow(self._since_s - k, 3) + self._most, 2 * self._measured)


class GitLab(_Peer):
    """x 0.8 when one indicator is over its quota, x 0.5 when two are, once a period; x 1.1 a quiet period.

    Published: a period of 60 s. Source: GitLab's Sidekiq throttling middleware (issue
    gl-infra/scalability#3815, merge requests gitlab!197226 and !198811).
    """

    def __init__(self, settings: LawSettings, *, period_s: float, most_per_s: float) -> None:
        super().__init__(settings)
        self._period_s, self._most_per_s = period_s, most_per_s
        self._allowance = min(most_per_s, settings.ceiling_per_s)
        self._throttled_s = self._recovered_s = 0.0

    def _propose(self, reading: Reading) -> float:
        self._throttled_s += self._settings.interval_s
        self._recovered_s += self._settings.interval_s
        over = sum(value > 1.0 for value in self._values(reading)) + self._failing(reading)
        if over and self._throttled_s >= self._period_s:
            self._throttled_s = self._recovered_s = 0.0
            return self._allowance * (0.5 if over > 1 else 0.8)
        if not over and self._recovered_s >= self._period_s:
            self._recovered_s = 0.0
            return min(self._most_per_s, max(self._allowance + 1, self._allowance * 1.1))
        return self._allowance


PEERS: Mapping[str, Callable[..., _Peer]] = {
    "fixed": Fixed,
    "aimd": Aimd,
    "age-first": AgeFirst,
    "gradient2": Gradient2,
    "vegas": Vegas,
    "cubic": Cubic,
    "gitlab": GitLab,
}


def published() -> dict[str, dict[str, dict[str, list[float]] | dict[str, float]]]:
    """Return, per peer, the grid that was searched and the best point found in it."""
    text = (resources.files("governor.simulate") / "peers.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def grid(name: str) -> list[dict[str, float]]:
    """Return every point of a peer's grid."""
    axes = published()[name]["grid"]
    return [dict(zip(axes, point, strict=True)) for point in product(*axes.values())]


def at_best(name: str, settings: LawSettings) -> Governs:
    """Return a peer at the best point of its grid."""
    return PEERS[name](settings, **published()[name]["best"])


def at(name: str, settings: LawSettings, point: Mapping[str, float]) -> Governs:
    """Return a peer at any point."""
    return PEERS[name](settings, **point)
