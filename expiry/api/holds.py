"""/v1/holds: place, get, list, history, renew, confirm, release, return."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import structlog
from aiohttp import web
from pydantic import TypeAdapter

from expiry import errors, history, holds, listing
from expiry.api import body, cursor
from expiry.api.database import run
from expiry.api.documents import again, answer_hold, as_stored, shown
from expiry.api.once import once
from expiry.api.operation import Call, Operations, answer
from expiry.api.state import BUCKET, HINTS, LANES, PLACER, POOL, WAKEUPS
from expiry.expire import Wake
from expiry.group import ask
from expiry.holds import Conn, Hold, Placement
from expiry.wakeups import REDIS_AWAY, charge
from expiry.wanted import Wanted
from expiry.wire.answers import HistoryAnswer, HoldAnswer, HoldsAnswer
from expiry.wire.bodies import ConfirmBody, PlaceBody, ReleaseBody, RenewBody, ReturnBody
from expiry.wire.problems import InvalidError
from expiry.wire.queries import HoldsQuery, NoQuery
from expiry.wire.times import rfc3339, rfc3339_or_none

QUEUE_S_MAX = 0.5  # wait for Redis

operations = Operations("holds")
log = structlog.get_logger()

_POSITIONS = TypeAdapter(listing.Position)
_VERB_REFUSES = (
    errors.HoldNotFoundError,
    errors.AlreadyEndedError,
    errors.GenerationMismatchError,
)


@operations.add(
    "POST",
    "/v1/holds",
    scope="holds",
    takes=PlaceBody,
    answers=HoldAnswer,
    status=HTTPStatus.CREATED,
    key_required=True,
    refuses=(
        errors.InsufficientCapacityError,
        errors.OutOfRangeError,
        errors.HoldNotFoundError,
        errors.AlreadyEndedError,
    ),
)
async def place(call: Call, asked: PlaceBody) -> web.Response:
    """Place a hold: take units out of sale until the deadline.

    All items or none. Overdue holds that stand in the way are expired first. The same request with the same
    Idempotency-Key answers the first hold again and places nothing.
    """
    placement = await place_now(call, [asked.wanted()])
    hold = placement.holds[0]
    return answer_hold(
        as_stored(hold),
        status=HTTPStatus.CREATED,
        replayed=placement.replayed,
        headers={"Location": f"/v1/holds/{hold.id}"},
    )


async def place_now(
    call: Call,
    wanted: list[Wanted],
    *,
    route: str = "place",
    key: str | None = None,
    body_hash: bytes | None = None,
) -> Placement:
    """Place holds, all or none, in one statement, then their wake-ups."""
    tenant_id, by = call.tenant_id, call.by
    if len(wanted) == 1 and (name := key or call.key):
        one = ask(wanted[0], tenant_id=tenant_id, by=by, route=route, key=name, body_hash=body_hash)
        if one is not None and (hold := await call.app[PLACER].place(one)):
            return Placement([hold])

    async def work(conn: Conn) -> Placement:
        return await holds.place_many(
            conn, wanted, tenant_id=tenant_id, by=by, route=route, key=key or call.key, body_hash=body_hash
        )

    async with call.app[LANES].enter(tenant_id, wanted[0].items[0].resource_id):
        placement = await run(call.app[POOL], work)
    # After a replay too: the first attempt may have died between its commit and the wake-up.
    await call.app[HINTS].enqueue(placement.holds)
    bucket = call.app[BUCKET]
    if placement.reclaimed and bucket is not None:
        await charge(bucket, placement.reclaimed)
    return placement


@operations.add("GET", "/v1/holds", scope="read", takes=HoldsQuery, answers=HoldsAnswer)
async def list_(call: Call, asked: HoldsQuery) -> web.Response:
    """List holds, in pages.

    With `external_ref` in any state, oldest first. Without it those that have not ended: the earliest deadline
    first, or those of a `holder`, oldest first; for ended ones no index serves (422): read the events. Every
    filter narrows further. A page may be short and not the last: follow `next_cursor` until it is null.
    """
    tenant_id = call.tenant_id
    which = listing.Filter(**asked.model_dump(exclude={"limit", "cursor"}))
    after = listing.FIRST if asked.cursor is None else cursor.read(asked.cursor, _POSITIONS, asked)
    try:
        page = await run(
            call.app[POOL],
            lambda conn: listing.read(conn, which, tenant_id=tenant_id, after=after, limit=asked.limit),
        )
    except errors.OutOfRangeError as error:
        raise InvalidError(errors=[{"pointer": "?state", "detail": str(error)}]) from None
    return answer(
        {
            "holds": [shown(hold) for hold in page.holds],
            "next_cursor": None if page.next is None else cursor.write(page.next, _POSITIONS, asked),
        }
    )


@operations.add(
    "GET",
    "/v1/holds/{id}",
    scope="read",
    takes=NoQuery,
    answers=HoldAnswer,
    refuses=(errors.HoldNotFoundError,),
)
async def get(call: Call, _asked: NoQuery) -> web.Response:
    """Get a hold as it is now.

    Past its deadline it is shown as expired, whether or not the expiry ran.
    """
    tenant_id, id_ = call.tenant_id, body.hold_id(call.request)
    hold = await run(call.app[POOL], lambda conn: holds.get(conn, id_, tenant_id=tenant_id))
    return answer_hold(as_stored(hold))


@operations.add(
    "GET",
    "/v1/holds/{id}/history",
    scope="read",
    takes=NoQuery,
    answers=HistoryAnswer,
    refuses=(errors.HoldNotFoundError,),
)
async def get_history(call: Call, _asked: NoQuery) -> web.Response:
    """Get what happened to a hold, and when its next wake-up is due.

    Placed, renewed, woken by the queue, failed attempts, its end and how late that was; as far back as events
    are kept.
    """
    tenant_id, id_ = call.tenant_id, body.hold_id(call.request)
    hold, entries = await run(call.app[POOL], lambda conn: history.read(conn, id_, tenant_id=tenant_id))
    queued, due_at = await _wakeup(call, hold)
    return answer(
        {
            "hold": shown(hold),
            "history": [
                {
                    "at": rfc3339(entry.at),
                    "what": entry.what,
                    "generation": entry.generation,
                    "by": entry.by,
                    "detail": entry.detail,
                }
                for entry in entries
            ],
            "wakeup": {"queued": queued, "due_at": rfc3339_or_none(due_at)},
        }
    )


async def _wakeup(call: Call, hold: Hold) -> tuple[bool | None, datetime | None]:
    """Look for the hold's wake-up; None without a queue, or when it does not answer."""
    wakeups = call.app[WAKEUPS]
    if wakeups is None:
        return None, None
    try:
        async with asyncio.timeout(QUEUE_S_MAX):
            due_ms = await wakeups.due_ms(Wake(hold.id, hold.generation))
    except REDIS_AWAY as error:
        log.debug("history.queue_unknown", reason=repr(error))
        return None, None
    return due_ms is not None, None if due_ms is None else datetime.fromtimestamp(due_ms / 1000, UTC)


