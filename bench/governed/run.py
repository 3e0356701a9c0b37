"""Play every course with everybody who clears, after the targets and the best fixed rate are known."""

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import asyncpg

from bench import contenders, sql
from bench.fill import fill
from bench.governed import judge
from bench.governed.checkout import TABLES
from bench.governed.course import ALONE, BEGINS_S, CALM_S, COURSES, Clearer, Course, clearers, fixed
from bench.governed.faults import quietly
from bench.options import Options
from bench.proc import said, started
from bench.stage import Stage, connection

ORDERS_PER_S = 300.0
LEAD_S = 14.0  # for processes to start, beside filling
WARM_UP_S = 8.0  # the shop is open already when holds become due: its first orders are slow by themselves
FILL_PER_S = 60_000  # wake-ups, at least
LOOK_S = 1.0
ANSWER_S_MAX = 0.5
LIMIT = 3.0  # a clearance is cut off after so many times what the best fixed rate needs
WITHIN = 1.5  # p99 of the shop alone, times this, is what clearing may make of it
# What laws are told: late, they aim at the target itself, and minutes have a higher p99 than seconds.
GOAL = 1.4
RATES = [round(500 * 2 ** (k / 2)) for k in range(12)]  # of the search, holds/s: 500 to 22,600
TRIAL_S, WARM_S = 25.0, 5.0  # a trial is about what a rate does in the long run
_PATHS = {"PYTHONPATH": str(Path(__file__).parents[2])}

SPAN = "SELECT min(expires_at) AS first, max(expires_at) AS last FROM holds"
# From where the oldest was last: what has ended since is still in the index, and reading past it is not for free.
OLDEST = "SELECT min(expires_at) FROM holds WHERE state = 'held' AND expires_at >= $1"
JOURNAL = """
SELECT extract(epoch FROM decided_at)::float8 AS at, (decision->>'allowance_per_s')::float8 AS per_s
  FROM governor_journal ORDER BY id
"""


async def measure(stage: Stage, options: Options) -> list[dict[str, Any]]:
    """Find targets and the best fixed rate on the calm course, then play all; a line for each run."""
    calm = COURSES[0]
    await stage.fresh(await stage.template(holds=0))
    alone, targets = await _calibrated(stage, calm)
    best_per_s = await _best_fixed(stage, calm, WITHIN * alone["p99_ms"])
    holds = round(best_per_s * options.drain_s)
    limit_s = LIMIT * holds / best_per_s
    print(f"governor  {holds:,} holds; best fixed rate {best_per_s:,}/s; targets {targets}", flush=True)
    runs: list[dict[str, Any]] = []
    for course in COURSES:
        if options.courses and course.name not in options.courses:
            continue
        runs.append(alone if course is calm else await _played(stage, course, ALONE, 0, course.alone_s))
        # What the shop needs may have changed with the hour: no machine is ours alone.
        goal = {"GOVERNOR_CUSTOM_SQL_TARGET": f"{GOAL * runs[-1].get('before_p99_ms', alone['p99_ms']):.2f}"}
        for clearer in clearers(best_per_s, targets | goal):
            if not options.peers or clearer.name in options.peers:
                runs.append(await _played(stage, course, clearer, holds, limit_s))  # noqa: PERF401
    return runs


async def _calibrated(stage: Stage, course: Course) -> tuple[dict[str, Any], dict[str, str]]:
    """Watch the shop alone, by `governor calibrate` too, as the guide says; answer the run and the targets."""
    command = [
        str(Path(sys.executable).with_name("governor")),
        "calibrate",
        f"--duration-s={CALM_S - 5}",
        "--interval-s=0.4",
    ]
    env = stage.env | {"GOVERNOR_DATABASE_URL": stage.database_url, "GOVERNOR_PROBE_TIMEOUT_S": "0.3"}

    async def watch() -> str:
        await asyncio.sleep(LEAD_S)
        ended = await asyncio.to_thread(
            subprocess.run, command, env=env, capture_output=True, text=True, timeout=2 * CALM_S, check=False
        )
        return ended.stdout + ended.stderr

    watching = asyncio.create_task(watch())
    alone = await _played(stage, course, ALONE, 0, CALM_S)
    output = await watching
    if "error" in alone:
        raise RuntimeError(f"the shop alone: {alone['error']}")
    found = dict(re.findall(r"(GOVERNOR_\w+_TARGET\w*)=([0-9.]+)", output))
    if not found:
        raise RuntimeError(f"governor calibrate found nothing: {output[-2000:]}")
    return alone, found | {
        "GOVERNOR_ACTIVE_BACKENDS_TARGET": str(os.cpu_count()),
        "GOVERNOR_CUSTOM_SQL": "SELECT p99_ms FROM shop_latency",
    }


async def _best_fixed(stage: Stage, course: Course, p99_ms_max: float) -> int:
    """Search for the highest fixed rate that keeps to p99; every rate below it does too, as far as was tried."""
    low, high = -1, len(RATES)  # RATES[low] is taken, RATES[high] is too much
    while high - low > 1:
        middle = (low + high) // 2
        clearer = fixed("trial", f"fixed at {RATES[middle]:,}/s", RATES[middle])
        run = await _played(
            stage, course, clearer, round(RATES[middle] * 1.5 * TRIAL_S), TRIAL_S, warm_s=WARM_S
        )
        low, high = (middle, high) if run.get("p99_ms", math.inf) <= p99_ms_max else (low, middle)
    if low < 0:
        raise RuntimeError(f"even {RATES[0]:,} holds/s are too many beside this shop")
    return RATES[low]


