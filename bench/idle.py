"""Idle: what a worker costs that has nothing to do, while wake-ups wait for a deadline far ahead."""

import asyncio
import os
from collections import defaultdict
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

from redis.asyncio import Redis

from bench import show
from bench.attempt import attempt, progress
from bench.contenders import IDLE, Contender
from bench.figures import figure, median
from bench.fill import fill
from bench.options import Options
from bench.proc import said, started
from bench.report import Result, View, failures, succeeded
from bench.stage import Stage, connection, seed

WAITING = 1000
AHEAD = timedelta(minutes=10)
SETTLE_S = 6.0  # a start is not idleness

COLUMNS = ("idle", "Redis commands/s", "transactions/s", "CPU ms/s: consumer", "Redis", "PostgreSQL")
# Statements of the bench itself are not counted: it asks before and after, not meanwhile.
TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"


async def measure(stage: Stage, options: Options) -> list[dict[str, Any]]:
    """Run every contender in turn, round by round."""
    runs = []
    for number in range(1, options.runs + 1):
        for contender in options.chosen(IDLE):
            runs.append(await attempt(contender, once(stage, contender, options)))
            progress("idle", number, options, runs[-1], "commands_per_s", "Redis commands/s")
    return runs


async def once(stage: Stage, contender: Contender, options: Options) -> dict[str, Any]:
    """One run: started, settled, watched."""
    await stage.fresh(await stage.template(holds=0))
    async with connection(stage.database_url) as conn:
        await seed(conn, WAITING, first=datetime.now(UTC) + AHEAD)
        await fill(stage, contender)
        log = stage.folder / contender.name
        with started([contender.working()], stage.env | contender.env, log) as [process]:
            await asyncio.sleep(SETTLE_S)
            load, commands, transactions = (
                os.getloadavg()[0],
                await _commands(stage),
                await conn.fetchval(TRANSACTIONS),
            )
            before = stage.cpu([process.pid])
            await asyncio.sleep(options.idle_s)
            used = stage.cpu([process.pid]) - before
            if process.poll() is not None:
                raise RuntimeError(f"it ended: {said(log)[-2000:]}")
            commands = await _commands(stage) - commands
            transactions = await conn.fetchval(TRANSACTIONS) - transactions
    return {
        "commands_per_s": commands / options.idle_s,
        "transactions_per_s": transactions / options.idle_s,
        "cpu_ms_per_s": {kind: s * 1000 / options.idle_s for kind, s in asdict(used).items()},
        "load_before": load,
    }


async def _commands(stage: Stage) -> int:
    """Count the commands so far, those inside of scripts too; not the bench's own questions."""
    async with Redis.from_url(stage.redis_url) as redis:
        stats = await redis.info("commandstats")
    ours = ("cmdstat_info", "cmdstat_auth", "cmdstat_client|setinfo", "cmdstat_hello")
    return sum(int(s["calls"]) for name, s in stats.items() if name not in ours)


def view(result: Result) -> View:
    """Answer medians, the quietest first."""
    by_title: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in succeeded(result):
        by_title[run["title"]].append(run)
    rows, pictured = [], []
    for title, runs in sorted(
        by_title.items(), key=lambda item: median(r["commands_per_s"] for r in item[1])
    ):
        figures = [median(r[key] for r in runs) for key in ("commands_per_s", "transactions_per_s")]
        figures += [
            median(r["cpu_ms_per_s"][kind] for r in runs) for kind in ("consumer", "redis", "postgres")
        ]
        rows.append([title, *map(figure, figures)])
        pictured.append((title, sum(figures[2:])))
    return View(
        f"Idle: a worker while {WAITING:,} wake-ups wait",
        COLUMNS,
        rows,
        show.bars(
            "CPU time of an idle worker with its stores (median)",
            "ms/s",
            sorted(pictured, key=lambda p: p[1]),
        ),
        failures(result),
    )