@operations.add(
    "POST",
    "/v1/holds/{id}/renew",
    scope="holds",
    takes=RenewBody,
    answers=HoldAnswer,
    conditional=True,
    refuses=(*_VERB_REFUSES, errors.HoldExpiredError, errors.LimitReachedError, errors.OutOfRangeError),
)
async def renew(call: Call, asked: RenewBody) -> web.Response:
    """Renew a hold: move its deadline, counted from now. Its generation goes up by one."""
    renewed: list[Hold] = []

    async def work(conn: Conn, **given: Any) -> Hold:  # noqa: ANN401 - tenant, generation, who
        hold = await holds.renew(conn, ttl_s=asked.ttl_s, expires_at=asked.expires_at, **given)
        renewed[:] = [hold]
        return hold

    response = await _change(call, "renew", asked.generation, work)
    await call.app[HINTS].enqueue(renewed)
    return response


@operations.add(
    "POST",
    "/v1/holds/{id}/confirm",
    scope="holds",
    takes=ConfirmBody,
    answers=HoldAnswer,
    conditional=True,
    refuses=(*_VERB_REFUSES, errors.HoldExpiredError),
)
async def confirm(call: Call, asked: ConfirmBody) -> web.Response:
    """Confirm a hold: keep its units for good, as when the order is paid. Repeating it is harmless."""
    return await _change(call, "confirm", asked.generation, holds.confirm)


@operations.add(
    "POST",
    "/v1/holds/{id}/release",
    scope="holds",
    takes=ReleaseBody,
    answers=HoldAnswer,
    conditional=True,
    refuses=_VERB_REFUSES,
)
async def release(call: Call, asked: ReleaseBody) -> web.Response:
    """Release a hold: give its units back before the deadline. Repeating it is harmless."""
    return await _change(call, "release", asked.generation, holds.release, reason=asked.reason)


@operations.add(
    "POST",
    "/v1/holds/{id}/return",
    scope="holds",
    takes=ReturnBody,
    answers=HoldAnswer,
    conditional=True,
    refuses=(*_VERB_REFUSES, errors.NotConfirmedError),
)
async def return_(call: Call, asked: ReturnBody) -> web.Response:
    """Return a confirmed hold: its units come back, after a refund, say. Repeating it is harmless."""
    return await _change(call, "return", asked.generation, holds.return_, reason=asked.reason)


async def _change(
    call: Call,
    verb: str,
    in_body: int | None,
    work: Callable[..., Awaitable[Hold]],
    **given: str | None,
) -> web.Response:
    """Do the work, once per Idempotency-Key if there is one, and answer the hold."""
    id_, generation = body.hold_id(call.request), body.wanted_generation(call.request, in_body)
    tenant_id, by = call.tenant_id, call.by

    async def change(conn: Conn) -> dict[str, Any]:
        return as_stored(
            await work(conn, hold_id=id_, tenant_id=tenant_id, generation=generation, by=by, **given)
        )

    async with call.app[LANES].change():
        document, replayed_at = await once(call, f"{verb}/{id_}", change, condition=generation)
    return answer_hold(again(document, replayed_at), replayed=replayed_at is not None)
