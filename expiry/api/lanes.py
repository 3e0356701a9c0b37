"""Lanes: how many connections may wait for one resource, and for resources at all.

A checkout that keeps a resource's row locked makes every place on it wait. Without lanes those requests would
park all connections of the pool, and buyers of other things could not even confirm what they hold.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from expiry.errors import BusyError

WAIT_S_MAX = 2.0  # for a place in the lane; who waits longer had better come again


class Lanes:
    """Lets few requests per resource, and half a pool of them in all, wait for rows of resources."""

    def __init__(self, connections: int) -> None:
        """Divide up that many connections, those of the pool that the requests share."""
        self._width = max(1, connections // 5)
        self._all = asyncio.Semaphore(max(1, connections // 2))
        self._lanes: WeakValueDictionary[tuple[str, str], asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def enter(self, tenant_id: str, resource_id: str) -> AsyncIterator[None]:
        """Wait for a place in this resource's lane, holding no connection. Raises BusyError."""
        lane = self._lanes.setdefault((tenant_id, resource_id), asyncio.Semaphore(self._width))
        try:
            async with asyncio.timeout(WAIT_S_MAX) as waiting, lane, self._all:
                waiting.reschedule(None)
                yield
        except TimeoutError:
            if not waiting.expired():
                raise
            raise BusyError from None
