"""Lanes: how many connections may wait for one resource, and for resources at all.

A checkout that keeps a resource's row locked makes every place on it wait, and every other verb of its holds. Without
lanes those requests would park all connections of the pool, and nobody could buy anything else or even look.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from expiry.errors import BusyError

WAIT_S_MAX = 2.0  # for a place in the lane; who waits longer had better come again


class Lanes:
    """Lets few requests per resource, and two fifths of a pool in all, place; two fifths do the other verbs.

    The last fifth never waits for a resource: it reads, and places what need not wait.
    """

    def __init__(self, connections: int) -> None:
        """Divide up that many connections, those of the pool that the requests share."""
        self._width = max(1, connections // 5)
        self._places = asyncio.Semaphore(max(1, connections * 2 // 5))
        self._verbs = asyncio.Semaphore(max(1, connections * 2 // 5))
        self._lanes: WeakValueDictionary[tuple[str, str], asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def enter(self, tenant_id: str, resource_id: str) -> AsyncIterator[None]:
        """Wait for a place in this resource's lane, holding no connection. Raises BusyError."""
        lane = self._lanes.setdefault((tenant_id, resource_id), asyncio.Semaphore(self._width))
        async with _all_of(lane, self._places):
            yield

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Wait for a place in the lane of the verbs that change a hold, whose resources only its row knows.

        Raises BusyError.
        """
        async with _all_of(self._verbs):
            yield


@asynccontextmanager
async def _all_of(*semaphores: asyncio.Semaphore) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(WAIT_S_MAX) as waiting, AsyncExitStack() as held:
            for semaphore in semaphores:
                await held.enter_async_context(semaphore)
            waiting.reschedule(None)
            yield
    except TimeoutError:
        if not waiting.expired():
            raise
        raise BusyError from None
