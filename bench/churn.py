"""Churn: what a long time of places and expiries leaves behind: dead rows, sizes of tables and indexes, memory.

Two shops at once, each with servers, a worker and an API process of its own, beside the holds of a past that is still
retained: one with the autovacuum settings of schema.sql, one with those of PostgreSQL. Holds live for 5 to 30 s. As
nothing is old enough to be pruned within a bench, the bench itself forgets what ended ten minutes ago, by the
statements of the prune loop.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import aiohttp
import asyncpg

from bench import http
from bench.contenders import OURS
from bench.drain import said_by_all
from bench.figures import figure, median
from bench.options import Options
from bench.panel import HEIGHT, Panel, Scale, page
from bench.proc import said, started
from bench.report import Result, View
from bench.show import GREY
from bench.show import OURS as GREEN
from bench.stage import Stage, connection, opened
from expiry import keys, prune, sweep

PER_S, IN_A_GROUP, CONNECTIONS = 400, 40, 8
CREATED = 201
TTL_S = (5, 30)
RESOURCES = 1000
RETAINED = 2_000_000  # holds that ended before: a retention of days is millions of rows
KEPT = timedelta(minutes=10)
LOOK_S = 15.0
ROWS = 6  # of the table, for each shop
PAGE, PAGES = 500, 5  # holds of a page, pages of which the median counts
NOTHING = (datetime(1970, 1, 1, tzinfo=UTC), UUID(int=0))
COLUMNS = (
    "autovacuum by",
    "minute",
    "dead holds",
    "holds MB",
    "its indexes MB",
    "resources MB",
    "outbox MB",
    "sweep page us",
    "worker MB",
    "API MB",
    "PostgreSQL MB",
    "Redis MB",
)
VACUUMS = (("vacuums", "holds"), ("resources_vacuums", "resources"), ("outbox_vacuums", "outbox"))
LEFT, TOP, WIDE, GAP = 60, 84, 200, 70
PANELS: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
    ("dead holds", lambda look: look["dead"]),
    ("holds and its indexes, MB", lambda look: (look["holds"] + look["holds_indexes"]) / 1e6),
    ("a page of the sweep, us", lambda look: look["page_us"]),
)


@dataclass(frozen=True, slots=True)
class Shop:
    """One of the two."""

    name: str
    title: str
    colour: str
    change: str  # of the tables' settings


AS_THEY_COME = """
ALTER TABLE holds RESET (autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold,
                         autovacuum_analyze_scale_factor, autovacuum_analyze_threshold);
ALTER TABLE resources RESET (autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold);
ALTER TABLE outbox RESET (autovacuum_vacuum_insert_scale_factor, autovacuum_vacuum_insert_threshold);
"""
SHOPS = (
    Shop("ours", "expiry's settings", GREEN, ""),
    Shop("defaults", "PostgreSQL's defaults", GREY, AS_THEY_COME),
)

SEED = """
INSERT INTO resources (tenant_id, resource_id, capacity)
SELECT 'bench', 'room-' || i, 1000000 FROM generate_series(0, $1::int - 1) i
"""
SEED_RETAINED = """
INSERT INTO holds (id, tenant_id, resource_ids, quantities, counted, placed_at, expires_at, state, ended_at, ended_by)
SELECT uuidv7('-1 day'::interval), 'bench', ARRAY['room-' || i % $2::int], ARRAY[1], ARRAY[true],
       now() - interval '1 day', now() - interval '23 h', 'expired', now() - interval '23 h', 'worker'
  FROM generate_series(1, $1::int) i
"""
OLD = "SELECT id FROM holds WHERE id > $1 AND id < $2 ORDER BY id LIMIT 5000"  # ids are ordered by time
SIZES = """
SELECT (SELECT n_live_tup FROM pg_stat_user_tables WHERE relname = 'holds') AS live,
       (SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'holds') AS dead,
       (SELECT autovacuum_count FROM pg_stat_user_tables WHERE relname = 'holds') AS vacuums,
       (SELECT autovacuum_count FROM pg_stat_user_tables WHERE relname = 'resources') AS resources_vacuums,
       (SELECT autovacuum_count FROM pg_stat_user_tables WHERE relname = 'outbox') AS outbox_vacuums,
       pg_table_size('holds') AS holds, pg_indexes_size('holds') AS holds_indexes,
       pg_table_size('resources') AS resources,
       pg_table_size('outbox') AS outbox, pg_indexes_size('outbox') AS outbox_indexes,
       (SELECT count(*) FROM holds WHERE state = 'held' AND expires_at < clock_timestamp() - interval '1 s') AS late
