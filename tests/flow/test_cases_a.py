"""Cases A1, A4, A5, A7 and A9: renewed, ancient, emptied, in another time zone, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta

import pytest
from redis.asyncio import Redis

from expiry.expire import Wake
from expiry.holds import renew
from expiry.settings import Settings
from expiry.wakeups import job_id, score_ms
from tests.fleet import (
    BACKDATE,
    TENANT,
    Counted,
    Pool,
    assert_kept,
    child_worker,
    due,
    expired,
    lags_ms,
    overdue,
    placed,
    serving,
    settings_for,
    states,
    sweep_of,
    wakeups_on,
    working,
)
from tests.helpers import eventually
from tests.wakes import scores


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    """Give a service whose loops come often."""
    return settings_for(
        database_url,
        redis_url,
        promoter_interval_s=0.2,
        sweep_interval_s=0.2,
        sweep_grace_s=0.5,
        lease_s=2,
    )


async def test_a1_both_wake_ups_of_a_renewed_hold_exist(pool: Pool, redis: Redis, settings: Settings) -> None:
    """60 s, then renewed to 600 s: each generation has a wake-up at its own deadline."""
    [first] = await placed(pool, 1, ttl_s=60)
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue([first])
        async with pool.acquire() as conn:
            second = await renew(conn, first.id, tenant_id=TENANT, ttl_s=600)
        await wakeups.enqueue([second])
    assert await scores(redis) == {
        job_id(Wake(h.id, h.generation)).encode(): score_ms(h.expires_at) for h in (first, second)
    }


async def test_a1_a_renewed_hold_ends_at_the_new_deadline_only(pool: Pool, settings: Settings) -> None:
    """The old wake-up fires and is a no-op; one event, at the new deadline."""
    counted = Counted()
    async with serving(pool, settings) as wakeups:
        [hold] = await placed(pool, 1, ttl_s=1)
        await wakeups.enqueue([hold])
        async with pool.acquire() as conn:
            renewed = await renew(conn, hold.id, tenant_id=TENANT, ttl_s=2.5)
        await wakeups.enqueue([renewed])
        await eventually(expired(pool, 1))
    assert counted("expiry_attempts_total", outcome="stale", by="worker") == 1
    row = await pool.fetchrow("SELECT generation, expires_at, ended_at FROM holds")
    assert row is not None
    assert row["generation"] == 2
    assert row["expires_at"] == renewed.expires_at
    assert row["ended_at"] >= renewed.expires_at
    await assert_kept(pool)


@pytest.mark.parametrize("by", ["worker", "sweep"])
async def test_a4_a_hold_25_h_past_is_recovered_in_one_pass(pool: Pool, settings: Settings, by: str) -> None:
    """However late: no exception, one attempt, ended by whoever finds it first."""
    holds = await overdue(pool, 3, by_s=25 * 3600)
    counted = Counted()
    if by == "sweep":
        assert await sweep_of(pool, settings).one_pass() == {"expired": 3}
    else:
        async with wakeups_on(settings) as wakeups:
            assert (await wakeups.enqueue(holds)).queued == 3
            async with working(pool, settings):
                await eventually(expired(pool, 3))
    assert counted("expiry_attempts_total", outcome="expired", by=by) == 3
    assert await pool.fetchval("SELECT count(*) FROM holds WHERE ended_by = $1", by) == 3
    await assert_kept(pool)


async def bodies(redis: Redis) -> None:
    """Delete every job body."""
    await redis.delete(*await redis.keys("arq:job:*"))


async def the_set(redis: Redis) -> None:
    """Delete the sorted set alone."""
    assert await redis.delete("expiry:wakeups") == 1


async def everything(redis: Redis) -> None:
    """Delete all that Redis has."""
    await redis.flushall()


@pytest.mark.parametrize("lose", [bodies, the_set, everything])
async def test_a5_whatever_redis_loses_everything_expires(
    pool: Pool, redis: Redis, settings: Settings, lose: Callable[[Redis], Awaitable[None]]
) -> None:
    """1,000 holds, their wake-ups lost in part or whole: all end once, and placing works meanwhile."""
    async with serving(pool, settings) as wakeups:
        holds = await placed(pool, 1000, ttl_s=1.5)
        await wakeups.enqueue(holds)
        await lose(redis)
        for i in range(20):
            more = await placed(pool, 1, ttl_s=1.5, resource=f"more-{i}")
            assert (await wakeups.enqueue(more)).error == 0
        await eventually(expired(pool, 1020), within_s=8)
    # Sweep interval, grace, lease and what a busy machine needs for the batch.
    assert (await lags_ms(pool))[-1] < 4000
    await assert_kept(pool)


async def test_a7_workers_in_different_time_zones_fire_at_the_same_instant(
    pool: Pool, settings: Settings
) -> None:
    """The deadline is an instant: New York's and Kolkata's worker end their hold within moments of it."""
    zones = ("America/New_York", "Asia/Kolkata")
    queues = [settings.model_copy(update={"queue": zone}) for zone in zones]
    async with AsyncExitStack() as stack:
        for queue, zone in zip(queues, zones, strict=True):
            await stack.enter_async_context(child_worker(queue, TZ=zone))
        holds = await placed(pool, 2, ttl_s=1.5)
        for queue, hold in zip(queues, holds, strict=True):
            wakeups = await stack.enter_async_context(wakeups_on(queue))
            await wakeups.enqueue([hold])
        await eventually(expired(pool, 2))
    assert holds[0].expires_at == holds[1].expires_at
    assert (await lags_ms(pool))[-1] < 500
    await assert_kept(pool)


async def test_a9_many_holds_with_one_deadline(pool: Pool, settings: Settings) -> None:
    """10,000 at once (20,000 take twice as long): all end once, within seconds, and checkouts go on."""
    n = 10_000
    holds = await placed(pool, n, ttl_s=60)
    at: datetime = await pool.fetchval("SELECT clock_timestamp()") + timedelta(seconds=3)
    await pool.execute(BACKDATE, [h.id for h in holds], [at] * n)
    async with serving(pool, settings) as wakeups:
        await wakeups.enqueue_due([(wake, at) for wake, _ in due(holds)])
        slowest_s = 0.0
        while (await states(pool)).get("expired", 0) < n:
            started_s = asyncio.get_running_loop().time()
            await placed(pool, 1, ttl_s=60, resource="checkout")
            slowest_s = max(slowest_s, asyncio.get_running_loop().time() - started_s)
    lags = await lags_ms(pool)
    print(f"{n} at once, ms: first {lags[0]:.0f}, median {lags[n // 2]:.0f}, last {lags[-1]:.0f}")  # noqa: T201
    assert lags[-1] < 8000
    assert slowest_s < 2
    await assert_kept(pool)
