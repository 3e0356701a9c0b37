"""The API on its own listener, and clients that speak to it a byte at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import asyncpg

from expiry.api import make_app, serve
from expiry.settings import Settings

Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

WITHIN_S = 10
PACE_S = 0.02  # between two bytes of a client that dribbles
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes

    def problem(self) -> dict[str, Any]:
        """Check that it is a problem as RFC 9457 has it, and return it."""
        assert self.headers["content-type"] == "application/problem+json", self
        found: dict[str, Any] = json.loads(self.body)
        assert found["status"] == self.status
        assert all(isinstance(found[name], str) for name in ("type", "title", "detail", "instance", "code"))
        return found

    def refusal(self) -> tuple[int, str]:
        """Return the status and the code of a problem that ends the connection."""
        assert self.headers["connection"] == "close", self
        return self.status, self.problem()["code"]


@dataclass(slots=True)
class Wire:
    """A connection to the server; nothing is sent on it that the test does not write."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        """Send these bytes."""
        self.writer.write(data)

    async def dribble(self, data: bytes, *, size: int = 1, pace_s: float = PACE_S) -> bytes:
        """Send a byte (or so many) at a time until the server speaks or ends; return the first byte of that."""
        with suppress(ConnectionResetError):  # as it is to be expected of an end while bytes are on their way
            for first in range(0, len(data), size):
                self.send(data[first : first + size])
                with suppress(TimeoutError):
                    async with asyncio.timeout(pace_s):
                        return await self.reader.read(1)
            async with asyncio.timeout(WITHIN_S):
                return await self.reader.read(1)
        return b""

    async def answer(self, first: bytes = b"") -> Answer:
        """Read one answer."""
        async with asyncio.timeout(WITHIN_S):
            head = first + await self.reader.readuntil(b"\r\n\r\n")
            line, *fields = head.decode().rstrip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (f.partition(": ") for f in fields)}
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(int(line.split()[1]), headers, body)

    async def ended(self) -> bytes:
        """Wait until the server ends the connection; return what it still said."""
        async with asyncio.timeout(WITHIN_S):
            with suppress(ConnectionResetError):
                return await self.reader.read()
        return b""

    async def quiet(self, for_s: float) -> bool:
        """Say whether the server neither speaks nor ends the connection for so long."""
        try:
            async with asyncio.timeout(for_s):
                await self.reader.read(1)
        except TimeoutError:
            return True
        return False


@dataclass(slots=True)
class Served:
    """A server that runs until `stop`."""

    port: int
    stop: asyncio.Event
    serving: asyncio.Task[None]
    failing: dict[str, str] = field(default_factory=dict)

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[Wire]:
        """Connect."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Wire(reader, writer)
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def healthy(self) -> bool:
        """Ask it on a new connection."""
        async with self.wire() as wire:
            wire.send(HEALTH)
            return (await wire.answer()).status == 200


@asynccontextmanager
async def served(pool: Pool, *, drain_s: float = 0, **changes: Any) -> AsyncIterator[Served]:  # noqa: ANN401
    """Serve the API with these settings, and stop it in the end."""
    stop = asyncio.Event()
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    settings = Settings(mode="sweep", stop_grace_s=5).model_copy(update=changes)
    app = make_app(pool=pool, settings=settings, wakeups=None, bucket=None)
    serving = asyncio.create_task(serve(app, settings, 0, stop, drain_s=drain_s, bound=bound))
    try:
        yield Served(await bound, stop, serving)
    finally:
        stop.set()
        async with asyncio.timeout(WITHIN_S):
            await serving


def request(method: str, path: str, *, key: str, body: bytes = b"", **headers: str) -> bytes:
    """Write down a request of a client with this key."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body
