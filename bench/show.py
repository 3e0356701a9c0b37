"""Tables and pictures of the figures."""

import math
from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.table import Table

from bench.figures import figure

WIDTH, LABEL_WIDTH, ROW, TOP, END = 860, 300, 26, 64, 150
OURS, THEIRS, INK, GREY = "#0b7a75", "#b8c4cc", "#1f2933", "#616e7c"


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> None:
    """Print a table; the first column is text, the others are figures."""
    view = Table(title=title, title_justify="left", header_style="bold")
    for number, name in enumerate(columns):
        view.add_column(name, justify="right" if number else "left", no_wrap=bool(number))
    for row in rows:
        view.add_row(*row, style="bold green" if is_ours(row[0]) else None)
    console = Console(width=None if Console().is_terminal else 140)
    console.print(view)
    for note in notes:
        console.print(f"  {note}", style="dim")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table as Markdown; ours in bold."""
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    for row in rows:
        cells = [f"**{cell}**" for cell in row] if is_ours(row[0]) else row
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def is_ours(label: str) -> bool:
    """Whether a row is about this service."""
    return label.startswith("expiry")


def bars(title: str, unit: str, rows: Sequence[tuple[str, float]]) -> str:
    """Draw one bar a row, in proportion, as SVG."""
    longest = max((value for _, value in rows), default=1.0)
    parts = []
    for number, (label, value) in enumerate(rows):
        y = TOP + number * ROW
        width = max(value / longest * (WIDTH - LABEL_WIDTH - END), 1)
        colour = OURS if is_ours(label) else THEIRS
        parts.append(_label(y, label))
        parts.append(
            f'<rect x="{LABEL_WIDTH}" y="{y}" width="{width:.1f}" height="{ROW - 8}" fill="{colour}"/>'
        )
        parts.append(text(LABEL_WIDTH + width + 6, y + 13, f"{figure(value)} {unit}"))
    return _svg(title, "", len(rows), parts)


def spreads(title: str, rows: Sequence[tuple[str, float, float, float]]) -> str:
    """Draw p50, p99 and maximum of each row on a logarithmic axis of milliseconds, as SVG."""
    ceiling = max((row[3] for row in rows), default=1.0)
    decades = max(math.ceil(math.log10(ceiling)) + 1, 1)  # from 0.1 ms
    step = (WIDTH - LABEL_WIDTH - END) / decades

    def place(ms: float) -> float:
        return LABEL_WIDTH + step * (math.log10(max(ms, 0.1)) + 1)

    parts = []
    bottom = TOP + len(rows) * ROW
    for decade in range(decades + 1):
        x = LABEL_WIDTH + step * decade
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#e4e7eb"/>')
        parts.append(text(x - 12, TOP - 10, f"{10.0 ** (decade - 1):g} ms", GREY))
    for number, (label, p50, p99, most) in enumerate(rows):
        y = TOP + number * ROW + 9
        colour = OURS if is_ours(label) else GREY
        parts.append(_label(y - 9, label))
        parts.append(
            f'<line x1="{place(p50):.1f}" y1="{y}" x2="{place(most):.1f}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
            f'<circle cx="{place(p50):.1f}" cy="{y}" r="5" fill="{colour}"/>'
            f'<rect x="{place(p99) - 3:.1f}" y="{y - 7}" width="6" height="14" fill="{colour}"/>'
            f'<line x1="{place(most):.1f}" y1="{y - 5}" x2="{place(most):.1f}" y2="{y + 5}" stroke="{colour}" '
            'stroke-width="2"/>'
        )
        parts.append(text(WIDTH - END + 14, y + 4, " / ".join(figure(v) for v in (p50, p99, most))))
    return _svg(title, "● p50   ▮ p99   | max", len(rows), parts)


def _label(y: float, text: str) -> str:
    weight = ' font-weight="bold"' if is_ours(text) else ""
    return f'<text x="{LABEL_WIDTH - 10}" y="{y + 13}" text-anchor="end" fill="{INK}"{weight}>{escape(text)}</text>'


def text(x: float, y: float, said: str, colour: str = INK, more: str = "") -> str:
    """Draw words at a place; `more`: further attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {more}>{escape(said)}</text>'


def _svg(title: str, legend: str, rows: int, parts: Sequence[str]) -> str:
    height = TOP + rows * ROW + 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
        f'<text x="16" y="26" font-size="16" font-weight="bold" fill="{INK}">{escape(title)}</text>'
        f'<text x="16" y="{TOP - 10}" fill="{GREY}">{escape(legend)}</text>'
    )
    return "\n".join([head, *parts, "</svg>", ""])
