"""The command `governor`: the simulation bench, and journals of what happened."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from governor import calibrate, replay
from governor.commands import export
from governor.simulate import bench, report
from governor.simulate.drills import DRILLS
from governor.simulate.scenarios import Scenario, load

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A limiter for a whole fleet.")


@app.command()
def simulate(
    scenario: Annotated[
        list[str] | None, typer.Option(help="Name or number; repeat for more. All if none.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0..n-1; judged on the worst.")] = 20,
    law: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(bench.LAWS)} or all; repeat for more.")
    ] = None,
    noise: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sensor noise, relative sd.")] = 0.08,
    plot: Annotated[
        Path | None, typer.Option(help="Write frontiers and time series to this SVG file.")
    ] = None,
    markdown: Annotated[bool, typer.Option(help="Print the table as Markdown.")] = False,
    search: Annotated[
        bool, typer.Option(help="Search the peers' grids for their best points instead.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes to share the work.")] = os.cpu_count() or 1,
) -> None:
    """Judge laws against a modelled database, beside an oracle that knows its capacity."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    laws = _laws(law)
    if search:
        for name in (each for each in laws if each != bench.OURS):
            point, score = bench.search(name, seeds=seeds, noise=noise, processes=processes)
            console.print(f"{name}: {point} scores {score:.2f}")
        return
    chosen = _scenarios(scenario)
    results: list[report.Result] = []
    for each in chosen:
        found = [
            report.Result(
                scenario=each,
                law=name,
                verdicts=bench.judge(each, name, seeds=seeds, noise=noise, processes=processes),
            )
            for name in laws
            if bench.applies(each, name)
        ]
        if markdown and found:
            print(report.markdown(found, heading=not results), flush=True)  # noqa: T201 - the result
        elif found:
            console.print(report.table(found))
        results += found
    _draw(console, results, chosen, noise=noise, plot=plot)


@app.command("replay")
def replay_command(
    journal: Annotated[Path, typer.Argument(help="Lines of JSON, as `governor export` writes them.")],
    *,
    law: Annotated[str | None, typer.Option(help="A candidate: module:Class.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="A candidate: a setting of the law, name=value; repeat.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Allowances this close (share) agree; 0: all must.")
    ] = 0.0,
) -> None:
    """Run an incident again; print where decisions differ, and exit with 1 if any does (2: no journal).

    Without a candidate each decision is repeated from the state that was kept with it: none may differ.
    """
    console = Console(width=None if sys.stdout.isatty() else 1000)
    try:
        with journal.open(encoding="utf-8") as lines:
            entries = list(replay.read_lines(lines))
        changes = ",".join(change) if change else None
        found = list(
            replay.rerun(entries, law=law, changes=changes, tolerance=tolerance)
            if law or changes
            else replay.repeat(entries)
        )
    except (OSError, ValueError) as error:
        Console(stderr=True).print(f"governor: {error}", highlight=False, markup=False)
        raise typer.Exit(2) from None
    for difference in found:
        console.print(str(difference), highlight=False, markup=False)
    console.print(f"{len(entries)} decisions, {len(found)} differ", highlight=False)
    raise typer.Exit(1 if found else 0)


@app.command("export")
def export_command(
    database_url: Annotated[str, typer.Option(envvar="GOVERNOR_DATABASE_URL", help="PostgreSQL.")],
    *,
    name: Annotated[str, typer.Option(help="Of the fleet.")] = "expiry",
    limit: Annotated[int, typer.Option(min=1, help="Newest decisions, at most so many.")] = 10_000,
) -> None:
    """Write the journal to standard output, oldest decision first, one line of JSON each."""
    asyncio.run(export(database_url, name=name, limit=limit, write=sys.stdout.write))


calibrate.register(app)


def _laws(asked: list[str] | None) -> list[str]:
    if not asked:
        return [bench.OURS]
    unknown = set(asked) - {*bench.LAWS, "all"}
    if unknown:
        raise typer.BadParameter(f"no law {', '.join(sorted(unknown))}; there are {', '.join(bench.LAWS)}")
    return list(bench.LAWS) if "all" in asked else asked


def _scenarios(asked: list[str] | None) -> list[Scenario]:
    known = load()
    names = {str(each.number): each for each in known} | {each.name: each for each in known}
    unknown = set(asked or ()) - set(names)
    if unknown:
        listed = ", ".join(f"{each.number} {each.name}" for each in known)
        raise typer.BadParameter(f"no scenario {', '.join(sorted(unknown))}; there are {listed}")
    return [names[each] for each in asked] if asked else known


def _draw(
    console: Console,
    results: list[report.Result],
    chosen: list[Scenario],
    *,
    noise: float,
    plot: Path | None,
) -> None:
    """Draw the frontier where several laws were judged, and the runs of each law's worst seed."""
    runs = []
    for each in (scenario for scenario in chosen if scenario.model not in DRILLS):
        first = next(result for result in results if result.scenario == each)
        seed = first.verdicts[0].worst_seed
        task = bench.Task(scenario=each, law=first.law, seed=seed, noise=noise)
        runs.append((each, task.run(), task.oracle()))
        console.print(f"\n{each.number} {each.title}: allowance in seed {seed}, {first.law} and oracle")
        for run in runs[-1][1:]:
            console.print(report.sparkline(run.allowance), highlight=False)
        if sum(result.scenario == each for result in results) > 1:
            console.print(report.frontier(results, each), highlight=False, markup=False)
    if plot is not None:
        plot.write_text(report.svg(results, runs), encoding="utf-8")
        console.print(f"\nwritten: {plot}")


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
