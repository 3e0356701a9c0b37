"""The table of a governed clearance, and its picture: allowance, what is left to do and p99, over time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from bench.figures import figure
from bench.governed import judge
from bench.governed.course import COURSES, Course
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
XMLNS = "http://www.w3.org/2000/svg"
PAGE, WIDTH_MIN, HEIGHT, LEFT, TOP, GAP = 860, 230, 130, 70, 84, 26
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
    parts = [
        f'<svg xmlns="{XMLNS}" viewBox="0 0 {width} {height}" font-size="11" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(16, 26, title, more='font-size="16" font-weight="bold"'),
    ]
    for number, (name, said) in enumerate({run["contender"]: run["title"] for run in runs}.items()):
        x = 16 + number * 150
        parts.append(f'<rect x="{x}" y="39" width="14" height="4" fill="{COLOURS[name]}"/>')
        parts.append(text(x + 20, 45, said))
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


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a value is between the lowest and the highest."""

    low: float
    high: float
    logarithmic: bool

    @classmethod
    def of(cls, values: Sequence[float], *, logarithmic: bool) -> Self:
        """Answer one that has room for all."""
        high = max(values, default=0.0) or 1.0
        low = min((v for v in values if v > 0), default=high) if logarithmic else 0.0
        return cls(low if low < high else high / 2, high, logarithmic)

    def share(self, value: float) -> float:
        """Answer 0 for the lowest and 1 for the highest; what is beyond is put there."""
        kept = min(max(value, self.low), self.high)
        if self.logarithmic:
            return math.log(kept / self.low) / math.log(self.high / self.low)
        return (kept - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Panel:
    """One small plot."""

    x: float
    y: float
    width: float
    seconds: float
    scale: Scale

    def _x(self, seconds: float) -> float:
        return self.x + min(seconds / self.seconds, 1.0) * self.width

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> str:
        """Draw the points, joined."""
        path = " ".join(
            f"{self._x(at):.1f},{self.y + HEIGHT * (1 - self.scale.share(value)):.1f}" for at, value in points
        )
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'

    def shade(self, begins_s: float, ends_s: float) -> str:
        """Show when something was wrong."""
        x, end = self._x(begins_s), self._x(ends_s)
        return f'<rect x="{x:.1f}" y="{self.y}" width="{end - x:.1f}" height="{HEIGHT}" fill="#f3d9b1" opacity="0.5"/>'

    def frame(self, title: str, *, labelled: bool) -> list[str]:
        """Draw the border, the title and what the edges mean."""
        bottom, end = self.y + HEIGHT, 'text-anchor="end"'
        parts = [
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{HEIGHT}" fill="none" stroke="#cbd2d9"/>',
            text(self.x, self.y - 8, title, more='font-weight="bold"'),
            text(self.x + self.width, bottom + 13, f"{self.seconds:.0f} s", GREY, end),
        ]
        if labelled:
            parts.append(text(self.x - 6, self.y + 10, figure(self.scale.high), GREY, end))
            parts.append(text(self.x - 6, bottom, figure(self.scale.low), GREY, end))
        return parts
