"""/v1/holds: place, get, renew, confirm, release, return."""

import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any

from aiohttp import web

from expiry import holds, idempotency
from expiry.api import body
from expiry.api.auth import name_of, needs, tenant_of
from expiry.api.database import run
from expiry.api.models import ConfirmBody, GiveBackBody, PlaceBody, RenewBody
from expiry.api.state import BUCKET, HINTS, LANES, POOL
from expiry.api.times import parse_rfc3339, rfc3339, rfc3339_or_none
from expiry.holds import Conn, Hold
from expiry.wakeups import after_commit

routes = web.RouteTableDef()


@routes.post("/v1/holds")
@needs("holds")
async def place(request: web.Request) -> web.Response:
    """Place a hold: one statement, then its wake-up."""
    tenant_id = tenant_of(request)
    key = body.required_idempotency_key(request)
    asked, body_hash = await body.read(request, PlaceBody)
    wanted, by = [asked.wanted()], name_of(request)
    async with request.app[LANES].enter(tenant_id, wanted[0].items[0].resource_id):
        placement = await run(
            request.app[POOL],
            lambda conn: holds.place_many(conn, wanted, tenant_id=tenant_id, by=by, key=(key, body_hash)),
        )
    # After a replay too: the first attempt may have died between its commit and the wake-up.
    await request.app[HINTS].enqueue(placement.holds)
    await after_commit([], placement.reclaimed, None, request.app[BUCKET])
    hold = placement.holds[0]
    headers = {"Location": f"/v1/holds/{hold.id}"}
    return _answer(_document(hold), status=201, replayed=placement.replayed, headers=headers)


@routes.get("/v1/holds/{id}")
@needs("read")
async def get(request: web.Request) -> web.Response:
    """Answer the hold as it is now: past its deadline it is expired, whether or not the expiry ran."""
    tenant_id, id_ = tenant_of(request), body.hold_id(request)
    hold = await run(request.app[POOL], lambda conn: holds.get(conn, id_, tenant_id=tenant_id))
    return _answer(_document(hold))


@routes.post("/v1/holds/{id}/renew")
@needs("holds")
async def renew(request: web.Request) -> web.Response:
    """Move the deadline."""
    tenant_id, id_, by = tenant_of(request), body.hold_id(request), name_of(request)
    asked, body_hash = await body.read(request, RenewBody)
    generation = body.wanted_generation(request, asked.generation)
    renewed: list[Hold] = []

    async def work(conn: Conn) -> Hold:
        hold = await holds.renew(
            conn,
            id_,
            tenant_id=tenant_id,
            ttl_s=asked.ttl_s,
            expires_at=asked.expires_at,
            generation=generation,
            by=by,
        )
        renewed[:] = [hold]
        return hold

    response = await _change(request, f"renew/{id_}", body_hash, work)
    await request.app[HINTS].enqueue(renewed)
    return response


@routes.post("/v1/holds/{id}/confirm")
@needs("holds")
async def confirm(request: web.Request) -> web.Response:
    """Keep the units for good."""
    tenant_id, id_, by = tenant_of(request), body.hold_id(request), name_of(request)
    asked, body_hash = await body.read(request, ConfirmBody)
    generation = body.wanted_generation(request, asked.generation)
    return await _change(
        request,
        f"confirm/{id_}",
        body_hash,
        lambda conn: holds.confirm(conn, id_, tenant_id=tenant_id, generation=generation, by=by),
    )


@routes.post("/v1/holds/{id}/release")
@needs("holds")
async def release(request: web.Request) -> web.Response:
    """Give the units back before the deadline."""
    return await _give_back(request, "release", holds.release)


@routes.post("/v1/holds/{id}/return")
@needs("holds")
async def return_(request: web.Request) -> web.Response:
    """Give a confirmed hold's units back."""
    return await _give_back(request, "return", holds.return_)


async def _give_back(request: web.Request, name: str, verb: Callable[..., Awaitable[Hold]]) -> web.Response:
    tenant_id, id_, by = tenant_of(request), body.hold_id(request), name_of(request)
    asked, body_hash = await body.read(request, GiveBackBody)
    generation = body.wanted_generation(request, asked.generation)
    return await _change(
        request,
        f"{name}/{id_}",
        body_hash,
        lambda conn: verb(conn, id_, tenant_id=tenant_id, generation=generation, by=by, reason=asked.reason),
    )


async def _change(
    request: web.Request, route: str, body_hash: bytes, work: Callable[[Conn], Awaitable[Hold]]
) -> web.Response:
    """Do the work, once per Idempotency-Key if there is one, and answer the hold."""
    tenant_id, key = tenant_of(request), body.idempotency_key(request)

    async def documented(conn: Conn) -> dict[str, Any]:
        return _document(await work(conn))

    async def change(conn: Conn) -> tuple[dict[str, Any], datetime | None]:
        if key is None:
            return await documented(conn), None
        return await idempotency.once(
            conn, documented, tenant_id=tenant_id, route=route, key=key, body_hash=body_hash
        )

    document, replayed_at = await run(request.app[POOL], change)
    if replayed_at is not None:
        document["server_time"] = rfc3339(replayed_at)
    return _answer(document, replayed=replayed_at is not None)


def _document(hold: Hold) -> dict[str, Any]:
    """Say the hold as its row said it; what depends on the clock is filled in by _answer."""
    return {
        "id": str(hold.id),
        "state": hold.state,
        "generation": hold.generation,
        "items": [{"resource_id": i.resource_id, "quantity": i.quantity} for i in hold.items],
        "holder": hold.holder,
        "external_ref": hold.external_ref,
        "metadata": hold.metadata or {},
        "placed_at": rfc3339(hold.placed_at),
        "expires_at": rfc3339(hold.expires_at),
        "expires_in_s": 0.0,
        "renewals": hold.renewals,
        "max_renewals": hold.max_renewals,
        "lifetime_ends_at": rfc3339_or_none(hold.lifetime_ends_at),
        "ended_at": rfc3339_or_none(hold.ended_at),
        "ended_by": hold.ended_by,
        "server_time": rfc3339(hold.read_at),
    }


def _answer(
    document: dict[str, Any],
    *,
    status: int = 200,
    replayed: bool = False,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """Answer the hold as of its server_time, the database's clock: past its deadline nothing is held.

    A replay keeps the state that was answered first: by now the hold may be confirmed or renewed.
    """
    if document["state"] == "held":
        now = parse_rfc3339(document["server_time"])
        left_s = (parse_rfc3339(document["expires_at"]) - now).total_seconds()
        document["expires_in_s"] = max(0.0, left_s)
        if left_s <= 0 and not replayed:
            document["state"] = "expired"
    return web.Response(
        status=status,
        body=json.dumps(document, ensure_ascii=False).encode(),
        headers={
            "Content-Type": "application/json",
            "ETag": f'"g{document["generation"]}"',
            **({"Idempotent-Replayed": "true"} if replayed else {}),
            **(headers or {}),
        },
    )
