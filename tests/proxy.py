"""A TCP proxy that cuts connections on cue: before a request arrives, or before its answer does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import Enum
from urllib.parse import urlsplit

CHUNK = 1 << 16


class Cut(Enum):
    """When to cut the connection of a request."""

    BEFORE = "the server never sees it"
    AFTER = "the server does its work, and nobody hears of it"


class Proxy:
    """Forwards to one server; made by `proxy_to`."""

    def __init__(self, upstream_url: str) -> None:
        self._upstream = urlsplit(upstream_url)
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._refusing = False
        self.judge: Callable[[bytes], Cut | None] = _forward_all
        self.on_cut: Callable[[], None] = lambda: None
        self.cuts = 0

    @property
    def url(self) -> str:
        """The server's URL by way of this proxy."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        user = self._upstream.netloc.rpartition("@")[0]
        return self._upstream._replace(netloc=f"{user}@127.0.0.1:{port}").geturl()

    def lead_to(self, upstream_url: str) -> None:
        """Let new connections go to another server; those that are there stay where they are."""
        self._upstream = urlsplit(upstream_url)

    def cut_at(self, cue: bytes, when: Cut) -> None:
        """Cut the connection of the next request with `cue` in it, once."""

        def judge(request: bytes) -> Cut | None:
            if cue not in request:
                return None
            self.judge = _forward_all
            return when

        self.judge = judge

    def refuse(self, *, refusing: bool = True) -> None:
        """Cut every connection and every new one at once, or stop doing so."""
        self._refusing = refusing
        if refusing:
            for link in list(self._links):
                link.cancel()

    async def start(self) -> None:
        """Listen on a port of its own."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        """Cut what is left and stop listening."""
        assert self._server is not None
        self._server.close()
        self.refuse()
        await asyncio.gather(*self._links, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        writers = [writer]
        try:
            if not self._refusing:
                answers, requests = await asyncio.open_connection(
                    self._upstream.hostname, self._upstream.port
                )
                writers.append(requests)
                await self._forward(reader, writer, answers, requests)
        except (asyncio.CancelledError, ConnectionError):
            pass  # cut is cut
        finally:
            self._links.discard(link)
            for end in writers:
                end.transport.abort()
                with contextlib.suppress(ConnectionError):
                    await end.wait_closed()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
    ) -> None:
        swallow = asyncio.Event()
        pumps = [
            asyncio.create_task(self._pump_requests(reader, requests, swallow)),
            asyncio.create_task(self._pump_answers(answers, writer, swallow)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump_requests(
        self, reader: asyncio.StreamReader, requests: asyncio.StreamWriter, swallow: asyncio.Event
    ) -> None:
        while data := await reader.read(CHUNK):
            cut = self.judge(data)
            if cut is Cut.BEFORE:
                self._note_cut()
                return
            if cut is Cut.AFTER:
                swallow.set()
            requests.write(data)
            await requests.drain()

    async def _pump_answers(
        self, answers: asyncio.StreamReader, writer: asyncio.StreamWriter, swallow: asyncio.Event
    ) -> None:
        while data := await answers.read(CHUNK):
            if swallow.is_set():
                self._note_cut()
                return
            writer.write(data)
            await writer.drain()

    def _note_cut(self) -> None:
        self.cuts += 1
        self.on_cut()


def _forward_all(_request: bytes) -> None:
    return None


@asynccontextmanager
async def proxy_to(upstream_url: str) -> AsyncIterator[Proxy]:
    """Run a proxy in front of the server of this URL."""
    proxy = Proxy(upstream_url)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
