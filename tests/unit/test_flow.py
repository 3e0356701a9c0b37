"""What two looks at a bucket say of the time between them."""

from __future__ import annotations

import pytest

from governor.bucket import Attempts, BucketState
from governor.flow import Look, between


def look(micros: int, spent: int) -> Look:
    """Return a look at a bucket that has spent so much."""
    state = BucketState(
        tokens=0, debt=0, micros=micros, rate=100_000, floor=5_000, until=10**12, epoch=1, spent=spent
    )
    return Look(state=state, attempts=Attempts(), at_s=micros / 1e6)


@pytest.mark.parametrize(
    ("then", "now", "started"),
    [(500, 700, 200), (500, 496, 0), (500, 3, None)],
    ids=["spent", "refunded", "lost"],
)
def test_more_refunded_than_granted_is_nothing_started_and_no_lost_bucket(
    then: int, now: int, started: int | None
) -> None:
    """A batch that was out at one look may be back by the next; two such in a row were taken for stale signals."""
    flow = between(look(0, then), look(2_000_000, now), ttl_us=1, dead_us=1, published_per_s=None)
    assert flow.started == started
    assert flow.interval_s == 2.0
