"""A clock and a bucket for each test that asks for one."""

from __future__ import annotations

import pytest

from governor import LocalBucket
from tests.buckets import FLOOR_PER_S, Clock


@pytest.fixture
def clock() -> Clock:
    """Give the test its own time."""
    return Clock()


@pytest.fixture
def bucket(clock: Clock) -> LocalBucket:
    """Give the test a new bucket."""
    return LocalBucket(floor_per_s=FLOOR_PER_S, clock_us=clock)
