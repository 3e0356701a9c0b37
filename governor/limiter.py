"""The door: any asyncio loop asks here for permits, and waits a bounded time for them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from governor.bucket import Bucket

# s; a waiter looks again this often, so as not to sleep through a raised allowance or a resume.
_LOOK_AGAIN_S = 0.25


class Limiter:
    """Permits from any bucket, in turn: of the tasks that wait here only the first polls."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Guard `bucket`; clock and sleep are parameters so that tests need no time."""
        self._bucket = bucket
        self._clock_s = clock_s
        self._sleep = sleep
        self._turn = asyncio.Lock()

    async def acquire(self, n: int, *, timeout_s: float) -> int:
        """Return 1..n permits as soon as there is one, or 0 after timeout_s (0 = do not wait).

        Fewer than n are given rather than waited for: a batch takes what it gets. A permit ends in
        one of two ways: something starts, or `refund`.

        Raises: BucketUnavailable at once; start nothing and come back later.
        """
        deadline_s = self._clock_s() + timeout_s
        if not await self._turn_within(timeout_s):
            return 0
        try:
            return await self._poll(n, deadline_s)
        finally:
            self._turn.release()

    async def refund(self, n: int) -> None:
        """Give back n permits that started nothing."""
        await self._bucket.refund(n)

    async def _turn_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s if self._turn.locked() else None):
                return await self._turn.acquire()
        except TimeoutError:
            return False

    async def _poll(self, n: int, deadline_s: float) -> int:
        # take is never cancelled by the deadline: permits granted to nobody would be lost.
        while True:
            grant = await self._bucket.take(n)
            left_s = deadline_s - self._clock_s()
            if grant.granted or left_s <= 0:
                return grant.granted
            await self._sleep(min(grant.wait_s, left_s, _LOOK_AGAIN_S))
