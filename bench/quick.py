"""Quick: ratios that a change must not ruin. Each guard is half of what is aimed at, so that noise does not fail it.

A ratio compares two runs side by side; one that falls short is measured once more before it counts.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bench import drain, enqueue
from bench.figures import figure
from bench.options import Options
from bench.stage import Stage

HOLDS = 50_000


@dataclass(frozen=True, slots=True)
class Guard:
    """What is compared, what is aimed at, and how it is measured."""

    what: str
    aim: float
    ratio: Callable[[Stage], Awaitable[float]]

    @property
    def least(self) -> float:
        """What fails the guard."""
        return self.aim / 2


def _options(*contenders: str) -> Options:
    return Options(frozenset(contenders), runs=1, holds=HOLDS)


def _figures(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for run in runs:
        if "error" in run:
            raise RuntimeError(f"{run['title']}: {run['error']}")
    return {run["contender"]: run for run in runs}


def _drained(name: str) -> Callable[[Stage], Awaitable[float]]:
    async def ratio(stage: Stage) -> float:
        run = _figures(await drain.measure(stage, _options(name)))[name]
        return float(run["rate"] / run["baseline_rate"])

    return ratio


async def _enqueued(stage: Stage) -> float:
    found = _figures(await enqueue.measure(stage, _options("ours", "zadd")))
    return float(found["ours"]["rate"] / found["zadd"]["rate"])


GUARDS = (
    Guard("drain, one process, beside bare SQL", 0.8, _drained("ours")),
    Guard("drain with 1,000 counters, beside bare SQL with them", 0.8, _drained("ours-counted")),
    Guard("enqueue, beside ZADD alone", 0.3, _enqueued),
)


async def failing(stage: Stage) -> list[str]:
    """Measure every guard; answer what fell short twice."""
    short = []
    for guard in GUARDS:
        ratio = await guard.ratio(stage)
        if ratio < guard.least:
            ratio = max(ratio, await guard.ratio(stage))
        line = f"{guard.what}: {figure(ratio)} (aim {figure(guard.aim)}, at least {figure(guard.least)})"
        print(f"quick  {line}", flush=True)
        if ratio < guard.least:
            short.append(line)
    return short
