"""Wake-ups of concurrent requests in one call to Redis, and no request kept waiting by a Redis that hangs."""

import asyncio
import time
from collections.abc import Callable, Sequence

from expiry.holds import Hold
from expiry.wakeups import ENQUEUED, Wakeups

WAIT_S_MAX = 0.1  # of a request for Redis
PENDING_MAX = 10_000  # holds; beyond, hints are dropped and the sweep ends those holds
RETRY_S = 1.0  # after a failed call, hints are dropped for so long


class Hints:
    """Hands wake-ups to the queue: while one call runs, what comes meanwhile waits and goes with the next.

    One call at a time also means one connection, however many requests there are.
    """

    def __init__(self, wakeups: Wakeups | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Without `wakeups` nothing is handed on; `clock` answers seconds since anything."""
        self._wakeups = wakeups
        self._clock = clock
        self._pending: list[Hold] = []
        self._sending: asyncio.Task[None] | None = None
        self._closed_until = 0.0

    async def enqueue(self, holds: Sequence[Hold]) -> None:
        """Enqueue wake-ups of committed holds; never raises because of Redis, nor waits long for it."""
        if self._wakeups is None or not holds:
            return
        if self._clock() < self._closed_until or len(self._pending) >= PENDING_MAX:
            ENQUEUED.labels("error").inc(len(holds))
            return
        self._pending.extend(holds)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._drain(self._wakeups))
        await asyncio.wait([self._sending], timeout=WAIT_S_MAX)

    async def close(self) -> None:
        """Let what is under way finish; bounded by Redis's timeout."""
        if self._sending is not None:
            await asyncio.wait([self._sending])

    async def _drain(self, wakeups: Wakeups) -> None:
        while self._pending and self._clock() >= self._closed_until:
            mine, self._pending = self._pending, []
            if (await wakeups.enqueue(mine)).error:
                self._closed_until = self._clock() + RETRY_S
