"""Serve an application until told to stop, and let running requests finish."""

import asyncio
import os

import structlog
from aiohttp import web

from expiry.errors import SetupError

log = structlog.get_logger()


async def serve(
    app: web.Application,
    host: str,
    port: int,
    stop: asyncio.Event,
    grace_s: float,
    *,
    bound: "asyncio.Future[int] | None" = None,
) -> None:
    """Serve until `stop`; then take no connection more and give running requests `grace_s`.

    `bound` is given the port, which matters for port 0. Raises SetupError when the address cannot be had.
    """
    # No access log: metrics count requests, and what went wrong is logged where it did.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=grace_s)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise SetupError(
                f"Cannot listen on {host}:{port} ({reason}): free it, or choose another port or host "
                "(--port, EXPIRY_API_PORT, EXPIRY_METRICS_PORT, EXPIRY_API_HOST)."
            ) from error
        actual = runner.addresses[0][1]
        log.info("http.listening", host=host, port=actual)
        if bound is not None and not bound.done():
            bound.set_result(actual)
        await stop.wait()
    finally:
        await runner.cleanup()
