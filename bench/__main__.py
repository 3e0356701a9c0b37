"""The bench's command line: one command per part, `all` of them, and `report`."""

import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from bench import churn, drain, enqueue, governed, http, idle, lag, quick, report, scale, show
from bench.options import Options
from bench.report import Result, View
from bench.stage import Stage, opened


@dataclass(frozen=True, slots=True)
class Part:
    """How a part is measured and shown."""

    measure: Callable[[Stage, Options], Awaitable[list[dict[str, Any]]]]
    view: Callable[[Result], View]
    help: str


PARTS = {
    "drain": Part(drain.measure, drain.view, "How fast holds end that are due already, and what it costs."),
    "lag": Part(lag.measure, lag.view, "How long after its deadline a hold ends."),
    "enqueue": Part(enqueue.measure, enqueue.view, "Wake-ups per second from one process, and their memory."),
    "http": Part(http.measure, http.view, "How many holds one API process places, and how soon it answers."),
    "scale": Part(scale.measure, scale.view, "What a place and a sweep cost at each size of the table."),
    "churn": Part(churn.measure, churn.view, "What a long time of places and expiries leaves behind."),
    "governor": Part(
        governed.measure,
        governed.view,
        "What a shop notices while overdue holds are cleared, by each kind of limit.",
    ),
    "idle": Part(idle.measure, idle.view, "What a worker costs that has nothing to do."),
}

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


def _add(part: str, help_: str) -> None:
    @app.command(part, help=help_)
    def measure(  # noqa: PLR0913 - as many options as a command has
        *,
        peers: Annotated[str, typer.Option(help="Only these contenders, by name, separated by commas.")] = "",
        runs: Annotated[int, typer.Option(min=1)] = 3,
        holds: Annotated[int, typer.Option(min=100, help="Holds of a drain, wake-ups to enqueue.")] = 50_000,
        limit_s: Annotated[float, typer.Option(help="A drain is cut off after this.")] = 60,
        quiet_s: Annotated[float, typer.Option(help="Silence before each lone hold.")] = 60,
        lone: Annotated[int, typer.Option(help="Lone holds in each run.")] = 2,
        idle_s: Annotated[float, typer.Option(help="How long an idle worker is watched.")] = 20,
        size: Annotated[int, typer.Option(help="Holds of the largest table.")] = 10_000_000,
        minutes: Annotated[float, typer.Option(help="How long to churn.")] = 60,
        drain_s: Annotated[float, typer.Option(help="So long the best fixed rate needs.")] = 150,
        courses: Annotated[str, typer.Option(help="Only these courses, separated by commas.")] = "",
        out: Annotated[Path, typer.Option(help="Where PART.json and PART.svg go.")] = Path("bench-out"),
    ) -> None:
        options = Options(
            _names(peers),
            runs,
            holds,
            limit_s,
            quiet_s,
            lone,
            idle_s,
            size,
            minutes,
            drain_s,
            _names(courses),
        )
        for each in PARTS if part == "all" else (part,):
            result = uvloop.run(_measured(each, options))
            seen = PARTS[each].view(result)
            report.save(result, seen, out)
            _print(result, seen)


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, text.split(",")))


for _name, _part in PARTS.items():
    _add(_name, _part.help)
_add("all", "Every part, one after another.")


async def _measured(part: str, options: Options) -> Result:
    async with opened() as stage:
        runs = await PARTS[part].measure(stage, options)
        when = datetime.now(UTC).isoformat(timespec="seconds")
        return Result(part, options.of(part), runs, stage.facts, when)


def _print(result: Result, seen: View) -> None:
    facts = ", ".join(f"{name} {value}" for name, value in result.facts.items())
    show.table(seen.title, seen.columns, seen.rows, [*seen.notes, facts])


@app.command(name="quick")
def quick_() -> None:
    """Guard the ratios of drain and enqueue, in about a minute; exits with 1 if one has fallen to half."""
    if uvloop.run(_guarded()):
        raise typer.Exit(1)


async def _guarded() -> list[str]:
    async with opened() as stage:
        return await quick.failing(stage)


@app.command(name="report")
def report_(folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)]) -> None:
    """Print the tables of a folder's JSON files and write them, with the pictures, into docs/."""
    found = {}
    for name, part in PARTS.items():
        path = folder / f"{name}.json"
        if path.exists():
            result = report.load(path)
            found[name] = (result, part.view(result))
            _print(*found[name])
    report.write_document(found)


if __name__ == "__main__":
    # Ended is as interrupted: no process may be left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()
