"""Clocks that differ, and what must not be taken for it."""

from __future__ import annotations

import pytest

from expiry.worker import SKEW_MS_MIN, SKEW_SAMPLES, Skew


def test_the_closest_bounds_of_the_last_batches_count() -> None:
    """Whatever a batch took on its way, the estimate is never above the truth, and as close as the best."""
    skew = Skew()
    for travel_ms in (30, 4, 60):
        skew.learn(database_ms=10_300 + travel_ms / 2, redis_ms=10_000, elapsed_ms=travel_ms)
    assert 298 <= skew.ms <= 300


@pytest.mark.parametrize("off_ms", [-SKEW_MS_MIN + 0.1, 0, SKEW_MS_MIN - 0.1])
@pytest.mark.parametrize("slow_ms", [0, 150])
def test_what_travel_or_a_slow_commit_explains_is_none(off_ms: float, slow_ms: float) -> None:
    """Clocks that agree stay so, however long the answer took."""
    skew = Skew()
    skew.learn(database_ms=10_000 + off_ms, redis_ms=10_000, elapsed_ms=slow_ms)
    assert skew.ms == 0


def test_a_clock_that_was_set_is_learned_anew() -> None:
    """What was known before a step is void at once, in either direction."""
    skew = Skew()
    for off_ms in (300, 100, -2000, 0):
        for _ in range(3):
            skew.learn(database_ms=10_000 + off_ms, redis_ms=10_000, elapsed_ms=1)
        assert skew.ms == pytest.approx(off_ms, abs=1)


def test_what_is_old_is_forgotten() -> None:
    """Clocks drift: bounds that no later batch confirms do not count for ever."""
    skew = Skew()
    skew.learn(database_ms=10_300, redis_ms=10_000, elapsed_ms=0)
    for _ in range(SKEW_SAMPLES):
        skew.learn(database_ms=10_300, redis_ms=10_000, elapsed_ms=250)
    assert skew.ms == 50
