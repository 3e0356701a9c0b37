"""Worker and sweep tell the governor how attempts end, brake at once where it cannot wait, and obey it."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from expiry import governing
from expiry.backlog import HoldsBacklog
from expiry.errors import SetupError
from expiry.permits import FLEET, GOVERNOR_GONE_S, Permits, failure_of
from expiry.service import Service
from expiry.settings import Settings
from governor import Attempts, Backlog, GovernorSettings, LocalBucket
from governor.journal import tail
from governor.probes.settings import ProbeSettings
from tests.buckets import Clock
from tests.faults import POISON, gate_shut
from tests.fleet import (
    Pool,
    due,
    expired,
    overdue,
    permits_of,
    placed,
    settings_for,
    sweep_of,
    wakeups_on,
    working,
)
from tests.helpers import eventually
from tests.wakes import fill

QUICK = GovernorSettings(interval_s=0.2, start_per_s=2000)
MEASURED = GovernorSettings(interval_s=0.5, start_per_s=2000)  # longer than any probe takes


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    """Give the settings of the test's own stores."""
    return settings_for(database_url, redis_url)


# --- what is reported


async def test_the_sweep_reports_what_ended(pool: Pool, settings: Settings) -> None:
    """Expired holds are completed attempts; a row at fault says nothing of the database."""
    await pool.execute(POISON)
    await overdue(pool, 5)
    await overdue(pool, 1, resource="poison{}")
    sweep = sweep_of(pool, settings)
    await sweep.permits.publish()
    await sweep.one_pass()
    assert sweep.permits.outcomes.drain() == Attempts(completed=5)


async def test_the_worker_reports_what_ended(pool: Pool, settings: Settings) -> None:
    """Each claimed wake-up is an attempt, once."""
    holds = await overdue(pool, 3)
    async with wakeups_on(settings) as wakeups:
        permits = permits_of(pool, wakeups)
        await fill(wakeups)
        await wakeups.enqueue_due(due(holds))
        async with working(pool, settings, permits=permits):
            await eventually(expired(pool, 3))
    assert permits.outcomes.drain() == Attempts(completed=3)


async def test_timeouts_are_reported_and_brake_the_fleet(
    database_url: str, redis_url: str, pool: Pool
) -> None:
    """A database that hangs: the worker halves the allowance, once, without waiting for a leader."""
    settings = settings_for(database_url, redis_url)
    holds = await overdue(pool, 20)
    async with (
        asyncpg.create_pool(database_url, min_size=1, command_timeout=0.3) as impatient,
        pool.acquire() as conn,
        wakeups_on(settings, QUICK) as wakeups,
    ):
        permits = permits_of(pool, wakeups, QUICK)
        assert permits.primary is not None
        await fill(wakeups, allowance_per_s=1000)
        await wakeups.enqueue_due(due(holds))
        async with gate_shut(conn), working(impatient, settings, governor=QUICK, permits=permits):

            async def halved() -> bool:
                assert permits.primary is not None
                return (await permits.primary.read()).allowance_per_s == 500

            await eventually(halved)
            attempts = permits.outcomes.drain()
            assert attempts.timed_out >= 3
            assert (attempts.completed, attempts.failed) == (0, 0)


async def test_a_backlog_at_the_floor_is_not_taken_for_idleness(pool: Pool, settings: Settings) -> None:
    """Each permit is used as it comes, and that more are wanted is seen: only so the law can climb again."""
    holds = await overdue(pool, 20)
    async with wakeups_on(settings) as wakeups:
        permits = permits_of(pool, wakeups)
        assert permits.primary is not None
        await fill(wakeups, allowance_per_s=5)
        await wakeups.enqueue_due(due(holds))
        async with working(pool, settings, permits=permits):
            await eventually(expired(pool, 3))
            then = await permits.primary.read()
            await eventually(expired(pool, 9))
            now = await permits.primary.read()
    assert now.unmet - then.unmet > 0.8 * (now.micros - then.micros)


