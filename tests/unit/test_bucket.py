"""The bucket's arithmetic on a virtual clock, to the permit; the door; the settings."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from governor import Bucket, GovernorSettings, Limiter, LocalBucket

FLOOR_PER_S = 5.0
CEILING_PER_S = 400.0
BURST = 100  # permits: 0.25 s of the ceiling
SECOND_US = 1_000_000
PERMIT = 1_000_000_000  # nano-permits
CEILING_MILLI = round(CEILING_PER_S * 1000)


class Clock:
    """A clock that moves only when told to, from a date like Redis's own."""

    def __init__(self) -> None:
        self.us = 1_700_000_000 * SECOND_US

    def __call__(self) -> int:
        """Answer as a bucket's clock does."""
        return self.us

    def advance(self, seconds: float) -> None:
        """Let time pass; less than 0 sets the clock back."""
        self.us += round(seconds * SECOND_US)

    def seconds(self) -> float:
        """Answer as time.monotonic does."""
        return self.us / SECOND_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Time passes, then somebody calls the bucket; the integration tests take the same steps."""

    elapsed_us: int
    operation: str
    args: dict[str, Any]

    async def on(self, bucket: Bucket) -> object:
        """Do this step, and return what the bucket said."""
        if self.operation in {"take", "refund", "charge"}:
            return await getattr(bucket, self.operation)(self.args["n"])
        return await getattr(bucket, self.operation)(**self.args)


def _step(operation: str, **args: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    elapsed_us = st.one_of(
        st.sampled_from([0, 1, 999, SECOND_US // 4, SECOND_US, 3_700 * SECOND_US]),
        st.integers(0, 3 * SECOND_US),
    )
    return st.builds(
        Step, elapsed_us=elapsed_us, operation=st.just(operation), args=st.fixed_dictionaries(args)
    )


COUNTS = st.integers(0, 3 * BURST)
TAKES = _step("take", n=COUNTS)
CUTS = _step("cut", factor=st.floats(0, 1), dead_time_s=st.sampled_from([0.0, 0.5, 3.0]))
PUBLISHES = _step(
    "publish",
    allowance_per_s=st.one_of(st.sampled_from([0.0, 3.0, 400.0]), st.floats(0, CEILING_PER_S)),
    ttl_s=st.sampled_from([0.0, 0.2, 6.0, 86_400.0]),
    epoch=st.integers(0, 3),
)
STEPS = st.lists(
    st.one_of(TAKES, TAKES, PUBLISHES, CUTS, _step("refund", n=COUNTS), _step("charge", n=COUNTS)),
    max_size=40,
)


@pytest.fixture
def clock() -> Clock:
    """Give the test its own time."""
    return Clock()


@pytest.fixture
def bucket(clock: Clock) -> LocalBucket:
    """Give the test a new bucket."""
    return LocalBucket(floor_per_s=FLOOR_PER_S, clock_us=clock)


async def _publish(bucket: Bucket, allowance_per_s: float, *, epoch: int = 1) -> None:
    done = await bucket.publish(allowance_per_s=allowance_per_s, ttl_s=6, epoch=epoch)
    assert done.accepted


async def _granted(bucket: Bucket, want: int = 10**6) -> int:
    return (await bucket.take(want)).granted


# What may never be exceeded.


@given(steps=STEPS, losses=st.sets(st.integers(0, 39)), steps_back=st.sets(st.integers(0, 39)))
async def test_no_window_exceeds_ceiling_and_burst(
    steps: list[Step], losses: set[int], steps_back: set[int]
) -> None:
    """P9, to the permit: whatever is published, cut, refunded, lost or set back, in any order."""
    true_us, clock = 0, Clock()
    bucket = LocalBucket(floor_per_s=FLOOR_PER_S, clock_us=clock)
    outstanding = spent = lowest = 0
    for index, step in enumerate(steps):
        true_us += step.elapsed_us
        clock.us += step.elapsed_us - (index in steps_back) * (index % 3 + 1) * SECOND_US // 2
        # `level` = permits spent - what the ceiling allows up to now; P9 says that it never rises
        # by more than a burst above its lowest point so far, which is the start of some window.
        lowest = min(lowest, spent - true_us * CEILING_MILLI)
        if index in losses:
            bucket = LocalBucket(floor_per_s=FLOOR_PER_S, clock_us=clock)
        if step.operation == "refund":  # only what was granted can be given back
            given_back = min(outstanding, step.args["n"])
            before = (await bucket.read()).tokens
            await bucket.refund(given_back)
            returned = (await bucket.read()).tokens - before
            outstanding, spent = outstanding - given_back, spent - returned
        elif step.operation == "take":
            granted = await _granted(bucket, step.args["n"])
            outstanding, spent = outstanding + granted, spent + granted * PERMIT
        else:
            await step.on(bucket)
        assert spent - true_us * CEILING_MILLI - lowest <= BURST * PERMIT


@given(steps=STEPS)
async def test_the_floor_always_flows(steps: list[Step]) -> None:
    """Whatever is charged, cut or left to lapse, takers get what the floor alone would give."""
    clock = Clock()
    bucket = LocalBucket(floor_per_s=FLOOR_PER_S, clock_us=clock)
    reference = LocalBucket(floor_per_s=FLOOR_PER_S, clock_us=clock)
    granted = promised = 0
    for step in steps:
        clock.us += step.elapsed_us
        if step.operation == "take":
            granted += await _granted(bucket, step.args["n"])
            promised += await _granted(reference, step.args["n"])
        elif step.operation != "publish" or step.args["allowance_per_s"] >= FLOOR_PER_S:
            await step.on(bucket)
        assert granted >= promised


@given(steps=STEPS)
async def test_the_wait_is_exact(steps: list[Step]) -> None:
    """A microsecond before wait_s there is no permit, at wait_s there is one."""
    clock = Clock()
    bucket = LocalBucket(floor_per_s=FLOOR_PER_S, clock_us=clock)
    for step in steps:
        clock.us += step.elapsed_us
        await step.on(bucket)
    await _granted(bucket)
    wait_us = (await bucket.read()).wait_us
    clock.us += wait_us - 1
    assert await _granted(bucket) == 0
    clock.us += 1
    assert await _granted(bucket) >= 1


@given(steps=STEPS, looks=st.lists(st.integers(1, SECOND_US), min_size=40, max_size=40))
async def test_looking_changes_nothing(steps: list[Step], looks: list[int]) -> None:
    """Takes of nothing in between leave no trace: no rounding, no drift, however often."""
    clock = Clock()
    watched = LocalBucket(floor_per_s=FLOOR_PER_S, clock_us=clock)
    alone = LocalBucket(floor_per_s=FLOOR_PER_S, clock_us=clock)
    for step, look_us in zip(steps, looks, strict=False):
        between_us = min(look_us, step.elapsed_us)
        if step.elapsed_us <= 3 * SECOND_US:
            clock.us += between_us
            await watched.take(0)
            await watched.read()
            clock.us += step.elapsed_us - between_us
        assert await step.on(watched) == await step.on(alone)
    assert await watched.read() == await alone.read()


# Starting, refilling, lapsing.


async def test_starts_empty_at_the_floor(bucket: LocalBucket, clock: Clock) -> None:
    """A new, or lost, bucket holds nothing; its first permit comes at the floor's pace."""
    grant = await bucket.take(10)
    assert (grant.granted, grant.wait_s, grant.allowance_per_s) == (0, 0.2, FLOOR_PER_S)
    clock.advance(0.2)
    assert await _granted(bucket) == 1


