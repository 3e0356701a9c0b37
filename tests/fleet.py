"""What tests of queue, sweep and promoter share: holds to end, and the parts that end them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
from prometheus_client import REGISTRY
from pydantic import SecretStr

from expiry import loops
from expiry.expire import Wake
from expiry.holds import Hold, place_many
from expiry.permits import Permits
from expiry.promoter import Promoter
from expiry.settings import Settings
from expiry.sweep import Sweep
from expiry.wakeups import Wakeups, connect_redis
from expiry.wanted import Item, Wanted
from expiry.worker import GovernedWorker
from governor import GovernorSettings, PostgresBucket, RedisBucket

Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

TENANT = "shop"
PLENTY = GovernorSettings(floor_per_s=100_000, ceiling_per_s=100_000)  # permits are never short
PLACED_AT_ONCE = 1000


def settings_for(database_url: str, redis_url: str, **changed: Any) -> Settings:  # noqa: ANN401 - fields
    """Return settings on these stores, defaults but for what is changed."""
    return Settings(database_url=SecretStr(database_url), redis_url=SecretStr(redis_url), **changed)


# --- holds


async def placed(pool: Pool, n: int, *, ttl_s: float = 1, resource: str = "r{}") -> list[Hold]:
    """Place n holds of one unit each."""
    holds: list[Hold] = []
    async with pool.acquire() as conn:
        for first in range(0, n, PLACED_AT_ONCE):
            some = range(first, min(n, first + PLACED_AT_ONCE))
            wanted = [Wanted(items=[Item(resource.format(i))], ttl_s=ttl_s) for i in some]
            holds += (await place_many(conn, wanted, tenant_id=TENANT)).holds
    return holds


BACKDATE = """
UPDATE holds h SET placed_at = w.expires_at - interval '1 minute', expires_at = w.expires_at
  FROM unnest($1::uuid[], $2::timestamptz[]) AS w (id, expires_at) WHERE h.id = w.id
"""


async def overdue(pool: Pool, n: int, *, by_s: float = 60, resource: str = "r{}") -> list[Hold]:
    """Place n holds and move their deadlines by_s into the past, a millisecond apart, the first the oldest."""
    holds = await placed(pool, n, ttl_s=60, resource=resource)
    now: datetime = await pool.fetchval("SELECT clock_timestamp()")
    first = now - timedelta(seconds=by_s, milliseconds=n)
    late = [replace(h, expires_at=first + timedelta(milliseconds=i)) for i, h in enumerate(holds)]
    await pool.execute(BACKDATE, [h.id for h in late], [h.expires_at for h in late])
    return late


async def due_in(pool: Pool, seconds: float) -> Hold:
    """Place a hold that comes due so soon.

    A worker that rests notices it within PEEK_S, half a second: one that is due before may be late.
    """
    [hold] = await placed(pool, 1, ttl_s=60)
    at: datetime = await pool.fetchval("SELECT clock_timestamp()") + timedelta(seconds=seconds)
    await pool.execute(BACKDATE, [hold.id], [at])
    return replace(hold, expires_at=at)


def due(holds: Sequence[Hold]) -> list[tuple[Wake, datetime]]:
    """Return the wake-ups of the holds, as `enqueue_due` takes them."""
    return [(Wake(h.id, h.generation), h.expires_at) for h in holds]


async def states(pool: Pool) -> dict[str, int]:
    """Return how many holds are in which state."""
    rows = await pool.fetch("SELECT state, count(*) AS n FROM holds GROUP BY state")
    return {row["state"]: row["n"] for row in rows}


def expired(pool: Pool, n: int) -> Callable[[], Awaitable[bool]]:
    """Return a check for `eventually`: at least n holds have expired."""

    async def check() -> bool:
        return (await states(pool)).get("expired", 0) >= n

    return check


def holds_true(check: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    """Return a check for `eventually` of one that needs no await."""

    async def checked() -> bool:
        return check()

    return checked


LAGS_MS = """
SELECT extract(epoch FROM ended_at - expires_at)::double precision * 1000 AS ms
  FROM holds WHERE state = 'expired' ORDER BY 1
"""


async def lags_ms(pool: Pool) -> list[float]:
    """Return how late the expired holds ended, the most punctual first."""
    return [row["ms"] for row in await pool.fetch(LAGS_MS)]


BROKEN = """
SELECT 'P1: ' || id || ' ended early' AS what FROM holds WHERE state = 'expired' AND ended_at < expires_at
UNION ALL
SELECT 'P2, P3: ' || h.id || ' is ' || h.state || ' with events ' || coalesce(string_agg(o.key, ' '), 'none')
  FROM holds h LEFT JOIN outbox o ON o.hold_id = h.id
       AND o.type IN ('hold.expired', 'hold.released', 'hold.confirmed')
 GROUP BY h.id HAVING count(o.id) <> (h.state <> 'held')::int
UNION ALL
SELECT 'P7: ' || r.resource_id || ' counts ' || r.held || ' held'
  FROM resources r
 WHERE r.held <> (SELECT count(*) FROM holds h WHERE h.state = 'held' AND h.resource_ids[1] = r.resource_id)
