"""Scale: what a place and a batch of the sweep cost, whatever the size of the tables.

Each size is a database of its own on one server, of which a tenth is overdue; all are visited in turn, round by round,
so that what slows the machine slows them alike. The plan of the sweep's page is kept with the figures.
"""

import os
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from bench import show, sql
from bench.attempt import progress
from bench.figures import figure, median
from bench.options import Options
from bench.report import Result, View
from bench.stage import Stage, connection, on, seed
from expiry import holds, schema, sweep
from expiry.expire import Wake, expire
from expiry.group import ask, place_group
from expiry.wanted import Item, Wanted

SIZES = (100_000, 1_000_000, 10_000_000)
OVERDUE = 0.1
SEEDED_AT_ONCE = 500_000
BATCH, BATCHES = 500, 5  # of the overdue of the smallest, three rounds take three quarters
PLACES, GROUPS, GROUP = 200, 30, 16
NOTHING = UUID(int=0)
COLUMNS = (
    "holds",
    "place us",
    "place of 16 us",
    "sweep page us",
    "expire 500 us",
    "blocks a batch",
    "table MB",
    "indexes MB",
)
BLOCKS = """
SELECT heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit
  FROM pg_statio_user_tables WHERE relname = 'holds'
"""
SPACE = "SELECT pg_table_size('holds') AS of_table, pg_indexes_size('holds') AS of_indexes"


async def measure(stage: Stage, options: Options) -> list[dict[str, Any]]:
    """Make every size, then visit them in turn."""
    sizes = [size for size in SIZES if size <= options.size]
    for size in sizes:
        print(f"scale  making {size:,} holds ...", flush=True)
        await _make(stage, size)
    runs = []
    for number in range(1, options.runs + 1):
        for size in sizes:
            async with connection(on(stage.server_url, _name(size))) as conn:
                runs.append(
                    {
                        "contender": str(size),
                        "title": f"{size:,}",
                        "load_before": os.getloadavg()[0],
                        **await _visit(conn),
                    }
                )
            progress("scale", number, options, runs[-1], "expire_us", "us a batch")
    return runs


def _name(size: int) -> str:
    return f"bench_scale_{size}"


async def _make(stage: Stage, size: int) -> None:
    async with connection(stage.server_url) as admin:
        await admin.execute(f"CREATE DATABASE {_name(size)}")
    async with connection(on(stage.server_url, _name(size))) as conn:
        await schema.apply(conn)
        await conn.execute(sql.SEED_RESOURCES, size)
        first = datetime.now(UTC) - timedelta(minutes=30)
        due = int(size * OVERDUE)
        for number in range(0, due, SEEDED_AT_ONCE):
            count = min(SEEDED_AT_ONCE, due - number)
            await conn.execute(sql.SEED, count, True, first, timedelta(minutes=20) / count)  # noqa: FBT003 - counted
        later = datetime.now(UTC) + timedelta(days=1)
        for number in range(0, size - due, SEEDED_AT_ONCE):
            count = min(SEEDED_AT_ONCE, size - due - number)
            await seed(conn, count, first=later + timedelta(seconds=number), counted=False)
        await conn.execute("VACUUM (FREEZE, ANALYZE)")
        await conn.execute("CHECKPOINT")


async def _visit(conn: "asyncpg.Connection[Any]") -> dict[str, Any]:
    """Place, place in groups, and sweep, each often enough for a median."""
    random = Random(1)

    def room() -> list[Item]:
        return [Item(f"room-{random.randrange(sql.RESOURCES)}")]

    for _ in range(10):  # plans, caches
        await holds.place(conn, tenant_id="shop", items=room(), ttl_s=900, idempotency_key=uuid4().hex)
    places = []
    for _ in range(PLACES):
        started_s = time.perf_counter()
        await holds.place(conn, tenant_id="shop", items=room(), ttl_s=900, idempotency_key=uuid4().hex)
        places.append((time.perf_counter() - started_s) * 1e6)
    groups = []
    for _ in range(GROUPS):
        asks = [
            ask(Wanted(items=room(), ttl_s=900), tenant_id="shop", by="bench", route="place", key=uuid4().hex)
            for _ in range(GROUP)
        ]
        started_s = time.perf_counter()
        placed = await place_group(conn, [one for one in asks if one is not None])
        groups.append((time.perf_counter() - started_s) * 1e6 / GROUP)
        assert all(placed)  # noqa: S101 - nobody else is here
    return {"place_us": median(places), "group_us": median(groups), **await _sweep(conn)}


async def _sweep(conn: "asyncpg.Connection[Any]") -> dict[str, Any]:
    """Do as one pass does: a page after the cursor, then the transition."""
    now = await conn.fetchval(sweep.CLOCK)
    cursor = (datetime(1970, 1, 1, tzinfo=UTC), NOTHING)
    pages, batches = [], []
    explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT TEXT) {sweep.DUE_PAGE}"
    plan = "\n".join(row[0] for row in await conn.fetch(explain, now, *cursor, BATCH))
    await conn.execute("SELECT pg_stat_force_next_flush()")
    before = await conn.fetchval(BLOCKS)
    for _ in range(BATCHES):
        started_s = time.perf_counter()
        rows = await conn.fetch(sweep.DUE_PAGE, now, *cursor, BATCH)
        pages.append((time.perf_counter() - started_s) * 1e6)
        if not rows:
            break
        started_s = time.perf_counter()
        await expire(conn, [Wake(row["id"], row["generation"]) for row in rows], by="sweep")
        batches.append((time.perf_counter() - started_s) * 1e6)
        cursor = (rows[-1]["due_at"], rows[-1]["id"])
    await conn.execute("SELECT pg_stat_force_next_flush()")
    sizes = await conn.fetchrow(SPACE)
    assert sizes is not None  # noqa: S101 - it has no FROM
    return {
        "page_us": median(pages),
        "expire_us": median(batches) if batches else 0.0,
        "blocks_a_batch": (await conn.fetchval(BLOCKS) - before) / max(len(batches), 1),
        "table_mb": sizes["of_table"] / 1e6,
        "indexes_mb": sizes["of_indexes"] / 1e6,
        "plan": plan,
    }


def view(result: Result) -> View:
    """Answer medians over the rounds, smallest table first."""
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in result.runs:
        by_name[run["title"]].append(run)
    keys = ("place_us", "group_us", "page_us", "expire_us", "blocks_a_batch", "table_mb", "indexes_mb")
    rows = [
        [title, *(figure(median(run[key] for run in runs)) for key in keys)]
        for title, runs in by_name.items()
    ]
    pictured = [
        (f"expiry, {title} holds", median(r["expire_us"] for r in runs)) for title, runs in by_name.items()
    ]
    return View(
        "Scale: microseconds at each size of the table, a tenth of it overdue",
        COLUMNS,
        rows,
        show.bars("A batch of 500 expired by the sweep (median)", "us", pictured),
        [],
    )