async def test_refills_at_the_old_rate_before_a_change(bucket: LocalBucket, clock: Clock) -> None:
    """Time before a publication is worth the allowance that was in force then."""
    await _publish(bucket, 100)
    clock.advance(0.1)
    await _publish(bucket, 400)
    assert await _granted(bucket) == 10
    clock.advance(0.1)
    await _publish(bucket, 100)
    assert await _granted(bucket) == 25  # 40 were earned; a burst of the lower allowance remains


async def test_burst_is_a_quarter_second(bucket: LocalBucket, clock: Clock) -> None:
    """Idleness is not saved up beyond 0.25 s of allowance, nor are refunds."""
    await _publish(bucket, 400)
    clock.advance(5)
    assert await _granted(bucket) == BURST
    await bucket.refund(1000)
    assert await _granted(bucket) == BURST


async def test_burst_is_at_least_one_permit(clock: Clock) -> None:
    """A rate below 4/s still saves up the one permit it takes to get anywhere."""
    bucket = LocalBucket(floor_per_s=0.01, clock_us=clock)
    clock.advance(99.999999)
    assert await _granted(bucket) == 0
    clock.advance(3600)
    assert await _granted(bucket) == 1


async def test_an_odd_rate_does_not_drift(bucket: LocalBucket, clock: Clock) -> None:
    """33.333/s polled every 7 ms for two minutes gives 33.333/s to the permit."""
    await bucket.publish(allowance_per_s=33.333, ttl_s=3600, epoch=1)
    granted = 0
    for _ in range(120_000 // 7):
        clock.advance(0.007)
        granted += await _granted(bucket)
    assert granted == 120_000 // 7 * 7 * 33_333 // 1_000_000


async def test_a_published_allowance_lapses_to_the_floor(bucket: LocalBucket, clock: Clock) -> None:
    """The refill across the boundary is the allowance up to it and the floor after it."""
    await bucket.publish(allowance_per_s=40, ttl_s=0.05, epoch=1)
    clock.advance(0.05)
    assert (await bucket.take(0)).allowance_per_s == FLOOR_PER_S
    await bucket.publish(allowance_per_s=0.5, ttl_s=1, epoch=1)
    await _granted(bucket)
    clock.advance(1.1)
    state = await bucket.read()
    assert state.tokens == round((1 * 0.5 + 0.1 * FLOOR_PER_S) * PERMIT)


async def test_each_allowance_has_its_own_burst(clock: Clock) -> None:
    """What an allowance could not save up before it lapsed is not there afterwards."""
    bucket = LocalBucket(floor_per_s=400, clock_us=clock)
    await bucket.publish(allowance_per_s=4, ttl_s=2, epoch=1)
    clock.advance(2.01)
    assert await _granted(bucket) == 1 + 4  # a burst of 4/s, and 10 ms of the floor


async def test_a_pause_grants_nothing_and_saves_nothing(bucket: LocalBucket, clock: Clock) -> None:
    """Paused, the bucket is empty at once, gives nothing, and resumes empty."""
    await _publish(bucket, 400)
    clock.advance(1)
    await _publish(bucket, 0)
    await bucket.refund(50)
    clock.advance(5)
    grant = await bucket.take(10)
    assert (grant.granted, grant.wait_s, grant.allowance_per_s) == (0, 1.2, 0)
    await _publish(bucket, 400)
    assert await _granted(bucket) == 0


async def test_a_slewed_clock_adds_nothing(bucket: LocalBucket, clock: Clock) -> None:
    """A clock that goes back a little adds nothing then, nor again on its way forward."""
    await _publish(bucket, 400)
    clock.advance(0.1)
    assert await _granted(bucket) == 40
    clock.advance(-0.9)
    assert await _granted(bucket) == 0
    clock.advance(0.9)
    assert await _granted(bucket) == 0


async def test_a_clock_set_back_starts_afresh(bucket: LocalBucket, clock: Clock) -> None:
    """An hour back neither adds permits, nor starves for an hour, nor prolongs an allowance."""
    await _publish(bucket, 400, epoch=7)
    clock.advance(0.2)
    clock.advance(-3600)
    grant = await bucket.take(10)
    assert (grant.granted, grant.wait_s, grant.allowance_per_s) == (0, 0.2, FLOOR_PER_S)
    assert (await bucket.read()).epoch == 7


# Publishing, cutting, charging.


async def test_a_lower_epoch_is_refused(bucket: LocalBucket) -> None:
    """A leader that lost its lease cannot publish over its successor; the same epoch can."""
    await _publish(bucket, 100, epoch=2)
    stale = await bucket.publish(allowance_per_s=400, ttl_s=6, epoch=1)
    assert (stale.accepted, stale.epoch, stale.allowance_per_s) == (False, 2, 100)
    await _publish(bucket, 50, epoch=2)
    await _publish(bucket, 60, epoch=3)
    assert (await bucket.read()).allowance_per_s == 60


async def test_a_cut_only_lowers_and_once_per_dead_time(bucket: LocalBucket, clock: Clock) -> None:
    """Forty workers that see one incident halve the allowance once, and never below the floor."""
    await _publish(bucket, 400)
    cuts = [await bucket.cut(factor=0.5, dead_time_s=2) for _ in range(40)]
    assert [cut.applied for cut in cuts] == [True] + [False] * 39
    assert {cut.allowance_per_s for cut in cuts} == {200}
    clock.advance(2)
    unchanged = await bucket.cut(factor=1, dead_time_s=2)
    assert (unchanged.applied, unchanged.allowance_per_s) == (False, 200)
    deepest = await bucket.cut(factor=0, dead_time_s=2)
    assert (deepest.applied, deepest.allowance_per_s) == (True, FLOOR_PER_S)


@pytest.mark.parametrize("allowance_per_s", [0, 3])
async def test_a_cut_does_not_raise_to_the_floor(bucket: LocalBucket, allowance_per_s: float) -> None:
    """An allowance below the floor (a pause) stays where it is."""
    await _publish(bucket, allowance_per_s)
    cut = await bucket.cut(factor=0.5, dead_time_s=2)
    assert (cut.applied, cut.allowance_per_s) == (False, allowance_per_s)


async def test_a_cut_holds_for_its_dead_time(bucket: LocalBucket, clock: Clock) -> None:
    """A publication decided before the cut cannot undo it; a lower one counts, a later one too."""
    await _publish(bucket, 400)
    await bucket.cut(factor=0.5, dead_time_s=2)
    await _publish(bucket, 400)
    assert (await bucket.read()).allowance_per_s == 200
    await _publish(bucket, 50)
    assert (await bucket.read()).allowance_per_s == 50
    clock.advance(2)
    await _publish(bucket, 400)
    assert (await bucket.read()).allowance_per_s == 400


async def test_charges_use_tokens_then_become_debt(bucket: LocalBucket, clock: Clock) -> None:
    """Load that asked for no permit slows the takers by as much, and spares the floor's burst."""
    await _publish(bucket, 205)
    clock.advance(1)
    await bucket.charge(100)
    assert await _granted(bucket) == 1  # of 51.25, 1.25 are the floor's
    assert (await bucket.read()).debt == 50 * PERMIT
    clock.advance(0.25)  # 200/s repay the 50, 5/s flow
    assert (await bucket.read()).debt == 0
    clock.advance(0.1)
    assert await _granted(bucket) == 22


async def test_debt_is_bounded(bucket: LocalBucket, clock: Clock) -> None:
    """A billion charges delay the takers by a second of allowance, not for ever."""
    await _publish(bucket, 400)
    await bucket.charge(10**9)
    assert (await bucket.read()).debt == 400 * PERMIT
    clock.advance(1.02)
    await _granted(bucket)
    clock.advance(0.25)
    assert await _granted(bucket) == BURST


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        ("take", {"want": -1}),
        ("charge", {"n": 10**10}),
        ("publish", {"allowance_per_s": float("nan"), "ttl_s": 6, "epoch": 1}),
        ("publish", {"allowance_per_s": float("inf"), "ttl_s": 6, "epoch": 1}),
        ("publish", {"allowance_per_s": 10, "ttl_s": 10**6, "epoch": 1}),
        ("cut", {"factor": 1.5, "dead_time_s": 1}),
    ],
)
async def test_out_of_range_is_refused(bucket: LocalBucket, operation: str, args: dict[str, Any]) -> None:
    """What a column or a double could not hold is a ValueError, and changes nothing."""
    before = await bucket.read()
    with pytest.raises(ValueError, match="must be"):
        await getattr(bucket, operation)(**args)
    assert await bucket.read() == before


