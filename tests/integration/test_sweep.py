"""The sweep: everything overdue, oldest first, in bounded statements, through the same door."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from expiry.expire import Outcome
from expiry.settings import Settings
from expiry.sweep import Sweep
from governor import BucketUnavailable, GovernorSettings, PostgresBucket
from tests.faults import WAITING
from tests.fleet import (
    BACKDATE,
    Counted,
    Pool,
    assert_kept,
    expired,
    holds_true,
    looping,
    overdue,
    permits_of,
    placed,
    settings_for,
    states,
    sweep_of,
    wakeups_on,
    working,
)
from tests.helpers import eventually
from tests.proxy import Cut, proxy_to

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def settings(database_url: str) -> Settings:
    """Give settings of a service without any Redis."""
    return settings_for(database_url, NOWHERE, mode="sweep", batch_max=10)


ORDER = """
SELECT h.expires_at FROM holds h JOIN outbox o ON o.hold_id = h.id AND o.type = 'hold.expired' ORDER BY o.id
"""


async def test_one_pass_ends_all_that_is_overdue_and_nothing_else(pool: Pool, settings: Settings) -> None:
    """However many batches it takes; what is not yet due stays."""
    await overdue(pool, 35)
    await placed(pool, 2, ttl_s=60)
    counted = Counted()
    assert await sweep_of(pool, settings).one_pass() == {"expired": 35}
    assert await states(pool) == {"expired": 35, "held": 2}
    assert counted("expiry_sweep_recovered_total") == 35
    assert counted("expiry_batch_seconds_count", by="sweep") == 4
    await assert_kept(pool)


async def test_oldest_first(pool: Pool, settings: Settings) -> None:
    """Batches go by deadline, not by when a hold was placed."""
    holds = await overdue(pool, 40)
    turned = [h.expires_at for h in reversed(holds)]
    await pool.execute(BACKDATE, [h.id for h in holds], turned)
    await sweep_of(pool, settings).one_pass()
    ended = [row["expires_at"] for row in await pool.fetch(ORDER)]
    batches = [set(ended[i : i + 10]) for i in range(0, 40, 10)]
    assert batches == [set(sorted(turned)[i : i + 10]) for i in range(0, 40, 10)]


async def test_the_grace_is_left_to_the_queue(pool: Pool, database_url: str) -> None:
    """With a queue the sweep waits for the grace; without one it waits for nothing."""
    fresh, old = await overdue(pool, 1, by_s=5), await overdue(pool, 1, by_s=20)
    patient = settings_for(database_url, NOWHERE, sweep_grace_s=10)
    assert await sweep_of(pool, patient).one_pass() == {"expired": 1}
    assert await pool.fetchval("SELECT state FROM holds WHERE id = $1", old[0].id) == "expired"
    assert await pool.fetchval("SELECT state FROM holds WHERE id = $1", fresh[0].id) == "held"
    assert await sweep_of(pool, settings_for(database_url, NOWHERE, mode="sweep")).one_pass() == {
        "expired": 1
    }


async def test_a_pass_meets_no_row_twice(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], settings: Settings
) -> None:
    """The cursor goes past what cannot be ended now: a locked head costs one look, and is left over."""
    holds = await overdue(pool, 30)
    locked = [h.id for h in holds[:15]]
    counted = Counted()
    async with conn.transaction():
        await conn.execute("SELECT FROM holds WHERE id = ANY ($1) FOR UPDATE", locked)
        assert await sweep_of(pool, settings).one_pass() == {"contended": 15, "expired": 15}
    assert counted("expiry_attempts_total", outcome="contended", by="sweep") == 15
    assert await sweep_of(pool, settings).one_pass() == {"expired": 15}
    assert await pool.fetchval("SELECT max(attempts) FROM holds") == 0
    await assert_kept(pool)


async def test_what_was_renewed_meanwhile_gives_its_permit_back(pool: Pool, settings: Settings) -> None:
    """A page that is out of date starts nothing for that hold, and the permit can be taken again."""
    [hold] = await placed(pool, 1, ttl_s=1)
    governor = GovernorSettings(floor_per_s=0.001, ceiling_per_s=1)
    bucket = PostgresBucket(pool, "expire", floor_per_s=0.001)
    await bucket.take(0)
    await bucket.refund(1)

    class Late(Sweep):
        async def _expire(self, rows: list[asyncpg.Record]) -> list[Outcome]:
            await pool.execute("UPDATE holds SET generation = 2")
            return await super()._expire(rows)

    await pool.execute(BACKDATE, [hold.id], [hold.placed_at])
    sweep = Late(pool, permits_of(pool, None, governor), settings, asyncio.Event(), lambda: False)
    assert await sweep.one_pass() == {"stale": 1}
    assert (await bucket.read()).permits == 1


async def test_stop_and_pause_end_a_pass(pool: Pool, settings: Settings) -> None:
    """Between two batches a pass looks whether it is to stand still."""
    await overdue(pool, 50)
    stop = asyncio.Event()
    stop.set()
    assert await sweep_of(pool, settings, stop=stop).one_pass() == {}
    looks = 0

    def paused() -> bool:
        nonlocal looks
        looks += 1
        return looks > 2

    sweep = Sweep(pool, permits_of(pool, None), settings, asyncio.Event(), paused)
    assert await sweep.one_pass() == {"expired": 20}
    assert await states(pool) == {"expired": 20, "held": 30}


async def test_the_rate_holds_without_redis(pool: Pool, settings: Settings) -> None:
    """Permits come from PostgreSQL's row: allowance and burst, and the rest of the time it waits."""
    slow = GovernorSettings(floor_per_s=50, ceiling_per_s=50)
    await overdue(pool, 60)
    started_s = time.monotonic()
    assert await sweep_of(pool, settings, governor=slow).one_pass() == {"expired": 60}
    assert (60 - 13) / 50 <= time.monotonic() - started_s < 3


