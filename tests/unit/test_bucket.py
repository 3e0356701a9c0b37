"""The bucket's arithmetic on a virtual clock, to the permit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from governor import LocalBucket
from tests.buckets import (
    BURST,
    CEILING_MILLI,
    FLOOR_PER_S,
    PERMIT,
    SECOND_US,
    STEPS,
    Clock,
    Step,
    publish,
    take,
)

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
            granted = await take(bucket, step.args["n"])
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
            granted += await take(bucket, step.args["n"])
            promised += await take(reference, step.args["n"])
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
    await take(bucket)
    wait_us = (await bucket.read()).wait_us
    clock.us += wait_us - 1
    assert await take(bucket) == 0
    clock.us += 1
    assert await take(bucket) >= 1


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
    assert await take(bucket) == 1


async def test_refills_at_the_old_rate_before_a_change(bucket: LocalBucket, clock: Clock) -> None:
    """Time before a publication is worth the allowance that was in force then."""
    await publish(bucket, 100)
    clock.advance(0.1)
    await publish(bucket, 400)
    assert await take(bucket) == 10
    clock.advance(0.1)
    await publish(bucket, 100)
    assert await take(bucket) == 25  # 40 were earned; a burst of the lower allowance remains


async def test_burst_is_a_quarter_second(bucket: LocalBucket, clock: Clock) -> None:
    """Idleness is not saved up beyond 0.25 s of allowance, nor are refunds."""
    await publish(bucket, 400)
    clock.advance(5)
    assert await take(bucket) == BURST
    await bucket.refund(1000)
    assert await take(bucket) == BURST


async def test_burst_is_at_least_one_permit(clock: Clock) -> None:
    """A rate below 4/s still saves up the one permit it takes to get anywhere."""
    bucket = LocalBucket(floor_per_s=0.01, clock_us=clock)
    clock.advance(99.999999)
    assert await take(bucket) == 0
    clock.advance(3600)
    assert await take(bucket) == 1


async def test_an_odd_rate_does_not_drift(bucket: LocalBucket, clock: Clock) -> None:
    """33.333/s polled every 7 ms for two minutes gives 33.333/s to the permit."""
    await bucket.publish(allowance_per_s=33.333, ttl_s=3600, epoch=1)
    granted = 0
    for _ in range(120_000 // 7):
        clock.advance(0.007)
        granted += await take(bucket)
    assert granted == 120_000 // 7 * 7 * 33_333 // 1_000_000


async def test_a_published_allowance_lapses_to_the_floor(bucket: LocalBucket, clock: Clock) -> None:
    """The refill across the boundary is the allowance up to it and the floor after it."""
    await bucket.publish(allowance_per_s=40, ttl_s=0.05, epoch=1)
    clock.advance(0.05)
    assert (await bucket.take(0)).allowance_per_s == FLOOR_PER_S
    await bucket.publish(allowance_per_s=0.5, ttl_s=1, epoch=1)
    await take(bucket)
    clock.advance(1.1)
    state = await bucket.read()
    assert state.tokens == round((1 * 0.5 + 0.1 * FLOOR_PER_S) * PERMIT)


async def test_each_allowance_has_its_own_burst(clock: Clock) -> None:
    """What an allowance could not save up before it lapsed is not there afterwards."""
    bucket = LocalBucket(floor_per_s=400, clock_us=clock)
    await bucket.publish(allowance_per_s=4, ttl_s=2, epoch=1)
    clock.advance(2.01)
    assert await take(bucket) == 1 + 4  # a burst of 4/s, and 10 ms of the floor


async def test_a_pause_grants_nothing_and_saves_nothing(bucket: LocalBucket, clock: Clock) -> None:
    """Paused, the bucket is empty at once, gives nothing, and resumes empty."""
    await publish(bucket, 400)
    clock.advance(1)
    await publish(bucket, 0)
    await bucket.refund(50)
    clock.advance(5)
    grant = await bucket.take(10)
    assert (grant.granted, grant.wait_s, grant.allowance_per_s) == (0, 1.2, 0)
    await publish(bucket, 400)
    assert await take(bucket) == 0


async def test_a_slewed_clock_adds_nothing(bucket: LocalBucket, clock: Clock) -> None:
    """A clock that goes back a little adds nothing then, nor again on its way forward."""
    await publish(bucket, 400)
    clock.advance(0.1)
    assert await take(bucket) == 40
    clock.advance(-0.9)
    assert await take(bucket) == 0
    clock.advance(0.9)
    assert await take(bucket) == 0


async def test_a_clock_set_back_starts_afresh(bucket: LocalBucket, clock: Clock) -> None:
    """An hour back neither adds permits, nor starves for an hour, nor prolongs an allowance."""
    await publish(bucket, 400, epoch=7)
    clock.advance(0.2)
    clock.advance(-3600)
    grant = await bucket.take(10)
    assert (grant.granted, grant.wait_s, grant.allowance_per_s) == (0, 0.2, FLOOR_PER_S)
    assert (await bucket.read()).epoch == 7
