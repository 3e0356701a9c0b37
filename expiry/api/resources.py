"""/v1/resources: declare a capacity, look at the counters."""

from dataclasses import asdict
from typing import Annotated

from aiohttp import web
from pydantic import Field, TypeAdapter

from expiry import errors, resources
from expiry.api import body, cursor
from expiry.api.database import run
from expiry.api.operation import Call, Operations, answer
from expiry.api.state import LANES, POOL
from expiry.holds import Conn
from expiry.resources import Resource
from expiry.wanted import TEXT_MAX
from expiry.wire.answers import ResourceAnswer, ResourcesAnswer
from expiry.wire.bodies import ResourceBody
from expiry.wire.fields import NO_NUL
from expiry.wire.queries import NoQuery, ResourcesQuery

operations = Operations("resources")

_IDS: TypeAdapter[str] = TypeAdapter(Annotated[str, Field(max_length=TEXT_MAX, pattern=NO_NUL)])


@operations.add(
    "PUT", "/v1/resources/{resource_id}", scope="holds", takes=ResourceBody, answers=ResourceAnswer
)
async def put(call: Call, asked: ResourceBody) -> web.Response:
    """Declare a resource, or change its capacity.

    From then on its units are counted and it cannot be oversold. Lowering the capacity below what is held keeps
    all holds: nothing is available until enough of them end.
    """
    tenant_id, resource_id = call.tenant_id, body.resource_id(call.request)

    async def declare(conn: Conn) -> None:
        await resources.declare(conn, resource_id, tenant_id=tenant_id, capacity=asked.capacity)

    async with call.app[LANES].enter(tenant_id, resource_id):
        await run(call.app[POOL], declare)
    return await _answer(call, resource_id)


@operations.add(
    "GET",
    "/v1/resources/{resource_id}",
    scope="read",
    takes=NoQuery,
    answers=ResourceAnswer,
    refuses=(errors.ResourceNotFoundError,),
)
async def get(call: Call, _asked: NoQuery) -> web.Response:
    """Get a declared resource: how many units are held, confirmed, available.

    One never declared answers 404: it has no limit.
    """
    return await _answer(call, body.resource_id(call.request))


@operations.add("GET", "/v1/resources", scope="read", takes=ResourcesQuery, answers=ResourcesAnswer)
async def list_(call: Call, asked: ResourcesQuery) -> web.Response:
    """List declared resources by id, in pages."""
    tenant_id = call.tenant_id
    after = "" if asked.cursor is None else cursor.read(asked.cursor, _IDS, asked)
    found = await run(
        call.app[POOL],
        lambda conn: resources.list_(
            conn, tenant_id=tenant_id, prefix=asked.prefix or "", after=after, limit=asked.limit + 1
        ),
    )
    page = found[: asked.limit]
    more = len(found) > len(page)
    return answer(
        {
            "resources": [asdict(one) for one in page],
            "next_cursor": cursor.write(page[-1].resource_id, _IDS, asked) if more else None,
        }
    )


async def _answer(call: Call, resource_id: str) -> web.Response:
    tenant_id = call.tenant_id

    async def look(conn: Conn) -> Resource:
        return await resources.get(conn, resource_id, tenant_id=tenant_id)

    return answer(asdict(await run(call.app[POOL], look)))