def sqlstate(state: str) -> asyncpg.PostgresError:
    """Return the error of this SQLSTATE."""
    error: Any = asyncpg.PostgresError.new({"C": state, "M": "x"})
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError(), "timed_out"),
        (sqlstate("57014"), "timed_out"),
        (sqlstate("53300"), "failed"),
        (sqlstate("40P01"), "failed"),
        (sqlstate("57P01"), "failed"),
        (ConnectionRefusedError(), "failed"),
        (asyncpg.InterfaceError("closed"), "failed"),
        (sqlstate("23514"), None),
        (sqlstate("42883"), None),
        (ValueError(), None),
    ],
)
def test_only_what_passes_is_the_dependencys_failure(error: BaseException, kind: str | None) -> None:
    """Rows at fault and faults of ours say nothing of how much the database bears."""
    assert failure_of(error) == kind


# --- the fast cut


@pytest.mark.parametrize(("mode", "left"), [("enforce", 200), ("observe", 400), ("off", 400)])
async def test_too_many_clients_brakes_once(mode: Any, left: float) -> None:  # noqa: ANN401
    """One error is enough, forty cut once; a fixed allowance stays as it is."""
    clock = Clock()
    bucket = LocalBucket(floor_per_s=5, clock_us=clock)
    await bucket.publish(allowance_per_s=400, ttl_s=60, epoch=1)
    permits = Permits(None, bucket, GovernorSettings(mode=mode))
    for _ in range(40):
        await permits.note_failure(sqlstate("53300"), 10)
    assert (await bucket.read()).allowance_per_s == left
    assert permits.outcomes.drain().failed == 400


async def test_a_single_timeout_does_not_brake() -> None:
    """One hold of a quiet night that timed out is no burst."""
    bucket = LocalBucket(floor_per_s=5)
    await bucket.publish(allowance_per_s=400, ttl_s=60, epoch=1)
    permits = Permits(None, bucket, GovernorSettings())
    await permits.note_failure(TimeoutError(), 1)
    assert (await bucket.read()).allowance_per_s == 400


# --- a fixed allowance after a controller


async def test_a_controller_overrules_a_fixed_allowance_until_it_is_gone() -> None:
    """While it lives its epoch counts; a minute after it was turned off the ceiling is fixed again."""
    clock = Clock()
    bucket, row = (LocalBucket(floor_per_s=5, clock_us=clock) for _ in range(2))
    fixed = Permits(bucket, row, GovernorSettings(mode="off", ceiling_per_s=1000))
    await bucket.publish(allowance_per_s=50, ttl_s=12, epoch=7)
    await fixed.publish()
    assert (await bucket.read()).allowance_per_s == 50
    clock.advance(12 + GOVERNOR_GONE_S - 1)
    await fixed.publish()
    assert (await bucket.read()).allowance_per_s == 5
    clock.advance(2)
    await fixed.publish()
    assert (await bucket.read()).allowance_per_s == 1000


# --- what is due


async def test_the_backlog_is_what_is_due_and_what_comes(pool: Pool) -> None:
    """Age of the oldest and depth; the forecast's mean and its peak second."""
    assert await HoldsBacklog(pool, 30)() == Backlog(
        oldest_due_age_s=0, due_depth=0, arrivals_per_s=0, arrivals_peak_per_s=0
    )
    await overdue(pool, 4, by_s=60)
    await placed(pool, 6, ttl_s=10)
    await placed(pool, 1, ttl_s=3000)
    found = await HoldsBacklog(pool, 30)()
    assert found.due_depth == 4
    assert 59 < (found.oldest_due_age_s or 0) < 90
    assert found.arrivals_per_s == pytest.approx(6 / 30)
    assert 3 <= (found.arrivals_peak_per_s or 0) <= 6


# --- the service


