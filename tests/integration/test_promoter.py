"""The promoter: Redis holds the near future, whatever happened to it, and nothing beyond."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from datetime import datetime, timedelta
from typing import cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from expiry.holds import Hold, renew
from expiry.promoter import Promoter
from expiry.settings import Settings
from expiry.wakeups import Wakeups, job_id, score_ms
from tests.fleet import BACKDATE, TENANT, Counted, Pool, due, overdue, placed, settings_for, wakeups_on
from tests.proxy import Cut, proxy_to
from tests.wakes import scores


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    """Give settings with a short horizon."""
    return settings_for(database_url, redis_url, horizon_s=10)


@pytest.fixture
async def wakeups(settings: Settings) -> AsyncIterator[Wakeups]:
    """Give the queue."""
    async with wakeups_on(settings) as wakeups:
        yield wakeups


async def tick(pool: Pool, wakeups: Wakeups, settings: Settings, *, horizon_s: float | None = None) -> int:
    """Let a promoter do a round as if its turn had come; a longer horizon stands for time that passed."""
    await wakeups.redis.delete(f"{wakeups.queue}:turn")
    if horizon_s is not None:
        settings = settings.model_copy(update={"horizon_s": horizon_s})
    return await Promoter(pool, wakeups, settings).tick()


def entries(*holds: Hold) -> dict[bytes, float]:
    """Return the set as it is when exactly these are in it."""
    return {job_id(wake).encode(): float(score_ms(at)) for wake, at in due(holds)}


async def test_only_the_horizon_is_in_redis(
    pool: Pool, redis: Redis, wakeups: Wakeups, settings: Settings
) -> None:
    """What is due within the horizon is brought at its own score; what is due later is not."""
    near, far = await placed(pool, 1, ttl_s=5), await placed(pool, 1, ttl_s=20)
    assert await tick(pool, wakeups, settings) == 1
    assert await scores(redis) == entries(*near)
    assert await tick(pool, wakeups, settings, horizon_s=25) == 1
    assert await scores(redis) == entries(*near, *far)


async def test_a_round_brings_the_next_slice_only(pool: Pool, wakeups: Wakeups, settings: Settings) -> None:
    """What was brought is not sent again at each round."""
    await placed(pool, 5, ttl_s=5)
    await tick(pool, wakeups, settings)
    await placed(pool, 3, ttl_s=15)
    counted = Counted()
    assert await tick(pool, wakeups, settings, horizon_s=18) == 3
    assert counted("expiry_wakeups_enqueued_total", result="duplicate") == 0
    assert await tick(pool, wakeups, settings, horizon_s=18) == 0


async def test_slices_leave_no_gap(pool: Pool, redis: Redis, wakeups: Wakeups, settings: Settings) -> None:
    """Deadlines a tenth of a millisecond apart, on both sides of a slice's end: none is missed."""
    holds = await placed(pool, 3000, ttl_s=60)
    start: datetime = await pool.fetchval("SELECT clock_timestamp()") + timedelta(seconds=9.98)
    at = [start + timedelta(microseconds=100 * i) for i in range(3000)]
    await pool.execute(BACKDATE, [h.id for h in holds], at)
    first = await tick(pool, wakeups, settings)
    assert 0 < first < 3000
    assert first + await tick(pool, wakeups, settings, horizon_s=12) == 3000
    assert len(await scores(redis)) == 3000


