"""A client's connection: whatever the client may take its time for has an end.

aiohttp bounds how long a connection idles between requests, and how many requests wait in it (32; then it reads no
further). Its timer sees the end of an answer and no bytes, so a head that comes a byte at a time, and an answer
that nobody takes, are bounded here. `_waiter` (nothing is handled) and `_request_count` (heads read) are aiohttp's
own; there is no public way to learn either.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from prometheus_client import Counter, Gauge

from expiry.api import refusals
from expiry.settings import Settings

HEAD_BYTES_MAX = 65_536  # that arrive before a head is whole: many long headers are not for keeping either
LINGER_S = 2.0  # after an answer the rest of its request's body is read so long, lest the answer be lost
SETTLE_S = 0.05  # for requests to be read that were on their way when the listener closed

CONNECTIONS = Gauge("expiry_http_connections", "Connections of clients that are open.")
CUT = Counter("expiry_http_cut", "Connections that were cut off, by what the client did not do.", ["reason"])
HEAD_LATE, HEAD_TOO_LARGE, ANSWER_LEFT = (
    CUT.labels(reason) for reason in ("head_late", "head_too_large", "answer_left")
)

log = structlog.get_logger()


class Connections:
    """The connections of one server: how many there may be, and which of them are busy."""

    def __init__(self, server: web.Server, settings: Settings, stop: asyncio.Event) -> None:
        """From `stop` on every answer ends its connection."""
        self.settings = settings
        self.stop = stop
        self.freed: set[Callable[[], None]] = set()  # called, each once, when there is room again
        self._server = server
        self._open: set[Connection] = set()
        self._busy: set[Connection] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    @property
    def room(self) -> bool:
        """Whether one more may enter."""
        return len(self._open) < self.settings.api_connections_max

    def enter(self) -> "Connection":
        """Answer a new connection."""
        connection = Connection(self._server, self)
        self._open.add(connection)
        CONNECTIONS.inc()
        return connection

    def gone(self, connection: "Connection") -> None:
        """Forget a connection; may be repeated."""
        self.done(connection)
        if connection in self._open:
            self._open.remove(connection)
            CONNECTIONS.dec()
            waiting, self.freed = self.freed, set()
            for call in waiting:
                call()

    def begun(self, connection: "Connection") -> None:
        """Note that a request is under way."""
        self._busy.add(connection)
        self._idle.clear()

    def done(self, connection: "Connection") -> None:
        """Note that none is any more; may be repeated."""
        self._busy.discard(connection)
        if not self._busy:
            self._idle.set()

    async def finish(self, within_s: float) -> None:
        """Wait until no request is under way, but no longer than that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.sleep(SETTLE_S)
                await self._idle.wait()


class Connection(RequestHandler):
    """Speaks HTTP with one client; made by `Connections`."""

    __slots__ = (
        "_answered",
        "_connections",
        "_head_bytes",
        "_head_timer",
        "_settings",
        "_wire",
        "_write_timer",
    )

    def __init__(self, server: web.Server, connections: Connections) -> None:
        settings = connections.settings
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            # Metrics count requests, and what goes wrong is logged where it does.
            access_log=None,  # type: ignore[arg-type] # as aiohttp's own runner passes it on
            keepalive_timeout=settings.api_idle_timeout_s,
            lingering_time=LINGER_S,
            max_line_size=settings.api_line_bytes_max,
            max_field_size=settings.api_header_bytes_max,
            max_headers=settings.api_headers_max,
        )
        self._connections = connections
        self._settings = settings
        self._wire: asyncio.Transport | None = None
        self._answered = 0
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first head, from now on."""
        super().connection_made(transport)
        self._wire = cast(asyncio.Transport, transport)
        # What the kernel does not take at once pauses writing, which starts the time for an answer.
        self._wire.set_write_buffer_limits(high=0)
        self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Leave nothing behind."""
        self._stop_timers()
        self._connections.gone(self)
        super().connection_lost(exc)

    async def start(self) -> None:
        """Handle requests until the connection ends; whatever fails on the way there ends it too.

        aiohttp makes a request of `CONNECT` without a target, fails on it, and would keep the connection for ever.
        """
        try:
            await super().start()
        except Exception as error:  # noqa: BLE001 - the edge: handlers' own failures have been answered before
            log.warning("http.connection_failed", reason=repr(error))
            self.force_close()

    # --- heads

    def data_received(self, data: bytes) -> None:
        """Read on; a head that has begun must end in time."""
        heads = self._request_count
        super().data_received(data)
        if self._request_count != heads:
            self._head_came()
        elif self._waiter is not None or not heads:  # otherwise they are of a body
            self._head_goes_on(len(data.strip()))

    def _expect_head(self) -> None:
        # A head has a time of its own, so nothing idles; the next answer lets the connection idle again.
        self.keep_alive(val=False)
        timeout_s = self._settings.api_head_timeout_s
        self._head_timer = self._loop.call_later(timeout_s, self._head_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._head_bytes = 0
        self._connections.begun(self)

    def _head_goes_on(self, size: int) -> None:
        if not size:
            return  # line ends between two requests belong to neither
        if self._head_timer is None:
            self._expect_head()
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX:
            HEAD_TOO_LARGE.inc()
            self._refuse(refusals.HEADERS_TOO_LARGE)

    def _head_late(self) -> None:
        HEAD_LATE.inc()
        self._refuse(refusals.HEAD_LATE if self._head_bytes else b"")

    def _refuse(self, answer: bytes) -> None:
        """Answer where there is no request yet, and close."""
        if self.transport is not None and answer:
            self.transport.write(answer)
        self.force_close()

    # --- answers

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; it ends the connection if the server is about to stop, or the body did not come."""
        if isinstance(resp, web.HTTPException):  # raised on the way to the middlewares: Expect
            resp = refusals.by_aiohttp(request, resp)
        lost = resp.status == web.HTTPRequestTimeout.status_code or request.content.exception() is not None
        if lost or self._connections.stop.is_set():
            resp.force_close()
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._answered += 1
            if self._answered == self._request_count:
                self._connections.done(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what the parser refused, or a fault of ours outside every middleware; ends the connection."""
        if isinstance(exc, HttpProcessingError):
            answer = refusals.unreadable(request, exc)
        else:
            super().handle_error(request, status, exc, message)  # logs it; raises if an answer has begun
            answer = refusals.internal(request)
        answer.force_close()
        # aiohttp sends these as HTTP/1.0, where it goes without saying; clients of 1.1 had better be told.
        answer.headers["Connection"] = "close"
        return answer

    def log_exception(self, *args: Any, **kw: Any) -> None:  # noqa: ANN401 - as aiohttp has it
        """Log a fault of ours; a body that cannot be read, and that nobody wanted to read, is none."""
        error = kw.get("exc_info")
        if isinstance(error, web.RequestPayloadError):
            log.debug("http.body_unreadable", reason=repr(error))
        else:
            super().log_exception(*args, **kw)

    def pause_writing(self) -> None:
        """Start the time in which the client has to take what is left."""
        super().pause_writing()
        timeout_s = self._settings.api_answer_timeout_s
        self._write_timer = self._loop.call_later(timeout_s, self._answer_left)

    def resume_writing(self) -> None:
        """Stop that time."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _answer_left(self) -> None:
        ANSWER_LEFT.inc()
        if self._wire is not None:
            self._wire.abort()  # close() would wait for the client to take the rest

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = None
        self._wire = None
