"""One token bucket shared by a fleet, in three forms that agree to the permit.

`LocalBucket` (one process, here), `RedisBucket` (bucket.lua) and `PostgresBucket` (one row) are the same
integer arithmetic: rates in milli-permits/s, times in µs, tokens and debt in nano-permits, which is
milli-permits/s x µs. A refill is thus a product of integers: nothing is rounded, nothing drifts.

P9: over any window, permits granted less those refunded are at most allowance x window + burst.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Protocol, Self

# This and the arithmetic below are repeated, step by step, in bucket.lua and in bucket_postgres.REFILLED.
_PERMIT = 1_000_000_000  # nano-permits
_BURST_US = 250_000  # the bucket holds 0.25 s of allowance, or one permit
_DEBT_US = 1_000_000  # debt is at most 1 s of allowance, or one permit
_STEP_BACK_US = 1_000_000  # a clock further back than this has been set, not slewed
_IDLE_US = 3_600_000_000  # more idle time than this counts as this: all is full by then
_UNMET_US = 250_000  # whoever is short comes back within this, or does not want any more
_UNMET_MAX = 1_000_000  # permits; a longer want waits for _UNMET_US all the same

# Beyond these the products above leave 2^53 (Lua) or 2^63 (SQL).
RATE_PER_S_MIN = 0.001
RATE_PER_S_MAX = 1_000_000.0
_SPAN_S_MAX = 86_400.0
_COUNT_MAX = 1_000_000_000
_EPOCH_MAX = 2**53 - 1


class BucketUnavailable(Exception):  # noqa: N818 - says what is the matter, as StoreUnavailable does
    """The bucket did not answer: start nothing, or fall back to another bucket."""

    def __init__(self) -> None:
        """Carry the docstring as the message; the driver's error is the cause."""
        super().__init__(type(self).__doc__)


