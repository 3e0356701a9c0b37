"""The door: waiting for permits in turn, and giving up in time."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from governor import Limiter, LocalBucket
from tests.buckets import Clock, publish


class Sleeper:
    """A sleep that moves the clock and lets other tasks run."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.slept_s: list[float] = []
        self.asleep = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        """Sleep no time at all."""
        self.slept_s.append(seconds)
        self.asleep.set()
        self.clock.advance(seconds)
        await asyncio.sleep(0)  # no time passes: only a turn of the loop


@pytest.fixture
def sleeper(clock: Clock) -> Sleeper:
    """Give the test a record of who slept."""
    return Sleeper(clock)


@pytest.fixture
def limiter(bucket: LocalBucket, clock: Clock, sleeper: Sleeper) -> Limiter:
    """Give the test a door to its bucket."""
    return Limiter(bucket, clock_s=clock.seconds, sleep=sleeper)


async def test_acquire_gives_what_is_there(
    limiter: Limiter, bucket: LocalBucket, clock: Clock, sleeper: Sleeper
) -> None:
    """A batch takes what it gets, at once; what it does not use goes back."""
    await publish(bucket, 400)
    clock.advance(0.1)
    assert await limiter.acquire(100, timeout_s=1) == 40
    await limiter.refund(15)
    assert await limiter.acquire(100, timeout_s=1) == 15
    assert sleeper.slept_s == []


async def test_acquire_waits_for_the_first_permit(limiter: Limiter, sleeper: Sleeper) -> None:
    """With none there, it sleeps until the first one is, and no longer."""
    assert await limiter.acquire(100, timeout_s=1) == 1
    assert sleeper.slept_s == [0.2]


async def test_acquire_gives_up_in_time(limiter: Limiter, bucket: LocalBucket, clock: Clock) -> None:
    """Paused for longer than the caller can wait: 0, when its time is up."""
    await publish(bucket, 0)
    start_us = clock.us
    assert await limiter.acquire(1, timeout_s=0.6) == 0
    assert clock.us - start_us == 600_000
    assert await limiter.acquire(1, timeout_s=0) == 0


async def test_acquire_notices_a_resume(limiter: Limiter, bucket: LocalBucket, sleeper: Sleeper) -> None:
    """A waiter told to come back in seconds still looks again soon."""
    await publish(bucket, 0)
    waiting = asyncio.create_task(limiter.acquire(1, timeout_s=5))
    await sleeper.asleep.wait()
    await publish(bucket, 400)
    assert await waiting == 1
    assert sum(sleeper.slept_s) < 1


async def test_waiters_are_served_in_turn(limiter: Limiter, bucket: LocalBucket) -> None:
    """Of many tasks at one door the first to come is the first to go, and all get through."""
    await publish(bucket, 10)
    served: list[int] = []

    async def wait(number: int) -> None:
        assert await limiter.acquire(1, timeout_s=60) == 1
        served.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(wait(number))
    assert all(first < second for first, second in pairwise(served))


async def test_the_queue_at_the_door_is_bounded_too(bucket: LocalBucket, clock: Clock) -> None:
    """Who stands behind a waiter gives up in time as well, and leaves the door usable."""
    asleep, wake = asyncio.Event(), asyncio.Event()

    async def sleep(seconds: float) -> None:
        asleep.set()
        await wake.wait()
        clock.advance(seconds)

    limiter = Limiter(bucket, clock_s=clock.seconds, sleep=sleep)
    first = asyncio.create_task(limiter.acquire(1, timeout_s=5))
    await asleep.wait()
    assert await limiter.acquire(1, timeout_s=0.001) == 0
    wake.set()
    assert await first == 1
    assert await limiter.acquire(1, timeout_s=5) == 1
