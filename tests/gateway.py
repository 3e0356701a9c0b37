"""What may stand between a client and the API: it forwards requests, and can spoil one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDictProxy

from expiry.client import Client
from tests.api_client import TENANT, Api

PROBLEM = '{{"type": "urn:expiry:problem:{0}", "title": "-", "status": {1}, "detail": "-", "code": "{0}"}}'

# What comes instead of the answer: status and body; None: the connection is cut.
SPOILT: dict[str, tuple[int, str] | None] = {
    "cut": None,
    "busy": (503, PROBLEM.format("busy", 503)),
    "quota": (429, PROBLEM.format("quota", 429)),
    "late": (408, PROBLEM.format("request_timeout", 408)),
    "late at the gateway": (408, ""),
    "in progress": (409, PROBLEM.format("key_in_progress", 409)),
    "bad gateway": (502, "<html>Bad Gateway</html>"),
    "no capacity at the gateway": (503, ""),
    "half an answer": (201, '{"id": "0193b0c5-8f4a-7c3e-9d5e-'),
    "another answer": (201, '{"welcome": "to the portal"}'),
    "nothing": (200, ""),
}
FAULTS = list(product(("before", "after"), SPOILT))


@dataclass
class Gateway:
    """Forwards to an API. `faults` are what it does to the next requests, one each; None does nothing."""

    upstream: str
    faults: list[tuple[str, str] | None] = field(default_factory=list)
    retry_after: str = ""
    seen: list[tuple[str, bytes]] = field(default_factory=list)  # key and body of each request

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward a request, or spoil it before or after the API has done what it asks."""
        body = await request.read()
        self.seen.append((request.headers.get("Idempotency-Key", ""), body))
        fault = self.faults.pop(0) if self.faults else None
        if fault is None or fault[0] == "after":
            status, answer, headers = await self._forward(request, body)
        if fault is None:
            kept = {h: headers[h] for h in ("Idempotent-Replayed", "Retry-After") if h in headers}
            return web.Response(status=status, body=answer, headers=kept)
        spoilt = SPOILT[fault[1]]
        if spoilt is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.Response(
            status=spoilt[0],
            text=spoilt[1],
            headers={"Retry-After": self.retry_after} if self.retry_after else None,
        )

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, bytes, CIMultiDictProxy[str]]:
        headers = {h: v for h, v in request.headers.items() if h not in ("Host", "Content-Length")}
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method, self.upstream + request.raw_path, headers=headers, data=body
            ) as response,
        ):
            return response.status, await response.read(), response.headers


@asynccontextmanager
async def gateway_to(upstream: str) -> AsyncIterator[tuple[Gateway, str]]:
    """Run a gateway before this URL; answer it and its own URL."""
    gateway = Gateway(upstream)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", gateway.handle)
    async with TestServer(app) as server:
        yield gateway, str(server.make_url("")).rstrip("/")


@asynccontextmanager
async def answering(*replies: tuple[int, str, dict[str, str]]) -> AsyncIterator[tuple[list[str], str]]:
    """Serve these answers, the last again and again; answer the idempotency keys that came, and the URL."""
    keys: list[str] = []
    left = list(replies)

    async def handle(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Idempotency-Key", ""))
        status, text, headers = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=status, text=text, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        yield keys, str(server.make_url(""))


@dataclass
class Clock:
    """Time that passes only while somebody sleeps, and can do something in each sleep."""

    now_s: float = 0.0
    slept_s: list[float] = field(default_factory=list)
    meanwhile: list[Callable[[], object]] = field(default_factory=list)

    def __call__(self) -> float:
        """Answer the time."""
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        self.slept_s.append(seconds)
        if self.meanwhile:
            done = self.meanwhile.pop(0)()
            if hasattr(done, "__await__"):
                await done


def url_of(api: Api) -> str:
    """Answer where the API is."""
    return str(api.client.make_url("")).rstrip("/")


def client_at(url: str, *, key: str = TENANT, clock: Clock | None = None, **changes: object) -> Client:
    """Answer a client whose waits take no time."""
    clock = clock or Clock()
    return Client(url, key=key, clock=clock, sleep=clock.sleep, **changes)  # type: ignore[arg-type]
