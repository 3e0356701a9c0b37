"""How long the host program waits for a connection of its own pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from governor.probes.sample import Sample


class Waits:
    """The longest wait since last asked, those that have not ended included.

    with waits.waiting():
        conn = await pool.acquire()
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at_s: dict[object, float] = {}
        self._longest_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time what is inside, however it ends."""
        key, began_at_s = object(), self._clock()
        self._began_at_s[key] = began_at_s
        try:
            yield
        finally:
            del self._began_at_s[key]
            self._longest_s = max(self._longest_s, self._clock() - began_at_s)

    def longest_s(self) -> float:
        """Return the longest wait, s, and begin anew; 0 if nobody waited."""
        # Insertion order: the first one still there began first.
        oldest_at_s = next(iter(self._began_at_s.values()), None)
        now_s = self._clock()
        longest_s = max(self._longest_s, now_s - oldest_at_s if oldest_at_s is not None else 0.0)
        self._longest_s = 0.0
        return longest_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWait:
    """What the host program says its tasks wait for a connection, s: `Waits.longest_s`, say."""

    name: str = "pool_wait"
    target: float
    low: float = 0.0
    high: float = 1e5
    ttl_s: float
    required: bool = True
    wait_s: Callable[[], float]
    clock: Callable[[], float] = time.monotonic

    async def sample(self) -> Sample:
        """Ask the host program."""
        return Sample(value=self.wait_s(), sampled_at_s=self.clock())