# The door.


class Sleeper:
    """A sleep that moves the clock and lets other tasks run."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.slept_s: list[float] = []
        self.asleep = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        """Sleep no time at all."""
        self.slept_s.append(seconds)
        self.asleep.set()
        self.clock.advance(seconds)
        await asyncio.sleep(0)  # no time passes: only a turn of the loop


@pytest.fixture
def sleeper(clock: Clock) -> Sleeper:
    """Give the test a record of who slept."""
    return Sleeper(clock)


@pytest.fixture
def limiter(bucket: LocalBucket, clock: Clock, sleeper: Sleeper) -> Limiter:
    """Give the test a door to its bucket."""
    return Limiter(bucket, clock_s=clock.seconds, sleep=sleeper)


async def test_acquire_gives_what_is_there(
    limiter: Limiter, bucket: LocalBucket, clock: Clock, sleeper: Sleeper
) -> None:
    """A batch takes what it gets, at once; what it does not use goes back."""
    await _publish(bucket, 400)
    clock.advance(0.1)
    assert await limiter.acquire(100, timeout_s=1) == 40
    await limiter.refund(15)
    assert await limiter.acquire(100, timeout_s=1) == 15
    assert sleeper.slept_s == []


async def test_acquire_waits_for_the_first_permit(limiter: Limiter, sleeper: Sleeper) -> None:
    """With none there, it sleeps until the first one is, and no longer."""
    assert await limiter.acquire(100, timeout_s=1) == 1
    assert sleeper.slept_s == [0.2]


async def test_acquire_gives_up_in_time(limiter: Limiter, bucket: LocalBucket, clock: Clock) -> None:
    """Paused for longer than the caller can wait: 0, when its time is up."""
    await _publish(bucket, 0)
    start_us = clock.us
    assert await limiter.acquire(1, timeout_s=0.6) == 0
    assert clock.us - start_us == 600_000
    assert await limiter.acquire(1, timeout_s=0) == 0


async def test_acquire_notices_a_resume(limiter: Limiter, bucket: LocalBucket, sleeper: Sleeper) -> None:
    """A waiter told to come back in seconds still looks again soon."""
    await _publish(bucket, 0)
    waiting = asyncio.create_task(limiter.acquire(1, timeout_s=5))
    await sleeper.asleep.wait()
    await _publish(bucket, 400)
    assert await waiting == 1
    assert sum(sleeper.slept_s) < 1


async def test_waiters_are_served_in_turn(limiter: Limiter, bucket: LocalBucket) -> None:
    """Of many tasks at one door the first to come is the first to go, and all get through."""
    await _publish(bucket, 10)
    served: list[int] = []

    async def wait(number: int) -> None:
        assert await limiter.acquire(1, timeout_s=60) == 1
        served.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(wait(number))
    assert all(first < second for first, second in pairwise(served))


async def test_the_queue_at_the_door_is_bounded_too(bucket: LocalBucket, clock: Clock) -> None:
    """Who stands behind a waiter gives up in time as well, and leaves the door usable."""
    asleep, wake = asyncio.Event(), asyncio.Event()

    async def sleep(seconds: float) -> None:
        asleep.set()
        await wake.wait()
        clock.advance(seconds)

    limiter = Limiter(bucket, clock_s=clock.seconds, sleep=sleep)
    first = asyncio.create_task(limiter.acquire(1, timeout_s=5))
    await asleep.wait()
    assert await limiter.acquire(1, timeout_s=0.001) == 0
    wake.set()
    assert await first == 1
    assert await limiter.acquire(1, timeout_s=5) == 1


# The settings.


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """GOVERNOR_* sets a field; what is not set has its documented default."""
    monkeypatch.setenv("GOVERNOR_FLOOR_PER_S", "0.5")
    monkeypatch.delenv("GOVERNOR_CEILING_PER_S", raising=False)
    settings = GovernorSettings()
    assert (settings.floor_per_s, settings.ceiling_per_s) == (0.5, 20_000)


@pytest.mark.parametrize(
    ("floor_per_s", "ceiling_per_s"), [(10, 9), (0, 10), (5, float("inf")), (float("nan"), 10)]
)
def test_settings_that_contradict_are_refused(floor_per_s: float, ceiling_per_s: float) -> None:
    """A floor of nothing or above the ceiling does not start."""
    with pytest.raises(ValidationError):
        GovernorSettings(floor_per_s=floor_per_s, ceiling_per_s=ceiling_per_s)
