"""/healthz, /readyz, /metrics: for probes and Prometheus, without a key."""

from http import HTTPStatus

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from expiry.api.state import READINESS
from expiry.wire.problems import NotReadyError

routes = web.RouteTableDef()


@routes.get("/healthz")
async def healthz(_request: web.Request) -> web.Response:
    """Answer that the process runs; restarting it would not help a store that is away."""
    return web.json_response({"status": "ok"})


@routes.get("/readyz")
async def readyz(request: web.Request) -> web.Response:
    """Answer whether the process can do its work, and what fails if not."""
    failing = await request.app[READINESS].failing()
    if failing:
        raise NotReadyError(f"Failing: {', '.join(sorted(failing))}.", failing=failing)
    return web.json_response({"status": "ready"}, status=HTTPStatus.OK)


@routes.get("/metrics")
async def metrics(_request: web.Request) -> web.Response:
    """Answer the metrics of this process in Prometheus's text format."""
    return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})
