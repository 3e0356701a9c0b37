"""One connection to PostgreSQL of a probe's own, bounded in everything, and never more than one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias, TypeVar

import asyncpg

from governor.probes.sample import ProbeMissingError, ProbeOverloadedError

Conn: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
T = TypeVar("T")

# Classes of SQLSTATE in which the server cannot serve: connection lost, out of resources (too many
# clients), cancelled, shut down or starting, its system fails.
_OVERLOADED = ("08", "53", "57", "58")
_CLOSE_S = 0.5  # for an orderly end, in which the server is told to cancel what still runs
_PAUSE_S_FIRST = 0.5  # after a failure: a server that refuses must not be asked ever faster ...
_PAUSE_S_MOST = 8.0  # ... nor be noticed late when it is back
# Its statements are short: compiling, or workers in parallel, would cost more than they do.
_SETTINGS = {"jit": "off", "max_parallel_workers_per_gather": "0"}


class Link:
    """A connection that is opened when needed and dropped when it fails."""

    def __init__(
        self,
        database_url: str,
        *,
        application_name: str,
        timeout_s: float,
        settings: Mapping[str, str] | None = None,
        on_open: Callable[[Conn], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to a server, not to a pooler: settings are those of the session.

        timeout_s bounds each statement, on the server and here, and with it a connect that it needs.
        """
        self._url = database_url
        self._timeout_s = timeout_s
        self._settings = {
            **_SETTINGS,
            "application_name": application_name,
            # A little before ours: a statement that the server ends leaves nothing running there.
            "statement_timeout": str(round(timeout_s * 900)),
            **(settings or {}),
        }
        self._on_open = on_open
        self._clock = clock
        self._conn: Conn | None = None
        self._pause_s = 0.0
        self._again_at_s = float("-inf")
        self._why = ""

    async def open(self) -> None:
        """Connect unless connected; raises as fetchrow does."""
        await self._bounded(self._opened)

    async def fetchrow(self, statement: str, *args: object) -> asyncpg.Record | None:
        """Run one statement.

        Raises:
            ProbeOverloadedError: the server refuses, is away, or took longer than timeout_s.
            ProbeMissingError: it is there and does not do this.
        """

        async def fetch() -> asyncpg.Record | None:
            conn = await self._opened()
            return await conn.fetchrow(statement, *args)

        return await self._bounded(fetch)

    async def close(self) -> None:
        """Disconnect within half a second."""
        conn, self._conn = self._conn, None
        if conn is not None:
            try:
                # Waits for a cancelled statement to end; a mere cut would leave it running in there.
                async with asyncio.timeout(_CLOSE_S):
                    await conn.close()
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
                conn.terminate()

    async def _opened(self) -> Conn:
        if self._conn is None or self._conn.is_closed():
            self._conn = await asyncpg.connect(self._url, server_settings=self._settings)
            if self._on_open is not None:
                await self._on_open(self._conn)
        return self._conn

    async def _bounded(self, work: Callable[[], Awaitable[T]]) -> T:
        if self._clock() < self._again_at_s:
            raise ProbeOverloadedError(self._why)
        try:
            async with asyncio.timeout(self._timeout_s):
                done = await work()
        except BaseException as error:
            await self._fail(error)
            raise
        self._pause_s = 0.0
        return done

    async def _fail(self, error: BaseException) -> None:
        """Drop the connection and raise what the error means for a reading."""
        await self.close()
        if not isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError | OSError | ValueError):
            return  # TimeoutError is an OSError
        if not _is_overload(error):
            raise ProbeMissingError(_said(error)) from error
        self._why = _said(error)
        self._pause_s = min(max(2 * self._pause_s, _PAUSE_S_FIRST), _PAUSE_S_MOST)
        self._again_at_s = self._clock() + self._pause_s
        raise ProbeOverloadedError(self._why) from error


def _is_overload(error: BaseException) -> bool:
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "")[:2] in _OVERLOADED
    return isinstance(error, OSError)


def _said(error: BaseException) -> str:
    """Say what the server said; of other errors the type only, as a URL may be quoted in them."""
    if isinstance(error, asyncpg.PostgresError):
        return f"PostgreSQL: {error.args[0] if error.args else type(error).__name__}"
    return f"PostgreSQL does not answer: {type(error).__name__}"