"""


async def measure(stage: Stage, options: Options) -> list[dict[str, Any]]:
    """Churn for so many minutes in both shops; look every quarter of one."""
    async with opened() as other, asyncio.TaskGroup() as group:
        both = [
            group.create_task(_churn(at, shop, options.minutes))
            for at, shop in zip((stage, other), SHOPS, strict=True)
        ]
    return [look for shop in both for look in shop.result()]


async def _churn(stage: Stage, shop: Shop, minutes: float) -> list[dict[str, Any]]:
    await stage.fresh(await stage.template(holds=0))
    async with connection(stage.database_url) as conn:
        key = await keys.create(conn, tenant_id="bench", scopes=("holds",))
        began = await conn.fetchval(sweep.CLOCK)
        await conn.execute(SEED, RESOURCES)
        await conn.execute(SEED_RETAINED, RETAINED, RESOURCES)
        await conn.execute(shop.change)
        await conn.execute("VACUUM (FREEZE, ANALYZE)")
        work, serve = stage.folder / "churn-worker", stage.folder / "churn-api"
        with (
            started([OURS.work], stage.env | OURS.env, work) as workers,
            started([http.API], stage.env | http.ENV, serve) as apis,
        ):
            await said_by_all(workers, work, "service.started")
            await said_by_all(apis, serve, "http.listening")
            feeding = asyncio.create_task(_feed(http.port_of(said(serve)), key))
            try:
                looks, began_s = [], time.monotonic()
                while time.monotonic() - began_s < minutes * 60 and not feeding.done():
                    await asyncio.sleep(LOOK_S)
                    await _forget(conn, began)
                    minute = (time.monotonic() - began_s) / 60
                    looks.append(await _look(stage, shop, conn, (workers[0].pid, apis[0].pid), minute))
                    print(f"churn  {shop.title}, minute {minute:.1f}: {looks[-1]['dead']:,} dead", flush=True)
                return looks
            finally:
                feeding.cancel()
                await asyncio.wait([feeding])
                if not feeding.cancelled():
                    feeding.result()


async def _feed(port: int, key: str) -> None:
    """Place holds in groups at fixed times, as fast as one connection pool of a shop does."""
    random, due_s = Random(1), time.monotonic()
    headers, url = {"Authorization": f"Bearer {key}"}, f"http://127.0.0.1:{port}/v1/holds"

    async def place(session: aiohttp.ClientSession) -> None:
        wanted = {"resource_id": f"room-{random.randrange(RESOURCES)}", "ttl_s": random.randint(*TTL_S)}
        async with session.post(url, json=wanted) as answer:
            if answer.status != CREATED:
                raise RuntimeError(f"a hold was refused: {answer.status} {await answer.text()}")

    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        while True:
            await asyncio.gather(*(place(session) for _ in range(IN_A_GROUP)))
            due_s += IN_A_GROUP / PER_S
            await asyncio.sleep(max(due_s - time.monotonic(), 0))


async def _forget(conn: "asyncpg.Connection[Any]", began: datetime) -> None:
    """Forget holds and events that ended long ago, in the batches of the prune loop; what was retained stays."""
    ended_before = time.time() - KEPT.total_seconds() - TTL_S[1]
    first_id, before_id = (UUID(int=int(at * 1000) << 80) for at in (began.timestamp(), ended_before))
    while rows := await conn.fetch(OLD, first_id, before_id):
        for first in range(0, len(rows), prune.BATCH_MAX):
            ids = [row["id"] for row in rows[first : first + prune.BATCH_MAX]]
            await conn.fetchval(prune.FORGET, ids)
    before = await conn.fetchval("SELECT clock_timestamp() - $1::interval", KEPT)
    while await conn.fetchval(prune.PRUNE_OUTBOX, before, prune.BATCH_MAX, "bench"):
        pass


async def _look(
    stage: Stage, shop: Shop, conn: "asyncpg.Connection[Any]", pids: tuple[int, int], minute: float
) -> dict[str, Any]:
    sizes = await conn.fetchrow(SIZES)
    assert sizes is not None  # noqa: S101 - it has no FROM
    pages = []
    for _ in range(PAGES):
        started_s, now = time.perf_counter(), await conn.fetchval(sweep.CLOCK)
        await conn.fetch(sweep.DUE_PAGE, now, *NOTHING, PAGE)
        pages.append((time.perf_counter() - started_s) * 1e6)
    return {
        "contender": shop.name,
        "title": shop.title,
        "minute": minute,
        **dict(sizes),
        "page_us": median(pages),
        "worker_mb": memory_mb(pids[:1]),
        "api_mb": memory_mb(pids[1:]),
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
    """Answer a few looks at each shop, evenly spread, and all of them as lines."""
    by_shop = {shop: [look for look in result.runs if look["contender"] == shop.name] for shop in SHOPS}
    mb = ("holds", "holds_indexes", "resources", "outbox")
    rest = ("page_us", "worker_mb", "api_mb", "postgres_mb", "redis_mb")
    rows, notes = [], []
    for shop, looks in by_shop.items():
        step = max(len(looks) // ROWS, 1)
        rows += [
            [
                shop.title,
                f"{look['minute']:.0f}",
                f"{look['dead']:,}",
                *(figure(look[key] / 1e6) for key in mb),
                *(figure(look[key]) for key in rest),
            ]
            for look in looks[step - 1 :: step]
        ]
        counts = ", ".join(f"{looks[-1][key]} of {table}" for key, table in VACUUMS) if looks else "none seen"
        most = max((look["dead"] for look in looks), default=0)
        notes.append(f"{shop.title}: at most {most:,} dead holds; autovacuums: {counts}.")
    title = f"Churn: {PER_S} holds/s placed and expired beside {RETAINED:,} retained ones"
    return View(title, COLUMNS, rows, picture(title, by_shop), notes)


def picture(title: str, by_shop: dict[Shop, list[dict[str, Any]]]) -> str:
    """Draw one panel for each figure, as SVG."""
    width = LEFT + len(PANELS) * (WIDE + GAP)
    parts = page(width, TOP + HEIGHT + 30, title, [(shop.colour, shop.title) for shop in SHOPS])
    seconds = max((look["minute"] * 60 for looks in by_shop.values() for look in looks), default=1.0)
    for number, (said_, of) in enumerate(PANELS):
        lines = {shop: [(look["minute"] * 60, of(look)) for look in looks] for shop, looks in by_shop.items()}
        scale = Scale.of([value for line in lines.values() for _, value in line], logarithmic=False)
        panel = Panel(LEFT + number * (WIDE + GAP), TOP, WIDE, seconds, scale)
        parts += panel.frame(said_, labelled=True)
        parts += [panel.line(line, shop.colour) for shop, line in lines.items()]
    return "\n".join([*parts, "</svg>", ""])
