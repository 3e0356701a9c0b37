"""Small plots over time, side by side in one picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from bench.figures import figure
from bench.show import GREY, text

HEIGHT = 130
XMLNS = "http://www.w3.org/2000/svg"


def page(width: int, height: int, title: str, legend: Sequence[tuple[str, str]]) -> list[str]:
    """Begin a picture: its title, and what each colour stands for (colour, words)."""
    parts = [
        f'<svg xmlns="{XMLNS}" viewBox="0 0 {width} {height}" font-size="11" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(16, 26, title, more='font-size="16" font-weight="bold"'),
    ]
    for number, (colour, said) in enumerate(legend):
        x = 16 + number * 150
        parts.append(f'<rect x="{x}" y="39" width="14" height="4" fill="{colour}"/>')
        parts.append(text(x + 20, 45, said))
    return parts


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