async def test_no_permit_is_counted_as_throttled(
    pool: Pool, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without permits nothing starts, the pass says so, and it ends when it is told to."""
    monkeypatch.setattr("expiry.sweep.PERMIT_WAIT_S_MAX", 0.01)
    await overdue(pool, 5)
    slow = GovernorSettings(floor_per_s=0.001, ceiling_per_s=0.001)
    counted = Counted()
    stop = asyncio.Event()
    running = asyncio.create_task(sweep_of(pool, settings, governor=slow, stop=stop).one_pass())
    await eventually(holds_true(lambda: counted("expiry_sweep_throttled_total") >= 2))
    stop.set()
    assert await running == {}
    assert await states(pool) == {"held": 5}


async def test_permits_come_from_postgresql_when_redis_is_gone(
    pool: Pool, database_url: str, redis_url: str
) -> None:
    """A Redis that refuses costs the sweep one try; the row in PostgreSQL stands in."""
    await overdue(pool, 25)
    async with proxy_to(redis_url) as proxy:
        settings = settings_for(database_url, proxy.url)
        async with wakeups_on(settings) as wakeups:
            sweep = sweep_of(pool, settings, wakeups)
            assert await sweep.permits.take(1, timeout_s=1) == 1
            assert await pool.fetchval("SELECT count(*) FROM governor_bucket") == 0
            proxy.refuse()
            assert await sweep.one_pass() == {"expired": 25}
    assert await pool.fetchval("SELECT count(*) FROM governor_bucket") == 1


async def test_sweep_mode_needs_no_redis_at_all(pool: Pool, settings: Settings) -> None:
    """With nothing but PostgreSQL, holds end within the interval of their deadline."""
    await placed(pool, 20, ttl_s=1)
    sweep = sweep_of(pool, settings)
    async with looping(pool, "sweep", sweep.one_pass, interval_s=0.05):
        await eventually(expired(pool, 20), within_s=4)
    assert await pool.fetchval("SELECT max(ended_at - expires_at) < interval '1 s' FROM holds")
    await assert_kept(pool)


async def test_an_outage_ends_the_pass_and_counts_no_attempt(
    pool: Pool, database_url: str, settings: Settings
) -> None:
    """The loop hears of it and backs off; what had ended by then has ended."""
    await overdue(pool, 20)
    async with proxy_to(database_url) as proxy, asyncpg.create_pool(proxy.url, min_size=1) as cut_off:
        proxy.cut_at(b"expiry_expire(", Cut.AFTER)
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError, BucketUnavailable)):
            await sweep_of(cut_off, settings).one_pass()
        assert proxy.cuts == 1
    await eventually(nothing_runs(pool))
    assert await pool.fetchval("SELECT max(attempts) FROM holds") == 0
    await sweep_of(pool, settings).one_pass()
    assert await states(pool) == {"expired": 20}
    await assert_kept(pool)


def nothing_runs(pool: Pool) -> Callable[[], Awaitable[bool]]:
    """Return a check for `eventually`: no statement whose client was cut off runs any more."""

    async def check() -> bool:
        return not await pool.fetch(WAITING)

    return check


async def test_queue_and_sweep_on_the_same_holds_end_each_once(
    pool: Pool, database_url: str, redis_url: str
) -> None:
    """A worker and two sweeps race for the same rows: one event each."""
    settings = settings_for(database_url, redis_url, sweep_grace_s=0, batch_max=20)
    holds = await overdue(pool, 300)
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue(holds)
        async with working(pool, settings):
            await asyncio.gather(*(sweep_of(pool, settings, wakeups).one_pass() for _ in range(2)))
            await eventually(expired(pool, 300))
    await assert_kept(pool)
