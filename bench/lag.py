"""Lag: how long after its deadline a hold ends, in a steady stream and alone after a quiet time.

All holds are there, and their wake-ups enqueued, before the first deadline. Lag is `ended_at` minus deadline
on the database's clock; to the commit it is as much longer as the second pair of columns says.
"""

import asyncio
import os
import re
import time
from collections import defaultdict
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

from bench import show, sql
from bench.attempt import attempt, progress
from bench.contenders import LAG, Contender
from bench.figures import figure, percentile
from bench.fill import fill
from bench.options import Options
from bench.proc import said, started
from bench.report import Result, View, failures, succeeded
from bench.stage import Stage, connection, seed, until

PER_S, STREAM_S = 200, 20
LEAD_S = 15.0  # for enqueueing and for the consumer's start
LATE_S_MAX = 60.0  # what has not ended so long after its deadline is left

COLUMNS = (
    "lag, ms",
    "stream: p50",
    "p99",
    "max",
    "commit: p50",
    "p99",
    "lone: p50",
    "max",
    "early looks",
    "never ended",
)


async def measure(stage: Stage, options: Options) -> list[dict[str, Any]]:
    """Run every contender in turn, round by round."""
    runs = []
    for number in range(1, options.runs + 1):
        for contender in options.chosen(LAG):
            runs.append(await attempt(contender, once(stage, contender, options)))
            progress("lag", number, options, runs[-1], "p99_ms", "ms at p99")
    return runs


async def once(stage: Stage, contender: Contender, options: Options) -> dict[str, Any]:
    """One run: a stream of deadlines, then lone ones."""
    await stage.fresh(await stage.template(holds=0))
    start = datetime.now(UTC) + timedelta(seconds=LEAD_S)
    end = start + timedelta(seconds=STREAM_S)
    async with connection(stage.database_url) as conn:
        await seed(conn, PER_S * STREAM_S, first=start, apart=timedelta(seconds=1 / PER_S))
        for _ in range(options.lone):
            end += timedelta(seconds=options.quiet_s)
            await seed(conn, 1, first=end)
        await conn.execute("ANALYZE")
        await fill(stage, contender)
        log = stage.folder / contender.name
        with started([contender.working()], stage.env | contender.env, log) as processes:
            await asyncio.sleep(max(start.timestamp() - time.time() - 1, 0))
            load, before = os.getloadavg()[0], stage.cpu([processes[0].pid])
            await asyncio.sleep(max(end.timestamp() - time.time(), 0))
            await until(conn, sql.ENDED, LATE_S_MAX)
            used = stage.cpu([processes[0].pid]) - before
        rows = await conn.fetch(sql.LAGS, timedelta(seconds=STREAM_S))
    stream = [round(r["ended_ms"], 3) for r in rows if not r["lone"]]
    if not stream:
        raise RuntimeError(f"it ended nothing: {said(log)[-2000:]}")
    return {
        "stream_ms": stream,
        "lone_ms": [round(r["ended_ms"], 3) for r in rows if r["lone"]],
        "commit_ms": [round(r["committed_ms"], 3) for r in rows if not r["lone"]],
        "p99_ms": percentile(stream, 99),
        "early_looks": early_looks(said(log)),
        "missing": PER_S * STREAM_S + options.lone - len(rows),
        "cpu_s": asdict(used),
        "load_before": load,
    }


def early_looks(log: str) -> int:
    """Count the looks that came before the deadline: peers say so in a line, our log per batch."""
    return len(re.findall(r"\bearly$", log, re.MULTILINE)) + sum(map(int, re.findall(r'"early": (\d+)', log)))


def view(result: Result) -> View:
    """Answer percentiles over all runs of each, best p99 first."""
    pooled: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in succeeded(result):
        for key in ("stream_ms", "commit_ms", "lone_ms"):
            pooled[run["title"]][key] += run[key]
        pooled[run["title"]]["early"].append(run["early_looks"])
        pooled[run["title"]]["missing"].append(run["missing"])
    rows, pictured = [], []
    for title, found in sorted(pooled.items(), key=lambda item: percentile(item[1]["stream_ms"], 99)):
        stream, commit, lone = found["stream_ms"], found["commit_ms"], found["lone_ms"]
        three = (percentile(stream, 50), percentile(stream, 99), max(stream))
        figures = [*three, percentile(commit, 50), percentile(commit, 99)]
        figures += [percentile(lone, 50), max(lone)] if lone else []
        counts = [f"{sum(found[key]):,.0f}" for key in ("early", "missing")]
        rows.append([title, *map(figure, figures), *([] if lone else ["-", "-"]), *counts])
        pictured.append((title, *three))
    return View(
        f"Lag: {PER_S} holds/s for {STREAM_S} s, and lone holds after a quiet time",
        COLUMNS,
        rows,
        show.spreads(f"Lag behind the deadline at {PER_S} holds/s", pictured),
        ["No hold ended before its deadline: the statement and a CHECK forbid it.", *failures(result)],
    )
