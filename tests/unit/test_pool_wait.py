"""How long the host program waits for a connection of its own."""

from __future__ import annotations

import pytest

from governor.probes import Probes
from governor.probes.pool_wait import PoolWait, Waits


class Seconds:
    """A clock that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


async def test_the_longest_wait_counts_even_before_it_ends() -> None:
    """An exhausted pool is seen while everybody still waits, not once somebody got a connection."""
    clock = Seconds()
    waits = Waits(clock=clock)
    assert waits.longest_s() == 0
    with waits.waiting():
        clock.now_s += 3
        with waits.waiting():
            clock.now_s += 1
            assert waits.longest_s() == 4
    assert waits.longest_s() == 4, "it ended after it was asked for"
    assert waits.longest_s() == 0


async def test_a_wait_that_fails_ends() -> None:
    """A time-out of the pool leaves no eternal waiter."""
    clock = Seconds()
    waits = Waits(clock=clock)

    def time_out() -> None:
        with waits.waiting():
            clock.now_s += 2
            raise TimeoutError

    with pytest.raises(TimeoutError):
        time_out()
    assert waits.longest_s() == 2
    clock.now_s += 10
    assert waits.longest_s() == 0


async def test_pool_wait_reads_what_the_host_program_says() -> None:
    """The callable's seconds over the target."""
    clock = Seconds()
    waits = Waits(clock=clock)
    probes = Probes(
        [PoolWait(target=2.0, ttl_s=4, wait_s=waits.longest_s, clock=clock)], interval_s=2, clock=clock
    )
    with waits.waiting():
        clock.now_s += 3
        assert await probes.read() == {"pool_wait": 1.5}
