"""Serve an application until told to stop, and leave without breaking a request.

The order of leaving: not ready (who sets `stop` also answers that to /readyz), so that load balancers turn to
others; meanwhile every request is answered, and its answer ends the connection; then no new connections; then what
is under way gets its grace; connections that idle are closed last, for until then a request may come on them.
"""

import asyncio

import structlog
from aiohttp import web

from expiry.api.connection import Connections
from expiry.api.listener import listening
from expiry.settings import Settings

CUT_S = 0.1  # for handlers to be cancelled in, once their grace is over

log = structlog.get_logger()


async def serve(
    app: web.Application,
    settings: Settings,
    port: int,
    stop: asyncio.Event,
    *,
    drain_s: float = 0.0,
    bound: "asyncio.Future[int] | None" = None,
) -> None:
    """Serve until `stop` and `drain_s` longer; then give the requests under way `stop_grace_s`.

    `bound` is given the port, which matters for port 0. Raises SetupError when the address cannot be had.
    """
    runner = web.AppRunner(app, shutdown_timeout=CUT_S)
    await runner.setup()
    assert runner.server is not None  # noqa: S101 - set up just now
    connections = Connections(runner.server, settings, stop)
    try:
        async with listening(settings.api_host, port, connections) as actual:
            log.info("http.listening", host=settings.api_host, port=actual)
            if bound is not None and not bound.done():
                bound.set_result(actual)
            await stop.wait()
            if drain_s:
                log.info("http.draining", drain_s=drain_s, connections=connections.count)
                await asyncio.sleep(drain_s)
        await connections.finish(settings.stop_grace_s)
    finally:
        await runner.cleanup()
