"""A load balancer as there are many: over TCP, to backends that were ready when it last looked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from expiry import loops
from tests.helpers import eventually

LOOK_S = 0.05  # between two looks
ANSWER_S_MAX = 1.0  # who says nothing for so long is not ready
CHUNK = 1 << 16
READY = b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Balancer:
    """Gives each new connection to the next ready backend, and leaves it there; made by `balanced`."""

    def __init__(self, *backends: str) -> None:
        self._backends = list(backends)
        self._ready: set[str] = set()
        self._stop = asyncio.Event()
        self._links: set[asyncio.Task[None]] = set()
        self.connections: Counter[str] = Counter()
        self.turned_away = 0

    async def replace(self, old: str, new: str) -> None:
        """Put a backend in the place of another one, and wait until it is ready."""
        self._backends[self._backends.index(old)] = new
        await self.until_ready(new)

    async def until_ready(self, *backends: str) -> None:
        """Wait until new connections may go to all of these."""

        async def ready() -> bool:
            return self._ready >= set(backends)

        await eventually(ready)

    async def watch(self) -> None:
        """Look at every backend, again and again."""
        while not self._stop.is_set():
            looked = list(self._backends)
            found = await asyncio.gather(*map(_is_ready, looked))
            self._ready = {backend for backend, ready in zip(looked, found, strict=True) if ready}
            await loops.rest(self._stop, LOOK_S)

    async def stop(self) -> None:
        """Look no more, and cut what is left."""
        self._stop.set()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection."""
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        if not self._ready:
            self.turned_away += 1
            writer.close()
            return
        backend = min(self._ready, key=lambda one: self.connections[one])
        self.connections[backend] += 1
        with suppress(ConnectionError, asyncio.CancelledError):
            answers, requests = await _connect(backend)
            await asyncio.gather(_pump(reader, requests), _pump(answers, writer))


async def _connect(backend: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(backend)
    return await asyncio.open_connection(address.hostname, address.port)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Forward until the source ends, then end the sink."""
    try:
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
    finally:
        sink.close()


async def _is_ready(backend: str) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            reader, writer = await _connect(backend)
            try:
                writer.write(READY)
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


@asynccontextmanager
async def balanced(*backends: str) -> AsyncIterator[tuple[Balancer, str]]:
    """Run a balancer before these until all are ready; gives it and its URL."""
    balancer = Balancer(*backends)
    server = await asyncio.start_server(balancer.serve, "127.0.0.1", 0)
    watching = asyncio.create_task(balancer.watch())
    try:
        await balancer.until_ready(*backends)
        yield balancer, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await balancer.stop()
        await watching
