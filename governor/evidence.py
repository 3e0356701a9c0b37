"""What several readings together say: probes without their outliers, ratios without their luck."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

_SMOOTHING = 0.5  # weight of a probe's newest value
_JUMP = 2.0  # a move by more than this factor must be seen twice, or by two probes
_JUMP_LOW = 0.25  # below this saturation no move is a jump
_AGREE = 1.3  # another probe that moved by this factor the same way agrees with a jump
RATE_GAIN = 1.0  # d ln(rate) / d saturation: 1 = all load is ours, and linear; other load asks for more
_GAIN_FAR = 2.0  # in addition, on what lies further than _FAR below the target
_FAR = 0.15
_ERROR_LEAST = -0.5  # further above the target a probe shows queues, not at which rate they began
_CLIMBING = 0.25  # so far below its target an estimate is coarse, and soon replaced
_VOUCHED = 1.5  # x the value of the probe that agrees
_WEIGHT = 0.25  # of the newest estimate of a rate
_WEIGHT_OFF = 0.5  # and of one that is off by more than _OFF, for the second time
_OFF = 0.2
_RATE_LN_MOST = 50.0  # keeps exp() finite, far above any ceiling
_KEPT_INTERVALS = 5  # an optional probe that vanished still counts for so many intervals
_CARRIED = 10.0  # attempts that an interval is filled up to with those of earlier ones
_Z = 1.645  # one-sided 95 %


@dataclass(slots=True)
class Probe:
    """One probe over time, smoothed before probes are compared: the maximum of noisy ones is biased."""

    smoothed: float
    unconfirmed: bool = False  # its last value was a jump that nothing else showed
    falling: bool = False  # the last value was well below what went before
    absent: int = 0  # intervals since it was last there
    rate_ln: float | None = None  # ln of the rate that would put it at its target, permits/s
    off: int = 0  # +1 or -1: the last estimate was far above or below

    def estimate(self, rate_per_s: float, value: float) -> None:
        """Learn from a value and the rate it was measured at which rate this probe bears."""
        if self.unconfirmed or (self.falling and value > 1):
            return  # an outlier, or queues that are being worked off
        error = max(1 - value, _ERROR_LEAST)
        newest = math.log(rate_per_s) + RATE_GAIN * error + _GAIN_FAR * max(0.0, error - _FAR)
        if self.rate_ln is None:
            self.rate_ln = newest
            return
        off = (newest > self.rate_ln + _OFF) - (newest < self.rate_ln - _OFF)
        # Far below counts at once, far above when it is so twice.
        far = off < 0 or (off > 0 and self.off > 0) or error > _CLIMBING
        self.rate_ln += (_WEIGHT_OFF if far else _WEIGHT) * (newest - self.rate_ln)
        self.off = off

    def update(self, value: float, *, confirmed: bool) -> None:
        """Take a value in: smoothed if near, at once if a confirmed jump, not at all if an outlier."""
        self.absent = 0
        self.falling = value < 0.85 * self.smoothed
        jump = self.jumps(value)
        if not jump:
            self.smoothed += _SMOOTHING * (value - self.smoothed)
        elif confirmed or self.unconfirmed:
            self.smoothed = value
        self.unconfirmed = jump and not (confirmed or self.unconfirmed)

    def move(self, value: float) -> int:
        """Return +1 where a value is well above the last ones and its target, -1 where it is well below."""
        up = value > max(1.0, _AGREE * self.smoothed)
        return up - (value * _AGREE < self.smoothed)

    def jumps(self, value: float) -> bool:
        """Tell whether a value is too far from the last ones to be believed alone."""
        high, low = max(value, self.smoothed), min(value, self.smoothed)
        return high > _JUMP * max(low, _JUMP_LOW)


@dataclass(slots=True)
class Probes:
    """All probes of a fleet by name."""

    by_name: dict[str, Probe] = field(default_factory=dict)

    def update(self, values: dict[str, float], *, silent: Iterable[str], troubled: bool) -> None:
        """Take one interval's values in; `troubled` = attempts say so too."""
        moves = {
            name: self.by_name[name].move(value) for name, value in values.items() if name in self.by_name
        }
        for name, value in values.items():
            if name not in moves:
                self.by_name[name] = Probe(smoothed=value)
                continue
            agree = [values[other] for other, move in moves.items() if other != name and move == moves[name]]
            # A probe that agrees vouches for little more than it shows itself: one may be an outlier.
            vouched = min(value, _VOUCHED * max(agree)) if agree and moves[name] > 0 else value
            self.by_name[name].update(vouched, confirmed=troubled or bool(agree))
        for name in set(self.by_name) - set(values) - set(silent):
            # A probe near its target that vanishes must not raise the allowance by that.
            self.by_name[name].absent += 1
            if self.by_name[name].absent > _KEPT_INTERVALS:
                del self.by_name[name]

    @property
    def worst(self) -> tuple[str, float]:
        """Name and smoothed saturation of the worst probe; ("", 0.0) without probes."""
        if not self.by_name:
            return "", 0.0
        return max(((name, probe.smoothed) for name, probe in self.by_name.items()), key=lambda item: item[1])

    @property
    def least(self) -> tuple[str, float]:
        """Name and rate of the probe that bears least, permits/s; ("", 0.0) where none can tell yet."""
        rates = {name: probe.rate_ln for name, probe in self.by_name.items() if probe.rate_ln is not None}
        if not rates:
            return "", 0.0
        name = min(rates, key=lambda each: rates[each])
        return name, math.exp(min(rates[name], _RATE_LN_MOST))

    def assume_rate(self, rate_per_s: float | None) -> None:
        """Begin estimating afresh from a rate, or from the next estimate."""
        for probe in self.by_name.values():
            probe.rate_ln, probe.off = math.log(rate_per_s) if rate_per_s else None, 0

    @property
    def falling(self) -> bool:
        """Whether the worst probe is already well below its last smoothed value."""
        name, _ = self.worst
        return bool(name) and self.by_name[name].falling

    @property
    def unconfirmed(self) -> str:
        """Name of a probe whose last value waits for a second one; "" if there is none."""
        return next((name for name, probe in self.by_name.items() if probe.unconfirmed), "")


@dataclass(slots=True)
class Outcomes:
    """How attempts ended: this interval's, with a few earlier ones where there are few."""

    attempts: float = 0.0
    failed: float = 0.0
    timed_out: float = 0.0

    def update(self, *, completed: float, failed: float, timed_out: float) -> None:
        """Count an interval's attempts beside what is carried over of the earlier ones."""
        attempts = completed + failed + timed_out
        kept = min(0.5, max(0.0, _CARRIED - attempts) / self.attempts) if self.attempts else 0.0
        self.attempts = self.attempts * kept + attempts
        self.failed = self.failed * kept + failed
        self.timed_out = self.timed_out * kept + timed_out

    @property
    def failed_ratio(self) -> float:
        """Share of failed attempts, lower confidence bound."""
        return lower_bound(self.failed, self.attempts)

    @property
    def timed_out_ratio(self) -> float:
        """Share of attempts that timed out, lower confidence bound."""
        return lower_bound(self.timed_out, self.attempts)


def lower_bound(hits: float, n: float) -> float:
    """Return the share that hits out of n are at least, with 95 % confidence (Wilson's score interval).

    >>> lower_bound(1, 5) < 0.05 < lower_bound(40, 200)
    True
    """
    if n <= 0:
        return 0.0
    p, zz = min(1.0, hits / n), _Z * _Z / n
    spread = _Z * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return max(0.0, (p + zz / 2 - spread) / (1 + zz))
