"""Lower priorities get leftovers; what the bucket counts is what a reading needs."""

from __future__ import annotations

import pytest

from governor import Attempts, LocalBucket, Outcomes, Priority
from tests.buckets import BURST, Clock, publish


@pytest.mark.parametrize(
    ("priority", "left"),
    [(Priority.EXPIRE, 0), (Priority.DELIVERY, 24), (Priority.REPLAY, 49), (Priority.PRUNE, 74)],
)
async def test_each_priority_leaves_its_part_of_the_burst(
    bucket: LocalBucket, clock: Clock, priority: Priority, left: int
) -> None:
    """Quarters of the burst less one permit; the first leaves nothing."""
    await publish(bucket, 400)
    clock.advance(1)
    assert (await bucket.take(1000, priority=priority)).granted == BURST - left - (left > 0)


async def test_nothing_is_left_over_while_the_first_waits(bucket: LocalBucket, clock: Clock) -> None:
    """However full the bucket is by then: until the unmet request could be met."""
    await publish(bucket, 400)
    clock.advance(1)
    await bucket.take(BURST + 40)  # 40 of them unmet: 0.1 s
    await bucket.refund(BURST)
    assert (await bucket.take(10, priority=Priority.PRUNE)).granted == 0
    clock.advance(0.1)
    assert (await bucket.take(10, priority=Priority.PRUNE)).granted == 10


async def test_a_low_rate_leaves_something_over_too(bucket: LocalBucket, clock: Clock) -> None:
    """At the floor of 5/s the burst is 1.25 permits: an idle fleet prunes, one row at a time."""
    clock.advance(1)
    assert (await bucket.take(10, priority=Priority.PRUNE)).granted == 1


async def test_lower_priorities_are_no_unmet_demand(bucket: LocalBucket, clock: Clock) -> None:
    """Pruning that finds nothing left over must not raise the allowance."""
    await publish(bucket, 400)
    await bucket.take(50, priority=Priority.PRUNE)
    clock.advance(1)
    assert (await bucket.read()).unmet == 0


async def test_unmet_time_is_how_long_a_request_had_to_wait(bucket: LocalBucket, clock: Clock) -> None:
    """40 permits at 400/s are 0.1 s; a wish for ever so many counts 0.25 s, overlaps once."""
    await publish(bucket, 400)
    await bucket.take(40)
    clock.advance(0.05)
    await bucket.take(20)  # until 0.1 s as well: 20 were there
    clock.advance(1)
    assert (await bucket.read()).unmet == 100_000
    await bucket.take(10**6)
    clock.advance(1)
    assert (await bucket.read()).unmet == 350_000


async def test_spent_is_what_was_started(bucket: LocalBucket, clock: Clock) -> None:
    """Granted and charged, less what was given back."""
    await publish(bucket, 400)
    clock.advance(1)
    await bucket.take(30)
    await bucket.charge(5)
    await bucket.refund(3)
    assert (await bucket.read()).spent == 32


async def test_totals_grow_and_their_loss_is_seen() -> None:
    """What came since an earlier look; None once they were lost."""
    bucket = LocalBucket(floor_per_s=5)
    earlier = await bucket.report(Attempts(completed=3))
    later = await bucket.report(Attempts(completed=2, failed=1))
    assert later.since(earlier) == Attempts(completed=2, failed=1)
    assert earlier.since(later) is None


@pytest.mark.parametrize(
    ("completed", "timed_out", "burst"), [(0, 1, False), (0, 3, True), (100, 3, False), (10, 100, True)]
)
def test_a_burst_of_timeouts_is_most_attempts_with_confidence(
    completed: int, timed_out: int, *, burst: bool
) -> None:
    """One timeout is none; three out of three are; three of a hundred are not."""
    outcomes = Outcomes()
    outcomes.note(completed=completed, timed_out=timed_out)
    assert outcomes.burst is burst
    outcomes.put_back(outcomes.drain())
    assert outcomes.drain() == Attempts(completed=completed, timed_out=timed_out)