@pytest.mark.parametrize("mode", ["hybrid", "queue", "sweep"])
async def test_every_mode_is_governed(pool: Pool, database_url: str, redis_url: str, mode: str) -> None:
    """A leader decides, journals what was done, and holds end under its allowance."""
    settings = settings_for(database_url, redis_url, mode=mode)
    await placed(pool, 30, ttl_s=1)
    stop = asyncio.Event()
    service = Service(settings, QUICK, api=False, background=True, stop=stop)
    task = asyncio.create_task(service.run())
    try:
        await eventually(expired(pool, 30))

        async def told() -> bool:
            return any(entry.reading["completed"] for entry in await tail(pool, FLEET, limit=50))

        await eventually(told)
    finally:
        stop.set()
        await task
    entries = await tail(pool, FLEET, limit=50)
    assert sum(entry.reading["started"] or 0 for entry in entries) >= 30
    lease = await pool.fetchrow("SELECT until <= clock_timestamp() AS free, home FROM governor_lease")
    assert lease is not None
    assert (lease["free"], lease["home"]) == (True, "postgres" if mode == "sweep" else "redis")


async def test_off_is_as_it_was(pool: Pool, database_url: str, redis_url: str) -> None:
    """Nobody leads, nothing is journalled, the ceiling is fixed."""
    settings = settings_for(database_url, redis_url)
    await placed(pool, 3, ttl_s=1)
    stop = asyncio.Event()
    service = Service(settings, GovernorSettings(mode="off"), api=False, background=True, stop=stop)
    task = asyncio.create_task(service.run())
    try:
        await eventually(expired(pool, 3))
    finally:
        stop.set()
        await task
    assert await pool.fetchval("SELECT count(*) FROM governor_lease") == 0
    assert await tail(pool, FLEET, limit=1) == []


async def test_a_shadow_that_is_no_law_is_refused(pool: Pool, settings: Settings) -> None:
    """At the start, in one sentence."""
    permits = Permits(None, LocalBucket(floor_per_s=5), GovernorSettings(shadow="nowhere:Law"))
    with pytest.raises(SetupError, match="there is no law"):
        await governing.run(pool, permits, settings, asyncio.Event())


async def test_the_leader_measures_the_database(pool: Pool, database_url: str, redis_url: str) -> None:
    """With targets, each probe is in the journal as value / target, and a lone process is well below them."""
    settings = settings_for(database_url, redis_url)
    measured = ProbeSettings(probe_timeout_s=0.3)
    stop = asyncio.Event()
    service = Service(settings, MEASURED, api=False, background=True, stop=stop, measured=measured)
    task = asyncio.create_task(service.run())
    try:

        async def told() -> bool:
            entries = await tail(pool, FLEET, limit=1)
            return bool(entries) and {
                "active_backends",
                "commit_latency",
                "lock_waiters",
                "pool_wait",
            } <= set(entries[0].reading["saturation"])

        await eventually(told)
    finally:
        stop.set()
        await task


async def test_a_role_that_may_not_measure_is_governed_all_the_same(
    pool: Pool, database_url: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without pg_read_all_stats: the log names the grant, errors and timeouts limit, holds end."""
    await pool.execute(
        "DO $$ BEGIN CREATE ROLE plain LOGIN PASSWORD 'plain'; EXCEPTION WHEN duplicate_object THEN NULL; END $$;"
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO plain; GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO plain"
    )
    url = urlsplit(database_url)
    as_plain = url._replace(netloc=f"plain:plain@{url.netloc.rpartition('@')[2]}").geturl()
    await placed(pool, 3, ttl_s=1)
    stop = asyncio.Event()
    service = Service(
        settings_for(as_plain, redis_url),
        MEASURED,
        api=False,
        background=True,
        stop=stop,
        measured=ProbeSettings(probe_timeout_s=0.3),
    )
    task = asyncio.create_task(service.run())
    try:
        await eventually(expired(pool, 3))
        assert "errors and timeouts alone" in caplog.text
        assert "GRANT pg_read_all_stats" in caplog.text
        [entry] = await tail(pool, FLEET, limit=1)
        assert entry.reading["saturation"] == {}
    finally:
        stop.set()
        await task
