"""How a client asks: its session, its one way to get, to put and to post, its pages."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Self, TypeVar
from uuid import uuid4

import aiohttp
from pydantic import SecretStr
from yarl import URL

from expiry.client import words
from expiry.client.transport import A, Attempt, Request, Transport
from expiry.wire import answers

P = TypeVar("P", answers.HoldsAnswer, answers.ResourcesAnswer, answers.KeysAnswer)

_JSON = {"Content-Type": "application/json"}


def _ignore(_attempt: Attempt) -> None:
    return


class Caller:
    """Asks one API with one key. Its methods are those of `Client`."""

    def __init__(  # noqa: PLR0913 - all by name, and only two have no default
        self,
        base_url: str,
        *,
        key: str,
        timeout_s: float = 10.0,
        attempts_max: int = 5,
        total_s_max: float = 30.0,
        session: aiohttp.ClientSession | None = None,
        on_attempt: Callable[[Attempt], None] = _ignore,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Use the session if there is one (it stays open), else one of its own. Raises SetupError."""
        self._owns_session = session is None
        self._sleep = sleep
        try:
            url = URL(base_url)
        except ValueError:  # its text may repeat what is secret
            url = URL()
        self._transport = Transport(
            base_url=url,
            key=SecretStr(key),
            timeout_s=timeout_s,
            attempts_max=attempts_max,
            total_s_max=total_s_max,
            session=session,
            on_attempt=on_attempt,
            clock=clock,
            sleep=sleep,
        )

    def __repr__(self) -> str:
        return f"Client({str(self._transport.base_url)!r})"

    async def __aenter__(self) -> Self:
        if self._owns_session:
            self._transport.session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        if self._owns_session and self._transport.session is not None:
            await self._transport.session.close()
            self._transport.session = None

    async def _get(self, path: str, answer: type[A], query: Mapping[str, str] | None = None) -> A:
        return await self._transport.ask(Request(method="GET", path=path, query=query or {}), answer)

    async def _put(self, path: str, body: bytes, answer: type[A]) -> A:
        return await self._transport.ask(Request(method="PUT", path=path, body=body, headers=_JSON), answer)

    async def _delete(self, path: str, answer: type[A]) -> A:
        return await self._transport.ask(Request(method="DELETE", path=path), answer)

    async def _post(
        self, path: str, body: bytes, answer: type[A], key: str | None = None, *, longer_s: float = 0.0
    ) -> A:
        key = uuid4().hex if key is None else key
        headers = {**_JSON, "Idempotency-Key": words.header_key(key)}
        return await self._transport.ask(
            Request(
                method="POST", path=path, body=body, headers=headers, idempotency_key=key, longer_s=longer_s
            ),
            answer,
        )


async def pages(ask: Callable[[str | None], Awaitable[P]]) -> AsyncIterator[P]:
    """Answer the pages that `ask` answers for each cursor, to the last."""
    cursor: str | None = None
    while True:
        page = await ask(cursor)
        yield page
        if (cursor := page.next_cursor) is None:
            return
