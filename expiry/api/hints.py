"""Wake-ups of concurrent requests in one call to Redis, and no request kept waiting by a Redis that hangs."""

import asyncio
import time
from collections.abc import Callable, Sequence

from expiry.holds import Hold
from expiry.wakeups import ENQUEUED, Wakeups

WAIT_S_MAX = 0.1  # for the call before ours
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
        self._lock = asyncio.Lock()
        self._pending: list[Hold] = []
        self._closed_until = 0.0

    async def enqueue(self, holds: Sequence[Hold]) -> None:
        """Enqueue wake-ups of committed holds; never raises because of Redis: a wake-up is a hint."""
        if self._wakeups is None:
            return
        if self._clock() < self._closed_until or len(self._pending) >= PENDING_MAX:
            ENQUEUED.labels("error").inc(len(holds))
            return
        self._pending.extend(holds)
        try:
            async with asyncio.timeout(WAIT_S_MAX if self._lock.locked() else None):
                await self._lock.acquire()
        except TimeoutError:
            return  # they go with the next call
        try:
            await self._send(self._wakeups)
        finally:
            self._lock.release()

    async def _send(self, wakeups: Wakeups) -> None:
        mine, self._pending = self._pending, []  # empty when the call before took ours along
        if mine and (await wakeups.enqueue(mine)).error:
            self._closed_until = self._clock() + RETRY_S