async def test_pages_leave_no_gap(
    pool: Pool, wakeups: Wakeups, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of many pages with one deadline for all is brought completely."""
    monkeypatch.setattr("expiry.promoter.PAGE_MAX", 10)
    await placed(pool, 35, ttl_s=5)
    assert await tick(pool, wakeups, settings) == 35


async def test_an_emptied_redis_refills_itself(
    pool: Pool, redis: Redis, wakeups: Wakeups, settings: Settings
) -> None:
    """After FLUSHALL the whole horizon comes back at the next round, and that is counted."""
    await placed(pool, 50, ttl_s=5)
    await tick(pool, wakeups, settings)
    before = await scores(redis)
    counted = Counted()
    await redis.flushall()
    assert await tick(pool, wakeups, settings) == 50
    assert await scores(redis) == before
    assert counted("expiry_promoter_rescans_total", reason="lost") == 1


async def test_another_redis_is_filled_anew(
    pool: Pool, redis: Redis, wakeups: Wakeups, settings: Settings
) -> None:
    """A marker of another server's run proves nothing: the whole horizon is scanned again."""
    await placed(pool, 20, ttl_s=5)
    await tick(pool, wakeups, settings)
    await cast("Awaitable[int]", redis.hset(f"{wakeups.queue}:promoted", "run_id", "another"))
    await redis.delete(wakeups.queue)
    counted = Counted()
    assert await tick(pool, wakeups, settings) == 20
    assert counted("expiry_promoter_rescans_total", reason="restarted") == 1
    assert await tick(pool, wakeups, settings) == 0
    assert counted("expiry_promoter_rescans_total", reason="restarted") == 1


async def test_a_part_that_was_lost_is_mended(
    pool: Pool, redis: Redis, wakeups: Wakeups, settings: Settings
) -> None:
    """Fewer wake-ups than holds in the next minute: what is missing comes back."""
    holds = await placed(pool, 20, ttl_s=5)
    await tick(pool, wakeups, settings)
    await redis.zrem(wakeups.queue, *list(entries(*holds[:7])))
    counted = Counted()
    assert await tick(pool, wakeups, settings) == 7
    assert await scores(redis) == entries(*holds)
    assert counted("expiry_promoter_rescans_total", reason="fewer") == 1


async def test_nothing_lost_no_rescan(pool: Pool, wakeups: Wakeups, settings: Settings) -> None:
    """A healthy Redis is not scanned again, whatever was renewed or ended meanwhile."""
    holds = await placed(pool, 20, ttl_s=5)
    await tick(pool, wakeups, settings)
    async with pool.acquire() as conn:
        moved = [await renew(conn, h.id, tenant_id=TENANT, ttl_s=6) for h in holds[:5]]
    await wakeups.enqueue(moved)
    counted = Counted()
    assert await tick(pool, wakeups, settings) == 0
    assert (
        sum(counted("expiry_promoter_rescans_total", reason=r) for r in ("lost", "restarted", "fewer")) == 0
    )


async def test_only_what_is_held_now_is_brought(
    pool: Pool, redis: Redis, wakeups: Wakeups, settings: Settings
) -> None:
    """The current generation, and neither ended holds nor those that back off after failures."""
    renewed, ended, failing = await placed(pool, 3, ttl_s=5)
    async with pool.acquire() as conn:
        current = await renew(conn, renewed.id, tenant_id=TENANT, ttl_s=6)
    await pool.execute("UPDATE holds SET next_attempt_at = 'infinity' WHERE id = $1", failing.id)
    await pool.execute(
        "UPDATE holds SET state = 'released', ended_at = now(), ended_by = 'x' WHERE id = $1", ended.id
    )
    assert await tick(pool, wakeups, settings) == 1
    assert await scores(redis) == entries(current)


@pytest.mark.parametrize(("mode", "brought"), [("hybrid", 1), ("queue", 2)])
async def test_what_is_long_overdue_is_the_sweeps_if_there_is_one(
    pool: Pool, wakeups: Wakeups, settings: Settings, mode: str, brought: int
) -> None:
    """A rescan goes back by the grace in hybrid mode, and to the beginning without a sweep."""
    await overdue(pool, 1, by_s=600)
    await placed(pool, 1, ttl_s=5)
    assert await tick(pool, wakeups, settings.model_copy(update={"mode": mode})) == brought


async def test_one_promoter_at_a_time_does_the_work(pool: Pool, wakeups: Wakeups, settings: Settings) -> None:
    """Ten processes' promoters bring each hold once, and one of them asks the database."""
    await placed(pool, 10, ttl_s=5)
    counted = Counted()
    done = await asyncio.gather(*(Promoter(pool, wakeups, settings).tick() for _ in range(10)))
    assert sorted(done) == [0] * 9 + [10]
    assert counted("expiry_wakeups_enqueued_total", result="duplicate") == 0


async def test_a_round_that_failed_is_made_up_for(
    pool: Pool, redis: Redis, redis_url: str, database_url: str, wakeups: Wakeups, settings: Settings
) -> None:
    """Redis goes away in the middle of a slice: the error is raised, and the next round starts there again."""
    await placed(pool, 10, ttl_s=5)
    async with (
        proxy_to(redis_url) as proxy,
        wakeups_on(settings_for(database_url, proxy.url, horizon_s=10)) as cut_off,
    ):
        proxy.cut_at(b"EVALSHA", Cut.BEFORE)
        with pytest.raises(RedisError):
            await tick(pool, cut_off, settings)
    assert await scores(redis) == {}
    assert await tick(pool, wakeups, settings) == 10
