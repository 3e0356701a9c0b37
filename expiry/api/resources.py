"""/v1/resources/{resource_id}: declare a capacity, look at the counters."""

import json
from dataclasses import asdict

from aiohttp import web

from expiry import resources
from expiry.api import body
from expiry.api.auth import needs, tenant_of
from expiry.api.database import run
from expiry.api.models import ResourceBody
from expiry.api.state import LANES, POOL
from expiry.holds import Conn
from expiry.resources import Resource

routes = web.RouteTableDef()


@routes.put("/v1/resources/{resource_id}")
@needs("holds")
async def put(request: web.Request) -> web.Response:
    """Declare the resource or change its capacity; answer it as it is then."""
    tenant_id, resource_id = tenant_of(request), body.resource_id(request)
    asked, _ = await body.read(request, ResourceBody)

    async def declare(conn: Conn) -> None:
        await resources.declare(conn, resource_id, tenant_id=tenant_id, capacity=asked.capacity)

    async with request.app[LANES].enter(tenant_id, resource_id):
        await run(request.app[POOL], declare)
    return await _answer(request, tenant_id, resource_id)


@routes.get("/v1/resources/{resource_id}")
@needs("read")
async def get(request: web.Request) -> web.Response:
    """Answer the resource's counters."""
    return await _answer(request, tenant_of(request), body.resource_id(request))


async def _answer(request: web.Request, tenant_id: str, resource_id: str) -> web.Response:
    async def look(conn: Conn) -> Resource:
        return await resources.get(conn, resource_id, tenant_id=tenant_id)

    found = await run(request.app[POOL], look)
    return web.Response(
        body=json.dumps(asdict(found), ensure_ascii=False).encode(),
        headers={"Content-Type": "application/json"},
    )
