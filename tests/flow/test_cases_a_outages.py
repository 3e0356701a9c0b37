"""Cases A2, A3, A13 and A14: stores that refuse, workers that are killed, answers that never arrive."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from expiry import local
from expiry.api.readiness import Readiness
from expiry.settings import Settings
from expiry.wakeups import Enqueued, Wakeups
from tests.faults import gate_shut
from tests.fleet import (
    Counted,
    Pool,
    assert_kept,
    child_worker,
    expired,
    holds_true,
    lags_ms,
    overdue,
    placed,
    said,
    serving,
    settings_for,
    states,
    wakeups_on,
    working,
)
from tests.helpers import eventually
from tests.proxy import Cut, Proxy, proxy_to
from tests.wakes import emptied, fill, scores

LEASE_S = 1.0
OBJECTIVE_S = 1.5  # on top of the lease: the next look, and a busy machine


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    """Give a service with the shortest lease."""
    return settings_for(
        database_url,
        redis_url,
        lease_s=LEASE_S,
        sweep_interval_s=0.2,
        sweep_grace_s=0.5,
        promoter_interval_s=0.2,
    )


# --- A2


@asynccontextmanager
async def refusing(servers: local.Servers, database_url: str) -> AsyncIterator[None]:
    """Let PostgreSQL end every connection to the database and refuse new ones."""
    name = urlsplit(database_url).path[1:]
    admin = await asyncpg.connect(servers.database_url)
    try:
        await admin.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS false")
        await admin.fetch("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
        yield
        await admin.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS true")
    finally:
        await admin.close()


async def test_a2_database_refuses_around_the_deadline(
    pool: Pool, servers: local.Servers, database_url: str, settings: Settings
) -> None:
    """PostgreSQL refuses for 5 s around T: all end soon after it returns, once, with no attempt counted."""
    loop = asyncio.get_running_loop()
    async with serving(pool, settings) as wakeups:
        holds = await placed(pool, 10, ttl_s=2.5)
        await wakeups.enqueue(holds)
        async with refusing(servers, database_url):
            until_s = loop.time() + 5
            await eventually(holds_true(lambda: loop.time() > until_s))
        started_s = loop.time()
        await eventually(expired(pool, 10), within_s=8)
        # The longest wait that five seconds of failures lead to is 3.2 s; then the sweep's interval.
        assert loop.time() - started_s < 3.2 + settings.sweep_interval_s + OBJECTIVE_S
    assert await pool.fetchval("SELECT max(attempts) FROM holds") == 0
    await assert_kept(pool)


# --- A3


@pytest.mark.parametrize("statement", ["dies too", "commits all the same"])
async def test_a3_killed_between_claim_and_commit(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], redis: Redis, settings: Settings, statement: str
) -> None:
    """SIGKILL while the statement runs: whether it dies or commits, one event, within lease + objective."""
    async with wakeups_on(settings) as wakeups, child_worker(settings) as process:
        async with gate_shut(conn) as hanging:
            await wakeups.enqueue(await placed(pool, 3, ttl_s=1))
            pids = await eventually(hanging)
            process.kill()
            await process.wait()
            if statement == "dies too":
                for pid in pids:
                    await conn.fetchval("SELECT pg_terminate_backend($1)", pid)
        assert len(await scores(redis)) == 3  # leased, not lost
        async with working(pool, settings):
            await eventually(emptied(redis))
    assert await states(pool) == {"expired": 3}
    assert (await lags_ms(pool))[-1] < (LEASE_S + OBJECTIVE_S) * 1000
    await assert_kept(pool)


@pytest.mark.parametrize("stop_at", ["claimed", "committed"])
async def test_a3_killed_before_the_statement_or_before_the_settle(
    pool: Pool, redis: Redis, settings: Settings, stop_at: str
) -> None:
    """SIGKILL with wake-ups in hand: they come due again after the lease; what had ended stays ended once."""
    counted = Counted()
    async with wakeups_on(settings) as wakeups, child_worker(settings, stop_at) as process:
        await wakeups.enqueue(await placed(pool, 3, ttl_s=1))
        await said(process, stop_at)
        process.kill()
        assert await process.wait() == -signal.SIGKILL
        assert await states(pool) == {"held" if stop_at == "claimed" else "expired": 3}
        async with working(pool, settings):
            await eventually(emptied(redis))
    assert await states(pool) == {"expired": 3}
    assert counted("expiry_leases_expired_total") == 3
    assert (await lags_ms(pool))[-1] < (LEASE_S + OBJECTIVE_S) * 1000
    await assert_kept(pool)


# --- A13


async def cue(wakeups: Wakeups, verb: str) -> bytes:
    """Load the script of a verb, so that its next call is one command; return what names it there."""
    script = getattr(wakeups, f"_{verb}")
    await wakeups.redis.script_load(script.script)
    return str(script.sha).encode()


@pytest.mark.parametrize("when", Cut)
async def test_a13_enqueue_without_an_answer(
    pool: Pool, settings: Settings, proxy: Proxy, cut_off: Settings, when: Cut
) -> None:
    """Dropped before or after the call: counted as an error, never raised, and the holds expire once."""
    counted = Counted()
    async with serving(pool, settings), wakeups_on(cut_off) as wakeups:
        holds = await placed(pool, 5, ttl_s=1)
        proxy.cut_at(await cue(wakeups, "enqueue"), when)
        assert await wakeups.enqueue(holds) == Enqueued(error=5)
        assert proxy.cuts == 1
        assert counted("expiry_wakeups_enqueued_total", result="error") == 5
        await eventually(expired(pool, 5))
    assert (await lags_ms(pool))[-1] < (settings.grace_s + settings.sweep_interval_s + OBJECTIVE_S) * 1000
    await assert_kept(pool)


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[Proxy]:
    """Give a proxy in front of Redis."""
    async with proxy_to(redis_url) as proxy:
        yield proxy


@pytest.fixture
def cut_off(proxy: Proxy, settings: Settings) -> Settings:
    """Give the settings of somebody whose Redis is behind the proxy."""
    return settings_for(
        settings.database_url.get_secret_value(),
        proxy.url,
        **settings.model_dump(exclude_unset=True, exclude={"database_url", "redis_url"}),
    )


@pytest.mark.parametrize("when", Cut)
@pytest.mark.parametrize("verb", ["claim", "settle"])
async def test_a13_claim_or_settle_without_an_answer(
    pool: Pool, redis: Redis, proxy: Proxy, cut_off: Settings, verb: str, when: Cut
) -> None:
    """The worker counts the failure and goes on; what it had claimed comes again; nothing ends twice."""
    counted = Counted()
    async with wakeups_on(cut_off) as wakeups:
        await wakeups.enqueue(await overdue(pool, 5))
        await fill(wakeups)
        proxy.cut_at(await cue(wakeups, verb), when)
    started_s = time.monotonic()
    async with working(pool, cut_off):
        await eventually(emptied(redis), within_s=LEASE_S + OBJECTIVE_S)
    waited_s = time.monotonic() - started_s
    assert proxy.cuts == 1
    assert counted("expiry_loop_errors_total", loop="worker", kind="redis") == 1
    # Only a claim that was made and never heard of has to wait for its lease.
    lost = verb == "claim" and when is Cut.AFTER
    assert counted("expiry_leases_expired_total") == (5 if lost else 0)
    assert (waited_s > LEASE_S - 0.2) == lost
    assert await states(pool) == {"expired": 5}
    await assert_kept(pool)


# --- A14


@asynccontextmanager
async def out_of_memory(redis: Redis) -> AsyncIterator[None]:
    """Let Redis refuse every write that needs memory."""
    await redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        await redis.config_set("maxmemory", 0)


@asynccontextmanager
async def read_only(redis: Redis) -> AsyncIterator[None]:
    """Let Redis be the replica of a primary that is not there."""
    await redis.execute_command("REPLICAOF", "127.0.0.1", "1")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        await redis.execute_command("REPLICAOF", "NO", "ONE")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("fault", "answer"), [(out_of_memory, "OutOfMemory"), (read_only, "ReadOnly")])
async def test_a14_redis_refuses_writes(
    pool: Pool, redis: Redis, settings: Settings, fault: type, answer: str
) -> None:
    """Counted, not ready, the sweep carries on; afterwards the worker does, without a restart."""
    counted = Counted()
    async with serving(pool, settings) as wakeups:
        ready = Readiness(pool=pool, settings=settings, wakeups=wakeups, ready=dict)
        async with fault(redis):
            with pytest.raises(RedisError) as refused:
                await wakeups.claim(1, skew_ms=0)
            assert answer in type(refused.value).__name__
            assert (await wakeups.enqueue(await placed(pool, 5, ttl_s=1))).error == 5
            await eventually(expired(pool, 5))
            assert await pool.fetchval("SELECT bool_and(ended_by = 'sweep') FROM holds")
            assert list(await ready.failing()) == ["redis"]
        assert counted("expiry_loop_errors_total", loop="worker", kind="redis") > 0
        after = Counted()
        await eventually(
            holds_true(lambda: after("expiry_loop_last_round_timestamp_seconds", loop="worker") > 0)
        )
        await wakeups.enqueue(await placed(pool, 5, ttl_s=1))
        await eventually(expired(pool, 10))
        assert await ready.failing() == {}
    assert await pool.fetchval("SELECT count(*) FROM holds WHERE ended_by = 'worker'") == 5
    await assert_kept(pool)