async def _played(
    stage: Stage, course: Course, clearer: Clearer, holds: int, limit_s: float, *, warm_s: float = 0.0
) -> dict[str, Any]:
    names = {"contender": clearer.name, "title": clearer.title, "course": course.name}
    try:
        run = names | await once(stage, course, clearer, holds, limit_s, warm_s)
    except (RuntimeError, OSError, subprocess.SubprocessError, asyncpg.PostgresError) as error:
        run = names | {"error": f"{type(error).__name__} {error}"}
    told = (
        run.get("error") or f"p99 {run['p99_ms']:.1f} ms, drained in {run['drain_s'] or float('nan'):.0f} s"
    )
    print(f"governor  {course.name}  {clearer.title}: {told}", flush=True)
    return run


async def once(
    stage: Stage, course: Course, clearer: Clearer, holds: int, limit_s: float, warm_s: float = 0.0
) -> dict[str, Any]:
    """One run: the shop starts as the holds become due, then perhaps something goes wrong; judged from warm_s on."""
    await stage.fresh(await stage.template(holds=holds))
    start_s = time.time() + LEAD_S + holds / FILL_PER_S
    log = stage.folder / f"{course.name}-{clearer.name}"
    doubles_at_s = start_s + BEGINS_S if course.doubles else math.inf
    shop = [
        sys.executable,
        "-m",
        "bench.governed.checkout",
        f"{ORDERS_PER_S}",
        f"{start_s - WARM_UP_S}",
        f"{doubles_at_s}",
    ]
    async with connection(stage.database_url) as eye:
        await eye.execute(TABLES)
        if clearer.command:
            await fill(stage, contenders.OURS, start_ms=int(start_s * 1000))
        if time.time() > start_s - WARM_UP_S - 2:
            raise RuntimeError("filling took too long; the processes would start late")
        span = await eye.fetchrow(SPAN)
        commands = [shop, clearer.command] if clearer.command else [shop]
        with started(commands, stage.env | _PATHS | clearer.env, log) as processes:
            await asyncio.sleep(max(start_s - time.time(), 0))
            fault = asyncio.create_task(_fault(stage, course))
            try:
                left = await _watched(stage, eye, start_s, limit_s, span=span if clearer.command else None)
            finally:
                fault.cancel()
                await asyncio.gather(fault, return_exceptions=True)
            end_s = time.time()
            await asyncio.sleep(judge.TAIL_S)
            if any(process.poll() is not None for process in processes):
                raise RuntimeError(
                    "a process ended early: " + (said(log) + said(log, len(commands) - 1))[-2000:]
                )
        async with connection(stage.database_url) as conn:
            done = await conn.fetchval("SELECT count(*) FROM holds WHERE state = 'expired'")
            wrong = [row["what"] for row in await conn.fetch(sql.WRONG)]
            journal = await conn.fetch(JOURNAL) if clearer.governed else []
    if wrong:
        raise RuntimeError(f"the books are wrong: {wrong}")
    return {
        "drain_s": end_s - start_s if clearer.command and done == holds else None,
        "done": done,
        "allowance": [(round(row["at"] - start_s, 1), row["per_s"]) for row in journal]
        or ([(0.0, clearer.fixed_per_s)] if clearer.fixed_per_s else []),
        "left": left,
        **judge.shop(
            [json.loads(line) for line in said(log).splitlines() if line.startswith("{")],
            start_s=start_s + warm_s,
            end_s=end_s,
            fault=course.span,
        ),
        "load_before": os.getloadavg()[0],
    }


async def _fault(stage: Stage, course: Course) -> None:
    if course.fault is not None:
        await asyncio.sleep(BEGINS_S)
        await quietly(course.fault(stage, course.lasts_s))


async def _watched(
    stage: Stage,
    eye: "asyncpg.Connection[Any]",
    start_s: float,
    limit_s: float,
    *,
    span: asyncpg.Record | None,
) -> list[tuple[float, float]]:
    """Look each second until all is done or the limit is reached; answer (s since the start, per cent left).

    Deadlines are evenly apart, so the oldest one that is left tells how many are.
    """
    left: list[tuple[float, float]] = []
    oldest = span["first"] if span else None
    while (elapsed_s := time.time() - start_s) < limit_s:
        if span:
            try:
                oldest = await eye.fetchval(OLDEST, oldest, timeout=ANSWER_S_MAX)
            except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                eye = await _again(stage, eye)
            else:
                if oldest is None:
                    break
                share = (span["last"] - oldest) / (span["last"] - span["first"])
                left.append((round(elapsed_s, 1), round(100 * share, 1)))
        await asyncio.sleep(LOOK_S)
    return left


async def _again(stage: Stage, eye: "asyncpg.Connection[Any]") -> "asyncpg.Connection[Any]":
    """Answer a connection that can be used, the old one if no other is to be had yet."""
    if not eye.is_closed():
        return eye
    try:
        return await asyncpg.connect(stage.database_url, timeout=ANSWER_S_MAX)
    except (TimeoutError, OSError, asyncpg.PostgresError):
        return eye
