"""Churn: what a long time of places and expiries leaves behind: dead rows, sizes of tables and indexes, memory.

One worker, as in production, and a feed of holds that live for 5 to 30 s. As nothing is old enough to be pruned within
a bench, the bench itself forgets what ended ten minutes ago, by the statements of the prune loop.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import asyncpg

from bench import show
from bench.contenders import OURS
from bench.drain import said_by_all
from bench.figures import figure
from bench.options import Options
from bench.proc import started
from bench.report import Result, View
from bench.stage import Stage, connection
from expiry import holds, prune
from expiry.settings import Settings
from expiry.wakeups import Wakeups, connect_redis
from expiry.wanted import Item, Wanted
from governor import GovernorSettings

PER_S = 400
TTL_S = (5, 30)
RESOURCES = 1000
KEPT = timedelta(minutes=10)
LOOK_S = 15.0
COLUMNS = (
    "minute",
    "holds",
    "dead holds",
    "holds MB",
    "its indexes MB",
    "outbox MB",
    "its indexes MB",
    "worker MB",
    "PostgreSQL MB",
    "Redis MB",
)

SEED = """
INSERT INTO resources (tenant_id, resource_id, capacity)
SELECT 'bench', 'room-' || i, 1000000 FROM generate_series(0, $1::int - 1) i
"""
OLD = "SELECT id FROM holds WHERE id < $1 ORDER BY id LIMIT 5000"  # ids are ordered by time
SIZES = """
SELECT (SELECT n_live_tup FROM pg_stat_user_tables WHERE relname = 'holds') AS live,
       (SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'holds') AS dead,
       (SELECT autovacuum_count FROM pg_stat_user_tables WHERE relname = 'holds') AS vacuums,
       pg_table_size('holds') AS holds, pg_indexes_size('holds') AS holds_indexes,
       pg_table_size('outbox') AS outbox, pg_indexes_size('outbox') AS outbox_indexes,
       (SELECT count(*) FROM holds WHERE state = 'held' AND expires_at < clock_timestamp() - interval '1 s') AS late
"""


async def measure(stage: Stage, options: Options) -> list[dict[str, Any]]:
    """Churn for so many minutes; look every quarter of one."""
    await stage.fresh(await stage.template(holds=0))
    settings = Settings.model_validate({"database_url": stage.database_url, "redis_url": stage.redis_url})
    looks: list[dict[str, Any]] = []
    log = stage.folder / "churn"
    wakeups = Wakeups(connect_redis(settings), settings, GovernorSettings())
    async with connection(stage.database_url) as conn, connection(stage.database_url) as eye:
        await conn.execute(SEED, RESOURCES)
        with started([OURS.work], stage.env | OURS.env, log) as processes:
            await said_by_all(processes, log, "service.started")
            feeding = asyncio.create_task(_feed(conn, wakeups))
            try:
                began_s = time.monotonic()
                while time.monotonic() - began_s < options.minutes * 60:
                    await asyncio.sleep(LOOK_S)
                    if feeding.done():
                        await feeding
                    await _forget(eye)
                    minute = (time.monotonic() - began_s) / 60
                    looks.append(await _look(stage, eye, processes[0].pid, minute))
                    print(f"churn  minute {minute:.1f}: {looks[-1]['live']:,} holds", flush=True)
            finally:
                feeding.cancel()
                with suppress(asyncio.CancelledError):
                    await feeding
                await wakeups.redis.aclose()
    return looks


async def _feed(conn: "asyncpg.Connection[Any]", wakeups: Wakeups) -> None:
    """Place holds in tenths of a second, as one caller of the library does."""
    random = Random(1)
    due_s = time.monotonic()
    while True:
        wanted = [
            Wanted(items=[Item(f"room-{random.randrange(RESOURCES)}")], ttl_s=random.randint(*TTL_S))
            for _ in range(PER_S // 10)
        ]
        placed = await holds.place_many(conn, wanted, tenant_id="bench")
        await wakeups.enqueue(placed.holds)
        due_s += 0.1
        await asyncio.sleep(max(due_s - time.monotonic(), 0))


async def _forget(conn: "asyncpg.Connection[Any]") -> None:
    """Forget holds and events that ended long ago, in the batches of the prune loop."""
    ended_before_s = time.time() - KEPT.total_seconds() - TTL_S[1]
    before_id = UUID(int=int(ended_before_s * 1000) << 80)
    while rows := await conn.fetch(OLD, before_id):
        for first in range(0, len(rows), prune.BATCH_MAX):
            ids = [row["id"] for row in rows[first : first + prune.BATCH_MAX]]
            await conn.fetchval(prune.FORGET, ids)
    before = await conn.fetchval("SELECT clock_timestamp() - $1::interval", KEPT)
    while await conn.fetchval(prune.PRUNE_OUTBOX, before, prune.BATCH_MAX, "bench"):
        pass


async def _look(
    stage: Stage, conn: "asyncpg.Connection[Any]", worker_pid: int, minute: float
) -> dict[str, Any]:
    sizes = await conn.fetchrow(SIZES)
    assert sizes is not None  # noqa: S101 - it has no FROM
    return {
        "contender": "churn",
        "title": f"{minute:.0f}",
        "minute": minute,
        **dict(sizes),
        "worker_mb": memory_mb([worker_pid]),
        "postgres_mb": memory_mb([stage.postgres_pid]),
        "redis_mb": memory_mb([stage.redis_pid]),
        "load_before": os.getloadavg()[0],
    }


def memory_mb(roots: Sequence[int]) -> float:
    """Answer the proportional memory (Pss) of these processes and their children: shared pages count once."""
    total_kb, pids = 0, list(roots)
    while pids:
        pid = pids.pop()
        with suppress(OSError, StopIteration):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total_kb += int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1])
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return total_kb / 1024


def view(result: Result) -> View:
    """Answer a dozen of the looks."""
    looks = result.runs
    step = max(len(looks) // 12, 1)
    mb = ("holds", "holds_indexes", "outbox", "outbox_indexes")
    rows = [
        [
            f"{look['minute']:.0f}",
            f"{look['live']:,}",
            f"{look['dead']:,}",
            *(figure(look[key] / 1e6) for key in mb),
            *(figure(look[key]) for key in ("worker_mb", "postgres_mb", "redis_mb")),
        ]
        for look in looks[step - 1 :: step]
    ]
    pictured = [(f"minute {look['title']}", look["holds_indexes"] / 1e6) for look in looks[step - 1 :: step]]
    return View(
        f"Churn: {PER_S} holds/s placed and expired, what ended is forgotten after ten minutes",
        COLUMNS,
        rows,
        show.bars("Size of the indexes of holds", "MB", pictured),
        [f"{sum(look['vacuums'] for look in looks[-1:])} autovacuums of holds in all."],
    )
