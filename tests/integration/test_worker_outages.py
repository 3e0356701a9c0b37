"""The worker meets stores that are away, clocks that differ, and its own end: nothing is lost or counted."""

from __future__ import annotations

import asyncio
import signal
import time

import asyncpg
import pytest
from redis.asyncio import Redis

from expiry.settings import Settings
from expiry.wakeups import Claim, Wakeups
from tests.faults import gate_shut
from tests.fleet import (
    Counted,
    Pool,
    assert_kept,
    child_worker,
    due_in,
    expired,
    holds_true,
    overdue,
    settings_for,
    states,
    wakeups_on,
    working,
)
from tests.helpers import eventually
from tests.proxy import proxy_to
from tests.wakes import scores


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    """Give settings with the default lease: whoever waits for it takes too long for these tests."""
    return settings_for(database_url, redis_url)


# --- the end of a worker


async def test_a_stop_finishes_what_is_in_flight(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], redis: Redis, settings: Settings
) -> None:
    """Asked to stop, the worker claims no more, but the running statement ends and is settled."""
    bounded = settings.model_copy(update={"batch_max": 5, "batches_in_flight_max": 1})
    holds = await overdue(pool, 8)
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue(holds)
        async with working(pool, bounded) as worker:
            async with gate_shut(conn) as hanging:
                await eventually(hanging)
                worker.handle_sig(signal.SIGTERM)
                closing = asyncio.create_task(worker.close())
            await closing
    assert await states(pool) == {"expired": 5, "held": 3}
    assert set((await scores(redis)).values()) == {score(h.expires_at.timestamp()) for h in holds[5:]}
    await assert_kept(pool)


def score(at_s: float) -> int:
    """Return the score of a deadline: the next whole millisecond."""
    return -(-round(at_s * 1_000_000) // 1000)


async def test_a_stop_hands_back_what_does_not_finish(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], redis: Redis, settings: Settings
) -> None:
    """A statement that outlasts the grace is cut off; its wake-ups are due at once, and no attempt counts."""
    hasty = settings.model_copy(update={"stop_grace_s": 0.2})
    await overdue_enqueued(pool, settings, 4)
    counted = Counted()
    async with gate_shut(conn) as hanging, working(pool, hasty) as worker:
        await eventually(hanging)
        started_s = time.monotonic()
        await worker.close()
        assert 0.15 < time.monotonic() - started_s < 2
        now_ms = time.time() * 1000
        assert len(await scores(redis)) == 4
        assert all(score <= now_ms for score in (await scores(redis)).values())
        assert counted("expiry_retries_total", reason="stopped") == 4
        assert counted("expiry_in_flight_holds") == 0
    async with working(pool, settings):
        await eventually(expired(pool, 4), within_s=3)
    assert await pool.fetchval("SELECT max(attempts) FROM holds") == 0
    await assert_kept(pool)


async def overdue_enqueued(pool: Pool, settings: Settings, n: int) -> None:
    """Place n overdue holds with their wake-ups."""
    holds = await overdue(pool, n)
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue(holds)


async def test_sigterm_ends_the_process_in_good_order(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], redis: Redis, settings: Settings
) -> None:
    """SIGTERM in the middle of a statement: it is finished and settled, and the exit status is 0."""
    await overdue_enqueued(pool, settings, 3)
    async with child_worker(settings) as process:
        async with gate_shut(conn) as hanging:
            await eventually(hanging)
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), settings.stop_grace_s + 2)
        assert process.returncode == 0
    assert await states(pool) == {"expired": 3}
    assert await scores(redis) == {}
    await assert_kept(pool)


# --- a store that is away


async def test_database_away_backs_off_and_counts_no_attempt(
    pool: Pool, database_url: str, redis: Redis, settings: Settings
) -> None:
    """While PostgreSQL refuses, wake-ups are kept and tried less and less often; then all end, once."""
    await overdue_enqueued(pool, settings, 5)
    counted = Counted()
    async with proxy_to(database_url) as proxy, asyncpg.create_pool(proxy.url, min_size=1) as cut_off:
        proxy.refuse()
        async with working(cut_off, settings):
            await eventually(holds_true(lambda: failures(counted, "database") >= 4))
            assert len(await scores(redis)) == 5
            assert await states(pool) == {"held": 5}
            proxy.refuse(refusing=False)
            await eventually(expired(pool, 5), within_s=5)
    assert failures(counted, "bug") == 0
    assert failures(counted, "database") <= 8  # 0.1 s each would be far more
    assert await pool.fetchval("SELECT max(attempts) FROM holds") == 0
    await assert_kept(pool)


def failures(counted: Counted, kind: str) -> float:
    """Return how many rounds of the worker failed."""
    return counted("expiry_loop_errors_total", loop="worker", kind=kind)


async def test_redis_away_is_survived(pool: Pool, redis_url: str, settings: Settings) -> None:
    """While Redis refuses, rounds fail, are counted and come less often; then the worker goes on."""
    await overdue_enqueued(pool, settings, 5)
    counted = Counted()
    async with proxy_to(redis_url) as proxy:
        proxy.refuse()
        cut_off = settings_for(settings.database_url.get_secret_value(), proxy.url)
        async with working(pool, cut_off):
            await eventually(holds_true(lambda: failures(counted, "redis") >= 4))
            proxy.refuse(refusing=False)
            await eventually(expired(pool, 5), within_s=5)
    assert failures(counted, "redis") <= 8
    assert failures(counted, "bug") == 0
    await assert_kept(pool)


# --- clocks


def with_clock(off_ms: float) -> type[Wakeups]:
    """Return wake-ups of a Redis whose clock is off by so much."""

    class Off(Wakeups):
        async def claim(self, want: int, *, skew_ms: float) -> Claim:
            return await super().claim(want, skew_ms=skew_ms + off_ms)

    return Off


@pytest.mark.parametrize("off_ms", [-300, 300])
async def test_the_worker_learns_the_difference_of_the_clocks(
    pool: Pool, settings: Settings, off_ms: float
) -> None:
    """With Redis's clock off, the first hold may be late, the others are punctual, and none ends early."""
    counted = Counted()
    async with wakeups_on(settings) as wakeups, working(pool, settings, wakeups=with_clock(off_ms)):
        for n in range(1, 4):
            await wakeups.enqueue([await due_in(pool, 0.7)])
            await eventually(expired(pool, n))
    lags = [row["ms"] for row in await pool.fetch(LAGS_IN_ORDER)]
    assert max(lags[1:]) < 250  # not learned: 300
    assert counted("expiry_attempts_total", outcome="early", by="worker") == (1 if off_ms > 0 else 0)
    await assert_kept(pool)


LAGS_IN_ORDER = """
SELECT extract(epoch FROM ended_at - expires_at)::double precision * 1000 AS ms FROM holds ORDER BY id
"""
