"""Permits come from the first bucket that answers, and from one of the two only."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from expiry.permits import BATCH_S_OF_ALLOWANCE, Permits, batch_size
from governor import BucketUnavailable, GovernorSettings, LocalBucket, RedisBucket

GOVERNOR = GovernorSettings(floor_per_s=5, ceiling_per_s=1000)


class Clock:
    """Microseconds that pass when told to."""

    us = 0

    def __call__(self) -> int:
        """Return the time."""
        return self.us


@pytest.fixture
def clock() -> Clock:
    """Give the clock of both buckets."""
    return Clock()


def bucket(clock: Clock) -> LocalBucket:
    """Return an empty bucket at the floor."""
    return LocalBucket(floor_per_s=GOVERNOR.floor_per_s, clock_us=clock)


@pytest.fixture
async def away() -> AsyncIterator[RedisBucket]:
    """Give a bucket whose Redis refuses every connection."""
    async with Redis(port=1, retry=Retry(NoBackoff(), 0)) as nobody:
        yield RedisBucket(nobody, "bucket", floor_per_s=GOVERNOR.floor_per_s)


@pytest.mark.parametrize(
    ("allowance_per_s", "size"), [(0, 2), (5, 2), (100, 20), (2499, 499), (2500, 500), (1e9, 500)]
)
def test_a_batch_is_a_fifth_of_a_second_of_the_allowance(allowance_per_s: float, size: int) -> None:
    """At least two holds, at most as many as a statement may take."""
    assert BATCH_S_OF_ALLOWANCE == 0.2
    assert batch_size(500, allowance_per_s) == size
    assert batch_size(1, allowance_per_s) == 1


async def test_the_ceiling_is_published_to_one_bucket_only(clock: Clock) -> None:
    """With both, the fleet would start twice as much."""
    shared, row = bucket(clock), bucket(clock)
    await Permits(shared, row, GOVERNOR).publish()
    assert (await shared.read()).allowance_per_s == 1000
    assert (await row.read()).allowance_per_s == GOVERNOR.floor_per_s


async def test_a_publication_outlives_one_that_was_lost(clock: Clock) -> None:
    """Two intervals without one leave the allowance as it is; silence drops it to the floor."""
    shared = bucket(clock)
    await Permits(shared, bucket(clock), GOVERNOR).publish()
    clock.us += 6_000_000
    assert (await shared.read()).allowance_per_s == 1000
    clock.us += 2_000_000
    assert (await shared.read()).allowance_per_s == GOVERNOR.floor_per_s


async def test_permits_are_taken_from_and_given_back_to_the_shared_bucket(clock: Clock) -> None:
    """While it answers, the row in PostgreSQL is left alone."""
    shared, row = bucket(clock), bucket(clock)
    permits = Permits(shared, row, GOVERNOR)
    await permits.publish()
    clock.us += 1_000_000
    before = await row.read()
    assert await permits.take(300, timeout_s=0) == 250
    assert await permits.take(1, timeout_s=0) == 0
    await permits.refund(7)
    assert await permits.take(300, timeout_s=0) == 7
    assert await row.read() == before


async def test_the_row_stands_in_and_is_asked_at_once_for_a_while(clock: Clock, away: RedisBucket) -> None:
    """A bucket that failed is not tried again at each batch; after a while it is."""
    permits = Permits(away, bucket(clock), GOVERNOR)
    clock.us += 10_000_000
    assert await permits.take(1, timeout_s=0) == 1
    first = permits._avoid_until_s  # noqa: SLF001 - set at each failure
    assert await permits.take(1, timeout_s=0) == 0
    assert permits._avoid_until_s == first  # noqa: SLF001 - it was not tried
    permits._avoid_until_s = 0  # noqa: SLF001 - as if the while were over
    assert await permits.take(1, timeout_s=0) == 0
    assert permits._avoid_until_s > first  # noqa: SLF001 - it was tried, and failed again


async def test_who_has_no_redis_publishes_to_the_row(clock: Clock, away: RedisBucket) -> None:
    """The allowance has a home when Redis is away or not wanted."""
    for primary in (None, away):
        row = bucket(clock)
        permits = Permits(primary, row, GOVERNOR)
        await permits.publish()
        assert (await row.read()).allowance_per_s == 1000


async def test_refunds_in_an_outage_are_lost_quietly(clock: Clock, away: RedisBucket) -> None:
    """Giving back never fails: it could only have made us faster."""
    await Permits(away, bucket(clock), GOVERNOR).refund(3)


async def test_without_any_bucket_nothing_may_start(away: RedisBucket) -> None:
    """Neither answers: that is an error, not zero permits and not all of them."""
    with pytest.raises(BucketUnavailable):
        await Permits(away, away, GOVERNOR).take(1, timeout_s=0)