class Priority(IntEnum):
    """Who may take how deep: quarters of the burst that are left to those above.

    Below the first, nothing is granted while a request of the first is unmet either: only leftovers.
    """

    EXPIRE = 0
    DELIVERY = 1
    REPLAY = 2
    PRUNE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """How attempts ended: well, by a transient error of the dependency, or by running out of time."""

    completed: int = 0
    failed: int = 0
    timed_out: int = 0

    def since(self, earlier: Attempts) -> Attempts | None:
        """Return what came after earlier totals; None where they were lost meanwhile."""
        left = Attempts(
            completed=self.completed - earlier.completed,
            failed=self.failed - earlier.failed,
            timed_out=self.timed_out - earlier.timed_out,
        )
        return left if min(left.completed, left.failed, left.timed_out) >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """`granted` permits, 0..want; the next one is there in `wait_s`, if nobody takes it."""

    granted: int
    wait_s: float
    allowance_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Whether a publication was accepted, the bucket's epoch, and the allowance now in force."""

    accepted: bool
    epoch: int
    allowance_per_s: float
    micros: int  # when, on the bucket's clock, µs


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Whether a cut lowered anything, and the allowance now in force."""

    applied: bool
    allowance_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketState:
    """A bucket at one instant, as stored: integers only (units in the module's docstring)."""

    tokens: int = 0  # never negative; a whole permit is 10^9
    debt: int = 0  # transitions charged and not yet repaid
    micros: int  # last refill, µs on the bucket's clock
    rate: int = 0  # published allowance; counts until `until`, then the floor does
    floor: int  # of whoever called last
    epoch: int = 0  # highest that published; 0 = nobody, or a fixed allowance
    until: int = 0  # µs; the published allowance lapses
    cut_until: int = 0  # µs; the last cut holds, and no other may follow
    spent: int = 0  # permits granted and charged, less those refunded, since the bucket began
    unmet: int = 0  # µs during which a request of the first priority was unmet, likewise
    unmet_until: int = 0  # µs; the last unmet request could be met

    @classmethod
    def of(cls, values: Iterable[int]) -> Self:
        """Return the state that a server answered, its values in the order of the fields."""
        return cls(**dict(zip((f.name for f in fields(cls)), values, strict=True)))

    @property
    def in_force(self) -> int:
        """The published allowance, or the floor once that has lapsed; milli-permits/s."""
        return self.rate if self.micros < self.until else self.floor

    @property
    def allowance_per_s(self) -> float:
        """The allowance in force, permits/s."""
        return self.in_force / 1000

    @property
    def permits(self) -> int:
        """Whole permits that a `take` would be granted now."""
        return self.tokens // _PERMIT

    @property
    def wait_us(self) -> int:
        """µs until a whole permit is there, 0 if one is; exact as long as nobody else calls.

        Tokens grow by max(t x rate - debt, t x min(rate, floor)) before the lapse, by the floor after.
        """
        need = _PERMIT - self.tokens
        if need <= 0:
            return 0
        left = max(0, self.until - self.micros)
        if left and self.rate:
            slow = min(self.rate, self.floor)
            wait = min(_ceil_div(need + self.debt, self.rate), _ceil_div(need, slow))
            if wait <= left:
                return wait
            need -= max(left * self.rate - self.debt, left * slow)
        return left + _ceil_div(need, self.floor)


class Bucket(Protocol):
    """Permits for a fleet.

    Counts are 0..10^9, rates 0..10^6 permits/s, spans 0..86400 s; beyond these it raises ValueError.
    Where it does not answer it raises BucketUnavailable: start nothing.
    """

    async def take(self, want: int, *, priority: Priority = Priority.EXPIRE) -> Grant:
        """Grant min(want, whole permits there for this priority); never waits for more."""

    async def refund(self, n: int) -> None:
        """Give back n granted permits that started nothing; what exceeds the burst is lost."""

    async def charge(self, n: int) -> None:
        """Book n transitions that asked for no permit: tokens above the floor's share, then debt.

        Debt is repaid from the allowance above the floor: it slows `take` down to the floor and never
        below, however much is charged. It is kept up to 1 s of allowance; beyond that it is load that
        the database has already carried.
        """

    async def publish(self, *, allowance_per_s: float, ttl_s: float, epoch: int, by_us: int = 0) -> Published:
        """Set the allowance (0 = paused) for ttl_s; after that the floor counts.

        Refused if the bucket has seen a higher epoch, or if its clock is past by_us (0 = never): a leader
        that was paused between deciding and publishing comes too late, whoever leads by then. Within the
        dead time of a cut it may lower, not raise: it was decided without knowing of the cut. Epoch 0 is
        for a fixed allowance, which any
        controller (epochs from 1) overrules.
        """

    async def cut(self, *, factor: float, dead_time_s: float) -> Cut:
        """Multiply the allowance by factor (0..1), not below the floor, once per dead time.

        Anybody may: it only lowers. It lasts until the first publication after dead_time_s.
        """

    async def read(self) -> BucketState:
        """Return the state as it is now, and change nothing."""

    async def report(self, attempts: Attempts) -> Attempts:
        """Add to the fleet's totals of how attempts ended, and return them."""


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _burst(rate: int) -> int:
    # Paused holds nothing: a resume starts empty, however long the pause was.
    return max(_PERMIT, rate * _BURST_US) if rate else 0


def _clamped(state: BucketState) -> BucketState:
    debt_max = max(_PERMIT, state.in_force * _DEBT_US)
    return replace(state, tokens=min(state.tokens, _burst(state.in_force)), debt=min(state.debt, debt_max))


def _flowed(state: BucketState, *, elapsed_us: int, rate: int) -> BucketState:
    if elapsed_us <= 0:
        return state
    elapsed_us = min(elapsed_us, _IDLE_US)
    repaid = min(state.debt, elapsed_us * max(rate - state.floor, 0))
    tokens = min(_burst(rate), state.tokens + elapsed_us * rate - repaid)
    return replace(state, tokens=tokens, debt=state.debt - repaid)


def _refilled(state: BucketState, *, now_us: int, floor: int) -> BucketState:
    """Bring a state to now at the rates that were in force since, whatever changes next."""
    if now_us < state.micros - _STEP_BACK_US:
        # Its clock was set back. Waiting for it to catch up could starve the fleet for hours, so the
        # bucket starts afresh: empty, at the floor, until somebody publishes again.
        return BucketState(micros=now_us, floor=floor, epoch=state.epoch)
    now_us = max(now_us, state.micros)
    unmet = state.unmet + max(0, min(now_us, state.unmet_until) - state.micros)
    state = replace(state, unmet=unmet)
    split = min(max(state.until, state.micros), now_us)
    state = _flowed(state, elapsed_us=split - state.micros, rate=state.rate)
    state = _flowed(state, elapsed_us=now_us - split, rate=state.floor)
    return _clamped(replace(state, micros=now_us, floor=floor))


def _take(state: BucketState, want: int, priority: int) -> tuple[int, BucketState]:
    rate = state.in_force
    spared = max(0, _burst(rate) - _PERMIT) * priority // 4
    there = max(0, state.tokens - spared) // _PERMIT
    granted = 0 if priority and state.micros < state.unmet_until else min(want, there)
    unmet_until = state.unmet_until
    if granted < want and not priority:
        short = min(want - granted, _UNMET_MAX) * _PERMIT
        wait_us = min(_UNMET_US, _ceil_div(short, rate)) if rate else _UNMET_US
        unmet_until = max(unmet_until, state.micros + wait_us)
    tokens, spent = state.tokens - granted * _PERMIT, state.spent + granted
    return granted, replace(state, tokens=tokens, spent=spent, unmet_until=unmet_until)


def _refund(state: BucketState, n: int) -> tuple[int, BucketState]:
    return 0, replace(state, tokens=state.tokens + n * _PERMIT, spent=state.spent - n)


def _charge(state: BucketState, n: int) -> tuple[int, BucketState]:
    # The floor's own share of the tokens is spared, or steady charges would starve take.
    spared = _burst(min(state.in_force, state.floor))
    paid = min(n * _PERMIT, max(0, state.tokens - spared))
    debt = state.debt + n * _PERMIT - paid
    return 0, replace(state, tokens=state.tokens - paid, debt=debt, spent=state.spent + n)


def _publish(state: BucketState, rate: int, ttl_us: int, epoch: int, by_us: int) -> tuple[int, BucketState]:
    if epoch < state.epoch or (by_us and state.micros > by_us):
        return 0, state
    cap = max(state.rate, state.floor) if state.micros < state.cut_until else rate
    return 1, replace(state, rate=min(rate, cap), until=state.micros + ttl_us, epoch=epoch)


def _cut(state: BucketState, factor_ppm: int, dead_us: int) -> tuple[int, BucketState]:
    target = max(state.floor, state.in_force * factor_ppm // 1_000_000)
    if state.micros < state.cut_until or target >= state.in_force:
        return 0, state
    return 1, replace(state, rate=target, cut_until=state.micros + dead_us)


def _whole(name: str, value: float, high: float, *, low: float = 0, scale: int = 1) -> int:
    """Return value x scale, or raise: nothing beyond a bigint column or a Lua double gets past here."""
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} must be {low}..{high}, not {value}")
    return round(value * scale)


class Form:
    """The operations over one integer call; a form says where the state lives."""

    def __init__(self, floor_per_s: float) -> None:
        """Keep the floor in milli-permits/s."""
        self._floor = _whole("floor_per_s", floor_per_s, RATE_PER_S_MAX, low=RATE_PER_S_MIN, scale=1000)

    async def _call(self, operation: str, *args: int) -> tuple[int, BucketState]:
        raise NotImplementedError

    async def take(self, want: int, *, priority: Priority = Priority.EXPIRE) -> Grant:
        """Grant min(want, whole permits there for this priority); never waits for more."""
        granted, state = await self._call("take_at", _whole("want", want, _COUNT_MAX), int(priority))
        wait_s = state.wait_us / 1_000_000
        return Grant(granted=granted, wait_s=wait_s, allowance_per_s=state.allowance_per_s)

    async def refund(self, n: int) -> None:
        """Give back n granted permits that started nothing."""
        await self._call("refund", _whole("n", n, _COUNT_MAX))

    async def charge(self, n: int) -> None:
        """Book n transitions that asked for no permit."""
        await self._call("charge", _whole("n", n, _COUNT_MAX))

    async def publish(self, *, allowance_per_s: float, ttl_s: float, epoch: int, by_us: int = 0) -> Published:
        """Set the allowance for ttl_s, unless the bucket has seen a higher epoch or it is past by_us."""
        rate = _whole("allowance_per_s", allowance_per_s, RATE_PER_S_MAX, scale=1000)
        ttl_us = _whole("ttl_s", ttl_s, _SPAN_S_MAX, scale=1_000_000)
        fence = (_whole("epoch", epoch, _EPOCH_MAX), _whole("by_us", by_us, _EPOCH_MAX))
        accepted, state = await self._call("publish", rate, ttl_us, *fence)
        return Published(
            accepted=bool(accepted),
            epoch=state.epoch,
            allowance_per_s=state.allowance_per_s,
            micros=state.micros,
        )

    async def cut(self, *, factor: float, dead_time_s: float) -> Cut:
        """Lower the allowance, once per dead time."""
        factor_ppm = _whole("factor", factor, 1, scale=1_000_000)
        dead_us = _whole("dead_time_s", dead_time_s, _SPAN_S_MAX, scale=1_000_000)
        applied, state = await self._call("cut", factor_ppm, dead_us)
        return Cut(applied=bool(applied), allowance_per_s=state.allowance_per_s)

    async def read(self) -> BucketState:
        """Return the state as it is now."""
        return (await self._call("read"))[1]

    async def report(self, attempts: Attempts) -> Attempts:
        """Add to the fleet's totals, and return them."""
        counts = (attempts.completed, attempts.failed, attempts.timed_out)
        totals = await self._count(*(_whole("attempts", n, _COUNT_MAX) for n in counts))
        return Attempts(completed=totals[0], failed=totals[1], timed_out=totals[2])

    async def _count(self, completed: int, failed: int, timed_out: int) -> tuple[int, int, int]:
        raise NotImplementedError


class LocalBucket(Form):
    """A bucket for one event loop; lost with the process, and so empty at every start."""

    # Refilled state and integer arguments in, outcome and state (to be clamped) out.
    _OPERATIONS: dict[str, Callable[..., tuple[int, BucketState]]] = {  # noqa: RUF012 - constant
        "take_at": _take,
        "refund": _refund,
        "charge": _charge,
        "publish": _publish,
        "cut": _cut,
    }

    def __init__(
        self, *, floor_per_s: float, clock_us: Callable[[], int] = lambda: time.monotonic_ns() // 1000
    ) -> None:
        """Start empty, at the floor; `clock_us` returns µs since anything."""
        super().__init__(floor_per_s)
        self._clock_us = clock_us
        self._state = BucketState(micros=clock_us(), floor=self._floor)
        self._totals = (0, 0, 0)

    async def _call(self, operation: str, *args: int) -> tuple[int, BucketState]:
        now = _refilled(self._state, now_us=self._clock_us(), floor=self._floor)
        if operation == "read":
            return 0, now
        outcome, state = self._OPERATIONS[operation](now, *args)
        self._state = _clamped(state)
        return outcome, self._state

    async def _count(self, completed: int, failed: int, timed_out: int) -> tuple[int, int, int]:
        first, second, third = self._totals
        self._totals = (first + completed, second + failed, third + timed_out)
        return self._totals
