"""HTTP: POST /v1/holds with a key, an Idempotency-Key and capacity, on one API process.

The baseline, before each run, is aiohttp that does nothing. A run has three loads: as fast as 32 connections go, then
half of that rate at fixed times (its latencies are the ones that a shop sees), then one resource that everybody wants.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import show
from bench.attempt import attempt, progress
from bench.contenders import Contender
from bench.drain import said_by_all
from bench.figures import figure, median, paired_ratio, percentile
from bench.options import Options
from bench.proc import said, started
from bench.report import Result, View, failures, succeeded
from bench.stage import Stage, connection
from expiry import keys

CONNECTIONS = 32
RESOURCES = 1000
KEY = "exk_" + "b" * 40
SECONDS = 8.0
WARM_S = 2.0  # plans, caches, the first pages of the tables

API = (str(Path(sys.executable).with_name("expiry")), "api")
ENV = {
    "EXPIRY_API_HOST": "127.0.0.1",
    "EXPIRY_API_PORT": "0",
    "EXPIRY_API_RATE_PER_S": "1000000",  # the quota must not decide here
    "EXPIRY_API_DRAIN_S": "0",
}
BARE = Contender(
    "bare-http",
    "aiohttp that does nothing",
    "reads and writes the same JSON",
    work=(sys.executable, "-m", "bench.bare_http"),
)
MANY = Contender("many", "expiry, 1,000 resources", "as fast as 32 connections go", work=API, env=ENV)
HALF = Contender("half", "expiry, 1,000 resources, half of that rate", "at fixed times", work=API, env=ENV)
HOT = Contender("hot", "expiry, one resource", "everybody wants the same", work=API, env=ENV)
SOLD_OUT = Contender("sold-out", "expiry, one resource, sold out", "answers 409", work=API, env=ENV)
ROOMS = [f"room-{n}" for n in range(RESOURCES)]
LOADS = ((MANY, ROOMS), (HALF, ROOMS), (HOT, ["hot"]), (SOLD_OUT, ["sold-out"]))

SEED = """
INSERT INTO resources (tenant_id, resource_id, capacity)
SELECT 'bench', name, CASE WHEN name = 'sold-out' THEN 0 ELSE 100000000 END
  FROM unnest($1::text[] || '{hot,sold-out}') AS name
"""
COLUMNS = (
    "POST /v1/holds",
    "requests/s",
    "of bare",
    "p50 ms",
    "p99 ms",
    "us API",
    "us Redis",
    "us PostgreSQL",
    "answers",
)


async def measure(stage: Stage, options: Options) -> list[dict[str, Any]]:
    """Run the baseline and every load in turn, round by round."""
    runs = []
    chosen = options.chosen([contender for contender, _ in LOADS])
    for number in range(1, options.runs + 1):
        bare = await attempt(BARE, once(stage, BARE, ROOMS))
        runs.append(bare)
        fastest = 0.0
        for contender, resources in LOADS:
            if contender not in chosen:
                continue
            rate = fastest / 2 if contender is HALF else 0.0
            run = await attempt(contender, once(stage, contender, resources, rate))
            if contender is MANY:
                fastest = run.get("rate", 0.0)
            runs.append(run if "error" in run or "error" in bare else run | {"baseline_rate": bare["rate"]})
            progress("http", number, options, run, "rate", "requests/s")
    return runs


async def once(stage: Stage, contender: Contender, resources: list[str], rate: float = 0.0) -> dict[str, Any]:
    """One run: a database of its own, one API process, a warm-up, the load."""
    await stage.fresh(await stage.template(holds=0))
    async with connection(stage.database_url) as conn:
        await keys.create(conn, tenant_id="bench", scopes=("holds", "read"), key=KEY)
        await conn.execute(SEED, [f"room-{n}" for n in range(RESOURCES)])
    log = stage.folder / contender.name
    with started([contender.work], stage.env | contender.env, log) as processes:
        await said_by_all(processes, log, "http.listening")
        port = port_of(said(log))
        await _load(port, WARM_S, 0.0, resources)
        load, before = os.getloadavg()[0], stage.cpu([processes[0].pid])
        ended = await _load(port, SECONDS, rate, resources)
        used = stage.cpu([processes[0].pid]) - before
    latencies = ended["latencies_ms"]
    if not latencies:
        raise RuntimeError(f"it answered nothing: {said(log)[-2000:]}")
    return {
        "rate": len(latencies) / ended["seconds"],
        "asked_rate": rate,
        "n": len(latencies),
        "statuses": ended["statuses"],
        "p50_ms": percentile(latencies, 50),
        "p99_ms": percentile(latencies, 99),
        "cpu_s": asdict(used),
        "load_before": load,
    }


def port_of(log: str) -> int:
    """Answer the port that an API process told its log."""
    events = (json.loads(line) for line in log.splitlines() if "http.listening" in line)
    return int(next(events)["port"])


async def _load(port: int, seconds: float, rate: float, resources: list[str]) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "bench.load",
        str(port),
        str(seconds),
        str(CONNECTIONS),
        str(rate),
        *resources,
    ]
    env = {**os.environ, "KEY": KEY}
    ended = await asyncio.to_thread(
        subprocess.run, command, env=env, capture_output=True, text=True, timeout=seconds + 60, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"the load failed: {ended.stderr[-2000:]}")
    said_: dict[str, Any] = json.loads(ended.stdout)
    return said_


def view(result: Result) -> View:
    """Answer medians over the runs of each load, and the median of their ratios to the baseline just before."""
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in succeeded(result):
        by_name[run["contender"]].append(run)
    rows, pictured = [], []
    for runs in by_name.values():
        rates = [r["rate"] for r in runs]
        pairs = [r for r in runs if "baseline_rate" in r]
        ratio = (
            paired_ratio([r["rate"] for r in pairs], [r["baseline_rate"] for r in pairs]) if pairs else 1.0
        )
        figures = [median(rates), ratio, *(median(r[k] for r in runs) for k in ("p50_ms", "p99_ms"))]
        figures += [
            median(r["cpu_s"][k] / r["n"] * 1e6 for r in runs) for k in ("consumer", "redis", "postgres")
        ]
        answers = ", ".join(sorted({status for r in runs for status in r["statuses"]}))
        rows.append([runs[0]["title"], *map(figure, figures), answers])
        pictured.append((runs[0]["title"], median(rates)))
    return View(
        f"POST /v1/holds, one API process, {CONNECTIONS} connections",
        COLUMNS,
        rows,
        show.bars("Requests answered per second (median)", "/s", pictured),
        ["The load generator shares the machine's cores with what it measures.", *failures(result)],
    )