"""


async def assert_kept(pool: Pool) -> None:
    """Fail unless nothing ended early, and each ended hold ended once, with one event."""
    assert [row["what"] for row in await pool.fetch(BROKEN)] == []


# --- parts


@asynccontextmanager
async def wakeups_on(settings: Settings, governor: GovernorSettings = PLENTY) -> AsyncIterator[Wakeups]:
    """Give the wake-ups a client of their own."""
    redis = connect_redis(settings)
    try:
        yield Wakeups(redis, settings, governor)
    finally:
        await redis.aclose()


@asynccontextmanager
async def working(
    pool: Pool,
    settings: Settings,
    *,
    governor: GovernorSettings = PLENTY,
    wakeups: type[Wakeups] = Wakeups,
    kind: type[GovernedWorker] = GovernedWorker,
    **options: Any,  # noqa: ANN401 - the worker's own keywords
) -> AsyncIterator[GovernedWorker]:
    """Run a worker with a Redis client of its own, and stop it in good order."""
    redis = connect_redis(settings)
    worker = kind(
        pool=pool,
        redis=redis,
        wakeups=wakeups(redis, settings, governor),
        settings=settings,
        handle_signals=False,
        **options,
    )
    running = asyncio.create_task(worker.async_run())
    try:
        yield worker
    finally:
        await worker.close()
        await asyncio.gather(running, return_exceptions=True)
        await redis.aclose()
    assert running.cancelled() or running.exception() is None, running


@asynccontextmanager
async def serving(
    pool: Pool, settings: Settings, governor: GovernorSettings = PLENTY
) -> AsyncIterator[Wakeups]:
    """Run worker, promoter and sweep as one process of the service does; gives the wake-ups to enqueue with."""
    stop = asyncio.Event()
    async with (
        wakeups_on(settings, governor) as wakeups,
        working(pool, settings, governor=governor),
        looping(
            pool,
            "promoter",
            Promoter(pool, wakeups, settings).tick,
            interval_s=settings.promoter_interval_s,
        ),
        looping(
            pool,
            "sweep",
            sweep_of(pool, settings, wakeups, governor, stop).one_pass,
            interval_s=settings.sweep_interval_s,
            stop=stop,
        ),
    ):
        yield wakeups


def permits_of(pool: Pool, wakeups: Wakeups | None, governor: GovernorSettings = PLENTY) -> Permits:
    """Return permits from Redis, or PostgreSQL alone without wake-ups."""
    row = PostgresBucket(pool, "expire", floor_per_s=governor.floor_per_s)
    if wakeups is None:
        return Permits(None, row, governor)
    shared = RedisBucket(wakeups.redis, wakeups.bucket_key, floor_per_s=governor.floor_per_s)
    return Permits(shared, row, governor)


def sweep_of(
    pool: Pool,
    settings: Settings,
    wakeups: Wakeups | None = None,
    governor: GovernorSettings = PLENTY,
    stop: asyncio.Event | None = None,
) -> Sweep:
    """Return a sweep that nobody pauses."""
    permits = permits_of(pool, wakeups, governor)
    return Sweep(pool, permits, settings, stop or asyncio.Event(), lambda: False)


@asynccontextmanager
async def looping(
    pool: Pool,
    name: str,
    tick: Callable[[], Awaitable[object]],
    *,
    interval_s: float,
    pauses: loops.Pauses | None = None,
    stop: asyncio.Event | None = None,
) -> AsyncIterator[None]:
    """Run a loop as the service does."""
    stop = stop or asyncio.Event()
    running = asyncio.create_task(
        loops.run(name, tick, interval_s=interval_s, stop=stop, pauses=pauses or loops.Pauses(pool))
    )
    try:
        yield
    finally:
        stop.set()
        await running


class Counted:
    """How much the metrics grew since this was made."""

    def __init__(self) -> None:
        self._before = self._samples()

    def __call__(self, name: str, **labels: str) -> float:
        """Return the growth of one sample."""
        key = (name, frozenset(labels.items()))
        return self._samples().get(key, 0.0) - self._before.get(key, 0.0)

    @staticmethod
    def _samples() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {(s.name, frozenset(s.labels.items())): s.value for m in REGISTRY.collect() for s in m.samples}


# --- processes


@asynccontextmanager
async def child_worker(
    settings: Settings, stop_at: str = "", **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `child_worker.py`, and kill what is left of it in the end."""
    fields = settings.model_dump(mode="json", exclude_unset=True) | {
        "database_url": settings.database_url.get_secret_value(),
        "redis_url": settings.redis_url.get_secret_value(),
    }
    root = Path(__file__).parents[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.child_worker", json.dumps(fields), stop_at),
        cwd=root,
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await said(process, "ready")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: asyncio.subprocess.Process, line: str) -> None:
    """Wait until the process writes this line."""
    assert process.stdout is not None
    async with asyncio.timeout(10):
        while (read := await process.stdout.readline()).decode().strip() != line:
            assert read, f"ended with {process.returncode} before it said {line!r}"
