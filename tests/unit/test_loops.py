"""Waits between rounds, and which store a failure is put down to."""

from __future__ import annotations

import asyncio
import time

import asyncpg
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError

from expiry.loops import BACKOFF_S_MAX, Backoff, kind_of, rest
from governor import BucketUnavailable


def test_waits_double_up_to_a_bound_and_differ() -> None:
    """0.1 s, 0.2 s ... at most BACKOFF_S_MAX, each shortened by up to half, so that a fleet spreads out."""
    fleet = [Backoff() for _ in range(50)]
    for failures in range(1, 15):
        whole_s = min(0.1 * 2 ** (failures - 1), BACKOFF_S_MAX)
        waits = [backoff.failed() for backoff in fleet]
        assert all(whole_s / 2 <= wait_s <= whole_s for wait_s in waits)
        assert len(set(waits)) > 1


def test_a_success_starts_anew() -> None:
    """After a round that worked, the next failure waits as little as the first did."""
    backoff = Backoff()
    for _ in range(10):
        backoff.failed()
    backoff.succeeded()
    assert backoff.failed() <= 0.1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RedisConnectionError("gone"), "redis"),
        (ReadOnlyError("replica"), "redis"),
        (BucketUnavailable(), "redis"),
        (asyncpg.PostgresConnectionError("gone"), "database"),
        (asyncpg.InterfaceError("pool is closed"), "database"),
        (ConnectionRefusedError("nobody there"), "database"),
        (TimeoutError(), "database"),
        (KeyError("ours"), "bug"),
    ],
)
def test_failures_are_put_down_to_a_store_or_to_us(error: Exception, kind: str) -> None:
    """What neither driver raises is a bug of ours and must not pass as an outage."""
    assert kind_of(error) == kind


async def test_rest_lasts_as_long_as_asked() -> None:
    """Nobody asks to stop: the wait is the whole wait."""
    started_s = time.monotonic()
    await rest(asyncio.Event(), 0.05)
    assert 0.045 <= time.monotonic() - started_s < 1


@pytest.mark.parametrize("seconds", [-1, 0])
async def test_rest_of_nothing_returns(seconds: float) -> None:
    """A time that is past is not waited for."""
    await asyncio.wait_for(rest(asyncio.Event(), seconds), 1)


async def test_rest_ends_when_asked_to_stop() -> None:
    """A stop cuts the wait short."""
    stop = asyncio.Event()
    resting = asyncio.create_task(rest(stop, 60))
    stop.set()
    await asyncio.wait_for(resting, 1)
