"""What the bench found: a table, a frontier in characters, and both as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.table import Table

from governor.simulate.bench import OURS
from governor.simulate.judge import Verdict
from governor.simulate.loop import Run
from governor.simulate.scenarios import Scenario

_COLOURS = ("#0b6e4f", "#b5651d", "#6c3483", "#c0392b", "#2471a3", "#7d6608", "#d35400", "#566573")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One law in one scenario."""

    scenario: Scenario
    law: str
    verdicts: list[Verdict]

    def worst(self, figure: str) -> float:
        """Return a figure's worst value; not a number where it was not measured."""
        return next((each.worst for each in self.verdicts if each.figure == figure), math.nan)


def table(results: Sequence[Result]) -> Table:
    """Return worst and median of every figure beside its band."""
    found = Table("#", "scenario", "law", "figure", "band", "worst", "seed", "median", "", box=None)
    for result in results:
        for each in result.verdicts:
            holds = "" if each.band is None else "[green]ok[/]" if each.holds else "[red]missed[/]"
            found.add_row(
                str(result.scenario.number),
                result.scenario.title,
                result.law,
                each.figure,
                "" if each.band is None else str(each.band),
                f"{each.worst:.3f}",
                str(each.worst_seed),
                f"{each.median:.3f}",
                holds,
            )
    return found


def markdown(results: Sequence[Result], *, heading: bool = True) -> str:
    """Return the same as rows of a Markdown table."""
    lines = ["| # | scenario | law | figure | band | worst | median | |", "|---|---|---|---|---|---|---|---|"]
    lines = lines if heading else []
    for result in results:
        for each in result.verdicts:
            holds = "" if each.band is None else "ok" if each.holds else "**missed**"
            band = "" if each.band is None else str(each.band)
            title = f"{result.scenario.number} | {result.scenario.title} | {result.law} | {each.figure}"
            lines.append(f"| {title} | {band} | {each.worst:.3f} | {each.median:.3f} | {holds} |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Point:
    """A law on the frontier: how long it took, and what that cost the foreground."""

    law: str
    drain: float
    p99: float


def _points(results: Sequence[Result], scenario: Scenario) -> list[_Point]:
    """Return every law's median drain and p99, over the oracle's; both up to 10."""
    found = []
    for result in results:
        medians = {each.figure: each.median for each in result.verdicts}
        if result.scenario == scenario and "drain_ratio" in medians:
            found.append(
                _Point(result.law, min(medians["drain_ratio"], 10.0), min(medians["p99_ratio"], 10.0))
            )
    return found


def frontier(results: Sequence[Result], scenario: Scenario, *, width: int = 60, height: int = 14) -> str:
    """Draw p99 (up, log) against drain time (right, log); both x the oracle's, whose corner is lower left."""
    points = _points(results, scenario)
    if not points:
        return ""
    canvas = [[" "] * width for _ in range(height)]
    legend = []
    for index, point in enumerate(points):
        mark = "G" if point.law == OURS else chr(ord("a") + index)
        column = round(_share(point.drain) * (width - 1))
        row = height - 1 - round(_share(point.p99) * (height - 1))
        canvas[row][column] = mark
        legend.append(f"{mark} {point.law} ({point.drain:.2f}, {point.p99:.2f})")
    lines = ["|" + "".join(row) for row in canvas]
    heading = f"{scenario.number} {scenario.title}: foreground p99 (up) and drain (right), x oracle, 0.8..10, medians"
    return "\n".join([heading, *lines, "+" + "-" * width, "  ".join(legend)])


def _share(ratio: float) -> float:
    """Place a ratio of 0.8..10 on a log axis of 0..1."""
    low, high = math.log(0.8), math.log(10)
    return (math.log(min(max(ratio, 0.8), 10.0)) - low) / (high - low)


_SPARKS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], *, width: int = 72) -> str:
    """Return a series as one line of blocks, 0 to its maximum."""
    most = max(values, default=0.0)
    if most <= 0:
        return ""
    step = max(1, math.ceil(len(values) / width))
    means = [sum(values[at : at + step]) / len(values[at : at + step]) for at in range(0, len(values), step)]
    return "".join(_SPARKS[min(8, math.ceil(8 * mean / most))] for mean in means)


