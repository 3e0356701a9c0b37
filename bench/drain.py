"""Drain: so many holds are due already: how fast they end, and what it costs.

Time runs from the start of the first statement to the last commit, by the database's own clocks: `ended_at`
and the commit timestamps. Starting processes and filling queues are not in it, nor in the CPU seconds.
"""

import asyncio
import os
import subprocess
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import asyncpg
from redis.asyncio import Redis

from bench import show, sql
from bench.attempt import attempt, progress
from bench.contenders import BASELINES, DRAIN, Contender
from bench.figures import figure, median, paired_ratio
from bench.fill import fill
from bench.options import Options
from bench.proc import said, started
from bench.report import Result, View, failures, succeeded
from bench.stage import POLL_S, Stage, connection, until

LEAD_S = (
    1.5  # for `by score`: a worker looks at the head twice a second, and then sleeps exactly until it is due
)
FAR_MS = 4_000_000_000_000  # the score of every wake-up until all processes are ready
BEGIN_S_MAX = 60.0  # a consumer that has ended nothing by then has failed
QUEUE = "expiry:wakeups"
# All wake-ups of ours at once are due at this time.
START_AT = """
local members = redis.call('ZRANGE', KEYS[1], 0, -1)
for first = 1, #members, 1000 do
  local moves = {}
  for i = first, math.min(#members, first + 999) do
    moves[#moves + 1], moves[#moves + 2] = ARGV[1], members[i]
  end
  redis.call('ZADD', KEYS[1], 'XX', unpack(moves))
end
"""

COLUMNS = (
    "drain",
    "holds/s",
    "of baseline",
    "lowest",
    "highest",
    "µs/hold: consumer",
    "Redis",
    "PostgreSQL",
    "done",
)


async def measure(stage: Stage, options: Options) -> list[dict[str, Any]]:
    """Run every contender, a run of its baseline before each of its own."""
    runs: list[dict[str, Any]] = []
    for number in range(1, options.runs + 1):
        for contender in options.chosen(DRAIN):
            baseline = await once(stage, BASELINES[contender.baseline], options)
            mine = await attempt(contender, once(stage, contender, options))
            runs += [baseline, mine if "error" in mine else mine | {"baseline_rate": baseline["rate"]}]
            progress(
                "drain", number, options, mine, "rate", "holds/s", f"baseline {figure(baseline['rate'])}"
            )
    return runs


async def once(stage: Stage, contender: Contender, options: Options) -> dict[str, Any]:
    """One run: a database of its own, filled queues, a common start, the time until nothing is left."""
    await stage.fresh(await stage.template(holds=options.holds, counted=contender.counted))
    if contender.filling():
        await fill(stage, contender, start_ms=FAR_MS)
    env = stage.env | contender.env
    log = stage.folder / contender.name
    async with connection(stage.database_url) as conn:
        with started([contender.working()] * contender.processes, env, log) as processes:
            await _begin(stage, contender, processes, conn, log)
            load, before = os.getloadavg()[0], stage.cpu([p.pid for p in processes])
            for process in processes if contender.begins == "when told" else ():
                _tell(process)
            ended = await until(conn, sql.ENDED, options.limit_s)
            used = stage.cpu([p.pid for p in processes]) - before
        span = await conn.fetchrow(sql.SPAN)
        wrong = [row["what"] for row in await conn.fetch(sql.WRONG)]
    assert span is not None  # noqa: S101 - an aggregate has a row
    if wrong or (ended and span["done"] != options.holds) or not span["done"]:
        raise RuntimeError(f"{contender.name} did not do the work: {span['done']} done, {wrong}")
    seconds = (span["last"] - span["first"]).total_seconds()
    return {
        "contender": contender.name,
        "title": contender.title,
        "done": span["done"],
        "seconds": seconds,
        "rate": span["done"] / seconds,
        "cpu_s": asdict(used),
        "load_before": load,
    }


async def _begin(
    stage: Stage,
    contender: Contender,
    processes: list["subprocess.Popen[str]"],
    conn: "asyncpg.Connection[Any]",
    log: Path,
) -> None:
    """Return when the work begins, or just before."""
    if contender.begins == "at once":
        if not await until(conn, sql.BEGUN, BEGIN_S_MAX):
            raise RuntimeError(f"{contender.name} ended nothing: {said(log)[-2000:]}")
        return
    word = "ready" if contender.begins == "when told" else "service.started"
    await said_by_all(processes, log, word)
    if contender.begins == "by score":
        async with Redis.from_url(stage.redis_url) as redis:
            await _promoted(redis)
            start_s = time.time() + LEAD_S
            await redis.eval(START_AT, 1, QUEUE, f"{start_s * 1000:.0f}")
        await asyncio.sleep(start_s - POLL_S - time.time())


async def _promoted(redis: Redis) -> None:
    """Return when the promoter has compared the stores: it does so once after a start, and not in the drain."""
    deadline_s = time.monotonic() + BEGIN_S_MAX
    while not await redis.exists(f"{QUEUE}:promoted"):
        if time.monotonic() > deadline_s:
            raise RuntimeError("the promoter did not finish its first round")
        await asyncio.sleep(POLL_S)


async def said_by_all(processes: list["subprocess.Popen[str]"], log: Path, word: str) -> None:
    """Return when every process has written the word."""
    deadline_s = time.monotonic() + BEGIN_S_MAX
    for number, process in enumerate(processes):
        while word not in said(log, number):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"it did not start: {said(log, number)[-2000:]}")
            await asyncio.sleep(POLL_S)


def _tell(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    process.stdin.write("go\n")
    process.stdin.flush()


def view(result: Result) -> View:
    """Answer medians, spread, cost, and the ratio to the baseline's runs beside them; fastest first."""
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in succeeded(result):
        by_name[run["contender"]].append(run)
    rows, pictured = [], []
    for runs in sorted(by_name.values(), key=lambda rs: -median(r["rate"] for r in rs)):
        rates = [r["rate"] for r in runs]
        pairs = [r for r in runs if "baseline_rate" in r]
        ratio = (
            paired_ratio([r["rate"] for r in pairs], [r["baseline_rate"] for r in pairs]) if pairs else 1.0
        )
        cost = [
            median(r["cpu_s"][kind] / r["done"] * 1e6 for r in runs)
            for kind in ("consumer", "redis", "postgres")
        ]
        title = runs[0]["title"]
        done = min(r["done"] for r in runs)
        rows.append([title, *map(figure, [median(rates), ratio, min(rates), max(rates), *cost]), f"{done:,}"])
        pictured.append((title, median(rates)))
    return View(
        "Drain: holds that are due already",
        COLUMNS,
        rows,
        show.bars("Holds ended per second (median)", "/s", pictured),
        [
            "of baseline: median of the ratios to the run of the baseline just before (with counters, for counters).",
            *failures(result),
        ],
    )
