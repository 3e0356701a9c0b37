"""Enqueue: wake-ups per second from one process, and the memory that each takes until it is due."""

import os
from collections import defaultdict
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from redis.asyncio import Redis

from bench import show
from bench.attempt import attempt, progress
from bench.contenders import ENQUEUE, Contender
from bench.figures import figure, median
from bench.fill import fill
from bench.options import Options
from bench.redis7 import redis7
from bench.report import Result, View, failures, succeeded
from bench.stage import Stage, connection, seed

AHEAD = timedelta(minutes=10)  # all deadlines lie ahead: nothing is due meanwhile

COLUMNS = (
    "enqueue",
    "wake-ups/s",
    "lowest",
    "highest",
    "bytes each, Valkey 9",
    "Redis 7",
    "µs each: Redis",
    "PostgreSQL",
)


async def measure(stage: Stage, options: Options) -> list[dict[str, Any]]:
    """Run every contender in turn, round by round; on Redis 7 too where there is one."""
    runs = []
    async with redis7(stage.folder) as other:
        for number in range(1, options.runs + 1):
            for contender in options.chosen(ENQUEUE):
                run = await attempt(contender, once(stage, contender, options))
                if other and "error" not in run and run["bytes"]:
                    on_7 = await attempt(contender, once(replace(stage, redis_url=other), contender, options))
                    run["bytes_redis7"] = on_7.get("bytes")
                runs.append(run)
                progress("enqueue", number, options, run, "rate", "wake-ups/s")
    return runs


async def once(stage: Stage, contender: Contender, options: Options) -> dict[str, Any]:
    """One run, into an empty queue."""
    await stage.fresh(await stage.template(holds=0))
    async with connection(stage.database_url) as conn:
        await seed(conn, options.holds, first=datetime.now(UTC) + AHEAD)
    holds = await stage.holds_file()
    load, before, memory = os.getloadavg()[0], stage.cpu([]), await _memory(stage)
    said = await fill(stage, contender, holds=holds)
    used = stage.cpu([]) - before
    grown = await _memory(stage) - memory
    return {
        "n": said["n"],
        "seconds": said["seconds"],
        "rate": said["n"] / said["seconds"],
        "bytes": grown / said["n"] if contender.in_redis else None,
        "cpu_s": asdict(used),
        "load_before": load,
    }


async def _memory(stage: Stage) -> int:
    async with Redis.from_url(stage.redis_url) as redis:
        info = await redis.info("memory")
        return int(info["used_memory"])


def view(result: Result) -> View:
    """Answer medians, fastest first."""
    by_title: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in succeeded(result):
        by_title[run["title"]].append(run)
    rows, pictured = [], []
    for title, runs in sorted(by_title.items(), key=lambda item: -median(r["rate"] for r in item[1])):
        rates = [r["rate"] for r in runs]
        memory = [_median_of(runs, "bytes"), _median_of(runs, "bytes_redis7")]
        cost = [median(r["cpu_s"][kind] / r["n"] * 1e6 for r in runs) for kind in ("redis", "postgres")]
        rows.append([title, *map(figure, [median(rates), min(rates), max(rates), *memory, *cost])])
        pictured.append((title, median(rates)))
    return View(
        "Enqueue: wake-ups that lie ahead, from one process",
        COLUMNS,
        rows,
        show.bars("Wake-ups enqueued per second (median)", "/s", pictured),
        failures(result),
    )


def _median_of(runs: list[dict[str, Any]], key: str) -> float | None:
    values = [r[key] for r in runs if r.get(key) is not None]
    return median(values) if values else None