def svg(results: Sequence[Result], runs: Sequence[tuple[Scenario, Run, Run]]) -> str:
    """Return one panel per scenario: its frontier, and the allowance over time beside the oracle's."""
    width, height, left = 380, 260, 20
    panels = []
    scenarios = [scenario for scenario, _, _ in runs]
    for row, (scenario, ours, oracle) in enumerate(runs):
        top = 40 + row * (height + 30)
        panels.append(_text(left, top - 8, f"{scenario.number} {scenario.title}", size=14))
        panels.append(_frontier_panel(_points(results, scenario), left, top, width, height))
        panels.append(_time_panel(scenario, ours, oracle, left + width + 40, top, width, height))
    total_height = 40 + len(scenarios) * (height + 30)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width + 80}" height="{total_height}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>{"".join(panels)}</svg>\n'
    )


def _text(x: float, y: float, words: str, *, size: int = 11, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}">{escape(words)}</text>'


def _frame(x: float, y: float, width: float, height: float) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" stroke="#999"/>'


def _frontier_panel(points: Sequence[_Point], x: float, y: float, width: float, height: float) -> str:
    parts = [_frame(x, y, width, height)]
    for tick in (1, 1.5, 2, 3, 5, 10):
        across, up = x + _share(tick) * width, y + height - _share(tick) * height
        parts.append(f'<path d="M{across:.1f} {y}V{y + height}M{x} {up:.1f}H{x + width}" stroke="#eee"/>')
        parts.append(_text(across - 4, y + height + 12, f"{tick:g}", size=9))
    parts.append(
        _text(x + 4, y + 12, "up: foreground p99, right: drain time, x the oracle's (medians)", size=10)
    )
    for index, point in enumerate(points):
        across, up = x + _share(point.drain) * width, y + height - _share(point.p99) * height
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(
            f'<circle cx="{across:.1f}" cy="{up:.1f}" r="{6 if point.law == OURS else 4}" fill="{colour}"/>'
        )
        words = f"{point.law} {point.drain:.2f}, {point.p99:.2f}"
        parts.append(_text(x + width - 130, y + 30 + 13 * index, words, colour=colour))
    return "".join(parts)


def _time_panel(
    scenario: Scenario, ours: Run, oracle: Run, x: float, y: float, width: float, height: float
) -> str:
    # An idle hour before the backlog says nothing: begin shortly before it.
    since_s = max(0.0, scenario.backlog_at_s - 60)
    most = max(*ours.allowance, *oracle.allowance[1:], 1.0)
    parts = [_frame(x, y, width, height), _text(x + 4, y + 12, f"allowance, 0..{most:.0f}/s", size=10)]
    for event in ours.events:
        begins, ends = (
            min(max(at_s, since_s), scenario.duration_s) for at_s in (event.at_s, event.at_s + event.for_s)
        )
        scale = width / (scenario.duration_s - since_s)
        parts.append(
            f'<rect x="{x + (begins - since_s) * scale:.1f}" y="{y}" width="{(ends - begins) * scale:.1f}" '
            f'height="{height}" fill="#f6e3dc" opacity="0.6"/>'
        )
    for run, colour in ((oracle, "#999999"), (ours, _COLOURS[0])):
        shown = [(at_s, rate) for at_s, rate in zip(run.at_s, run.allowance, strict=True) if at_s >= since_s]
        dots = " ".join(
            f"{x + (at_s - since_s) / (scenario.duration_s - since_s) * width:.1f},{y + height * (1 - rate / most):.1f}"
            for at_s, rate in shown
        )
        parts.append(f'<polyline points="{dots}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    parts.append(_text(x + width - 110, y + 12, "grey: the oracle's", size=10, colour="#777"))
    return "".join(parts)
