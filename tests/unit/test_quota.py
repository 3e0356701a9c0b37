"""The quota's arithmetic, by a clock of the test's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expiry.api.quota import KEYS_MAX, Quota
from expiry.wire.problems import QuotaError


class Clock:
    """Stands still until told."""

    now_s = 1000.0

    def __call__(self) -> float:
        """Answer the time."""
        return self.now_s


def taken(quota: Quota, n: int) -> int:
    """Answer how many of n requests pass."""
    passed = 0
    for _ in range(n):
        try:
            quota.take("k")
        except QuotaError:
            continue
        passed += 1
    return passed


@given(
    rate=st.floats(0.1, 50),
    steps=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 80)), max_size=20),
)
def test_never_more_than_the_rate_and_a_seconds_worth(rate: float, steps: list[tuple[float, int]]) -> None:
    """Over any stretch of time."""
    clock = Clock()
    quota, passed, started_s = Quota(rate, clock=clock), 0, clock.now_s
    for wait_s, n in steps:
        clock.now_s += wait_s
        passed += taken(quota, n)
        assert passed <= rate * (clock.now_s - started_s) + max(1, rate) + 1e-6


def test_who_waits_as_told_is_let_through() -> None:
    """Retry-After is long enough, and not longer than needed by more than a second."""
    clock = Clock()
    quota = Quota(0.25, clock=clock)
    quota.take("k")
    with pytest.raises(QuotaError) as refused:
        quota.take("k")
    wait_s = refused.value.facts["retry_after_s"]
    assert wait_s == 4
    clock.now_s += 4
    quota.take("k")


def test_a_debt_is_paid_before_anything_else() -> None:
    """What could not be refused any more is waited for."""
    clock = Clock()
    quota = Quota(10, clock=clock)
    quota.take("k", 100, owed=True)
    assert taken(quota, 5) == 0
    clock.now_s += 9.5
    assert taken(quota, 50) == 5
    quota.take("other")


def test_the_memory_is_bounded() -> None:
    """Who was quiet longest is forgotten."""
    quota = Quota(1, clock=Clock())
    for n in range(KEYS_MAX + 10):
        quota.take(f"k{n}")
    quota.take("k0")
    with pytest.raises(QuotaError):
        quota.take(f"k{KEYS_MAX + 9}")
