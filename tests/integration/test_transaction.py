"""What follows a commit: wake-ups, and the debt of what `place` reclaimed; nothing follows a rollback."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest
from redis.asyncio import Redis

from expiry.holds import Placement, place, place_many
from expiry.settings import Settings
from expiry.wakeups import Wakeups, after_commit, job_id, score_ms, transaction
from expiry.wanted import Item, Wanted
from governor import RedisBucket
from tests.fleet import TENANT, Pool, due, overdue, settings_for, states, wakeups_on
from tests.proxy import proxy_to
from tests.wakes import FROZEN, fill, scores


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    """Give settings on both stores."""
    return settings_for(database_url, redis_url)


@pytest.fixture
async def wakeups(settings: Settings) -> AsyncIterator[Wakeups]:
    """Give the queue."""
    async with wakeups_on(settings, FROZEN) as wakeups:
        yield wakeups


async def test_wake_ups_follow_the_commit(
    conn: asyncpg.Connection[asyncpg.Record], redis: Redis, wakeups: Wakeups
) -> None:
    """Inside the transaction nothing is queued yet; afterwards each hold it was told of is."""
    async with transaction(conn, wakeups) as committed:
        hold = await place(conn, tenant_id=TENANT, items=[Item("r")], ttl_s=60)
        committed.add(hold)
        assert await scores(redis) == {}
    [(wake, at)] = due([hold])
    assert await scores(redis) == {job_id(wake).encode(): score_ms(at)}


async def test_a_rollback_leaves_no_wake_up(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], redis: Redis, wakeups: Wakeups
) -> None:
    """The caller's error passes through; neither store keeps anything."""

    async def place_and_fail() -> None:
        async with transaction(conn, wakeups) as committed:
            committed.add(await place(conn, tenant_id=TENANT, items=[Item("r")], ttl_s=60))
            raise KeyError

    with pytest.raises(KeyError):
        await place_and_fail()
    assert await scores(redis) == {}
    assert await states(pool) == {}


async def test_without_a_queue_the_transaction_is_all(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], redis: Redis
) -> None:
    """In sweep mode there is nothing to enqueue."""
    async with transaction(conn, None) as committed:
        committed.add(await place(conn, tenant_id=TENANT, items=[Item("r")], ttl_s=60))
    assert await states(pool) == {"held": 1}
    assert await scores(redis) == {}


async def reclaiming(pool: Pool) -> Placement:
    """Place a hold that needs the units of three overdue ones."""
    async with pool.acquire() as conn:
        await conn.execute("SELECT expiry_declare($1, 'r', 3)", TENANT)
        await overdue(pool, 3, resource="r")
        placement = await place_many(conn, [Wanted(items=[Item("r", 3)], ttl_s=60)], tenant_id=TENANT)
    assert placement.reclaimed == 3
    return placement


async def test_what_was_reclaimed_is_charged(pool: Pool, wakeups: Wakeups) -> None:
    """Transitions that asked for no permit are booked with the fleet's bucket."""
    placement = await reclaiming(pool)
    bucket = await fill(wakeups, allowance_per_s=10)
    await bucket.take(100)
    await after_commit(placement.holds, placement.reclaimed, wakeups, bucket)
    # Nano-permits; the allowance repays one in 100 ms.
    assert 0 < (await bucket.read()).debt <= 3e9
    assert await wakeups.depth() == 1


async def test_a_redis_that_is_away_fails_no_request(pool: Pool, database_url: str, redis_url: str) -> None:
    """Neither the wake-ups nor the debt can make a committed placement fail."""
    placement = await reclaiming(pool)
    async with proxy_to(redis_url) as proxy, wakeups_on(settings_for(database_url, proxy.url)) as wakeups:
        proxy.refuse()
        bucket = RedisBucket(wakeups.redis, wakeups.bucket_key, floor_per_s=5)
        await after_commit(placement.holds, placement.reclaimed, wakeups, bucket)
