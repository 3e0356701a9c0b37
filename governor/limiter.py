"""The door: any asyncio loop asks here for permits, and waits a bounded time for them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram

from governor.bucket import Priority

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from governor.bucket import Bucket

# s; a waiter looks again this often, so as not to sleep through a raised allowance or a resume.
_LOOK_AGAIN_S = 0.25

PERMITS = Counter("governor_permits", "Permits, by what became of the request.", ["priority", "result"])
WAIT = Histogram(
    "governor_permit_wait_seconds",
    "From asking for permits to having one, or to giving up.",
    ["priority"],
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
for _priority in Priority:
    WAIT.labels(_priority.name.lower())
    for _result in ("granted", "refunded", "unmet"):
        PERMITS.labels(_priority.name.lower(), _result)


class Limiter:
    """Permits from any bucket, in turn: of the tasks that wait here only the first polls."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        priority: Priority = Priority.EXPIRE,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Guard `bucket` for work of this priority; clock and sleep are parameters so that tests need no time."""
        self._bucket = bucket
        self._priority = priority
        name = priority.name.lower()
        self._wait = WAIT.labels(name)
        self._permits = {result: PERMITS.labels(name, result) for result in ("granted", "refunded", "unmet")}
        self._clock_s = clock_s
        self._sleep = sleep
        self._turn = asyncio.Lock()

    async def acquire(self, n: int, *, timeout_s: float) -> int:
        """Return 1..n permits as soon as there is one, or 0 after timeout_s (0 = do not wait).

        Fewer than n are given rather than waited for: a batch takes what it gets. A permit ends in
        one of two ways: something starts, or `refund`.

        Raises: BucketUnavailable at once; start nothing and come back later.
        """
        asked_s = self._clock_s()
        granted = await self._in_turn(n, timeout_s, asked_s + timeout_s)
        self._wait.observe(max(0.0, self._clock_s() - asked_s))
        self._permits["granted"].inc(granted)
        self._permits["unmet"].inc(n - granted)
        return granted

    async def refund(self, n: int) -> None:
        """Give back n permits that started nothing."""
        await self._bucket.refund(n)
        self._permits["refunded"].inc(n)

    async def _in_turn(self, n: int, timeout_s: float, deadline_s: float) -> int:
        if not await self._turn_within(timeout_s):
            return 0
        try:
            return await self._poll(n, deadline_s)
        finally:
            self._turn.release()

    async def _turn_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s if self._turn.locked() else None):
                return await self._turn.acquire()
        except TimeoutError:
            return False

    async def _poll(self, n: int, deadline_s: float) -> int:
        # take is never cancelled by the deadline: permits granted to nobody would be lost.
        while True:
            grant = await self._bucket.take(n, priority=self._priority)
            left_s = deadline_s - self._clock_s()
            if grant.granted or left_s <= 0:
                return grant.granted
            # A permit may be there that is left to others: how long, no bucket can say.
            wait_s = _LOOK_AGAIN_S if self._priority else grant.wait_s
            await self._sleep(min(wait_s, left_s, _LOOK_AGAIN_S))
