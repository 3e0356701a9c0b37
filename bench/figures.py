"""Arithmetic of the bench, and how its figures are written."""

import math
from collections.abc import Sequence
from statistics import median

__all__ = ["figure", "median", "paired_ratio", "percentile"]


def percentile(values: Sequence[float], per_cent: float) -> float:
    """Answer the nearest-rank percentile: the smallest value that at least so many per cent do not exceed."""
    if not values:
        raise ValueError("a percentile of nothing")
    ordered = sorted(values)
    return ordered[max(math.ceil(per_cent / 100 * len(ordered)), 1) - 1]


def paired_ratio(mine: Sequence[float], baseline: Sequence[float]) -> float:
    """Answer the median of mine / baseline, run by run: what slows both runs of a pair cancels out."""
    return median(m / b for m, b in zip(mine, baseline, strict=True))


def figure(value: float | None) -> str:
    """Write a number with three significant digits, thousands separated; a dash for none."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    digits = 2 - math.floor(math.log10(abs(rounded)))  # 9.999 became 10.0
    return f"{rounded:,.{max(digits, 0)}f}"
