"""The table of a governed clearance, and its picture: allowance, what is left to do and p99, over time."""

from collections.abc import Sequence
from typing import Any

from bench.figures import figure
from bench.governed import judge
from bench.governed.course import COURSES, Course
from bench.panel import HEIGHT, Panel, Scale, page
from bench.report import Result, View, failures, succeeded
from bench.show import GREY, text

COLUMNS = (
    "checkout while holds are cleared",
    "p50 ms",
    "p99 ms",
    "of alone",
    "p99 in the fault, ms",
    "of alone",
    "failed %",
    "drained in s",
    "of best fixed",
)
COLOURS = {
    "alone": GREY,
    "ungoverned": "#c0392b",
    "fixed": "#b5651d",
    "aimd": "#6c3483",
    "governed": "#0b7a75",
}
PAGE, WIDTH_MIN, LEFT, TOP, GAP = 860, 230, 70, 84, 26
ALLOWANCE, LEFT_TO_DO, P99 = "allowance, holds/s", "left to do, %", "checkout p99, ms"


def view(result: Result) -> View:
    """Answer the runs, course by course."""
    runs = succeeded(result)
    titles = {course.name: course.title for course in COURSES}
    rows = []
    for run in runs:
        ratios = judge.beside(runs, run)
        rows.append(
            [
                f"{run['title']} - {titles[run['course']]}",
                figure(run["p50_ms"]),
                figure(run["p99_ms"]),
                figure(ratios["of_alone"]),
                figure(run["fault_p99_ms"]),
                figure(ratios["fault_of_alone"]),
                figure(100 * run["failed"]),
                figure(run["drain_s"]),
                figure(ratios["of_fixed"]),
            ]
        )
    title = "A shop's checkout while overdue holds are cleared"
    return View(title, COLUMNS, rows, picture(title, runs), failures(result))


def picture(title: str, runs: Sequence[dict[str, Any]]) -> str:
    """Draw a column of three panels for each course, as SVG."""
    courses = [course for course in COURSES if any(run["course"] == course.name for run in runs)]
    wide = max(WIDTH_MIN, (PAGE - LEFT - 10) // len(courses) - GAP)  # a panel
    width, height = LEFT + len(courses) * (wide + GAP) + 10, TOP + 3 * (HEIGHT + GAP) + 16
    named = {run["contender"]: run["title"] for run in runs}
    parts = page(width, height, title, [(COLOURS[name], said) for name, said in named.items()])
    for row, name in enumerate((ALLOWANCE, LEFT_TO_DO, P99)):
        y = TOP + row * (HEIGHT + GAP)
        lines = {(run["course"], run["contender"]): _line(run, name) for run in runs}
        scale = Scale.of([v for line in lines.values() for _, v in line], logarithmic=name != LEFT_TO_DO)
        middle = f'transform="translate(14 {y + HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle"'
        parts.append(text(0, 0, name, more=middle))
        for number, course in enumerate(courses):
            panel = Panel(LEFT + number * (wide + GAP), y, wide, _seconds(runs, course), scale)
            parts += panel.frame(course.title if row == 0 else "", labelled=number == 0)
            if course.span:
                parts.append(panel.shade(*course.span))
            parts += [
                panel.line(line, COLOURS[contender])
                for (played, contender), line in lines.items()
                if played == course.name and line
            ]
    return "\n".join([*parts, "</svg>", ""])


def _line(run: dict[str, Any], name: str) -> list[tuple[float, float]]:
    if name == P99:
        return [(at, ms) for at, ms in run["slices"]]
    if name == LEFT_TO_DO:
        return [(at, per_cent) for at, per_cent in run["left"]]
    points = [(at, per_s) for at, per_s in run["allowance"] if at >= 0]
    if run["contender"] in ("alone", "ungoverned") or not points:  # no limit is no line
        return []
    end = max((at for at, _ in run["slices"]), default=0.0)
    return [(at, per_s) for at, per_s in points if at <= end] + [(end, points[-1][1])]


def _seconds(runs: Sequence[dict[str, Any]], course: Course) -> float:
    return max(at for run in runs if run["course"] == course.name for at, _ in run["slices"]) or 1.0
