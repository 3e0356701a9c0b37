"""The live view says where things stand, calmly and within its width."""

from collections import Counter
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from expiry.live import Tally, View, Watch, percentile, sparkline


def view(width: int = 80, **done: int) -> tuple[View, Console]:
    """Answer a view of a replay that has come so far."""
    console = Console(file=StringIO(), width=width)
    nobody: Any = None  # the database is not asked
    shown = View(console, Watch(nobody), title="shop")
    tally = Tally()
    for name, value in done.items():
        setattr(tally, name, value)
    shown.progress(tally)
    return shown, console


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_a_value_that_enough_others_do_not_exceed(values: list[float], share: float) -> None:
    """It is one of the values, and at least that share of them is no larger."""
    found = percentile(sorted(values), share)
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values)


def test_percentiles_of_nothing_and_of_four() -> None:
    """The borders: no value, the first, the median, the last."""
    assert percentile([], 0.5) == 0
    assert [percentile([1, 2, 3, 4], s) for s in (0, 0.25, 0.5, 0.51, 1)] == [1, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("values", "drawn"), [([], ""), ([0, 0], "  "), ([0, 1, 4, 8], " ▁▄█"), ([0.01, 100], "▁█")]
)
def test_a_sparkline_shows_anything_above_zero(values: list[float], drawn: str) -> None:
    """The highest fills the line, the smallest is still seen, zero is not."""
    assert sparkline(values) == drawn


def test_the_panel_keeps_its_width() -> None:
    """Large figures do not break it; held is what was placed and has not ended."""
    shown, console = view(placed=1_234_567, confirmed=34_567, released=100_000)
    console.print(shown.panel())
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert {len(line) for line in lines} == {80}
    assert "1,234,567" in lines[2]
    assert "1,100,000" in lines[2]


def test_a_line_says_the_same_without_a_terminal() -> None:
    """What did not happen yet is a dash, not a zero."""
    shown, _ = view(placed=10, sold_out=3)
    assert "placed 10  held 10  expired 0  sold out 3  overdue 0  lag p50 - p99 -" in shown.line()


def test_the_end_is_told() -> None:
    """After the last event it says what is waited for."""
    shown, console = view(placed=10, finished=1)
    console.print(shown.panel())
    assert isinstance(console.file, StringIO)
    assert "the shop has closed, 10 holds are left to expire" in console.file.getvalue()


def test_requests_are_counted_by_the_second() -> None:
    """Progress is told as a running total; what counts is the difference."""
    shown, _ = view()
    for requests in (1, 5, 9):
        shown.progress(Tally(requests=requests))
    counted: Counter[int] = shown._requests_in_s  # noqa: SLF001 - the clock is not for hire
    assert counted.total() == 9
