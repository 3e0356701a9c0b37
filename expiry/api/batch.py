"""/v1/holds/batch and /v1/holds/release-batch: many holds in one request, each with its own result."""

import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from aiohttp import web

from expiry import errors, holds, idempotency
from expiry.api.documents import REPLAYED, again, as_of, as_stored, shown
from expiry.api.holds import place_now
from expiry.api.once import hash_of, once
from expiry.api.operation import Call, Operations, answer
from expiry.api.problems import refusal
from expiry.api.state import LANES, QUOTA
from expiry.holds import Conn, Placement
from expiry.wanted import Wanted
from expiry.wire.answers import BatchAnswer
from expiry.wire.bodies import BATCH_MAX, BatchBody, ReleaseBatchBody
from expiry.wire.problems import COME_AGAIN, NotPlacedError

TAKES_S_MAX = 8.0  # of one request, for many a client waits 10; what is left then is told to come again

operations = Operations("batches")


class Done(NamedTuple):
    """What came of one hold."""

    status: HTTPStatus
    hold: dict[str, Any]
    replayed: bool


@operations.add(
    "POST",
    "/v1/holds/batch",
    scope="holds",
    takes=BatchBody,
    answers=BatchAnswer,
    key_required=True,
    refuses=(errors.KeyReusedError,),
)
async def place(call: Call, asked: BatchBody) -> web.Response:
    """Place many holds.

    Atomic: all or none, in one transaction; the hold that was refused has its problem as result, the others
    424 `not_placed`. Otherwise each for itself: repeating the request with the same Idempotency-Key, after a
    lost connection, say, answers what was placed and tries the others again.
    """
    call.app[QUOTA].take(call.principal.key_id, len(asked.holds) - 1, owed=True)
    assert call.key is not None  # noqa: S101 - the operation requires it
    key = call.key
    wanted = [one.wanted() for one in asked.holds]
    body_hash = hash_of(call)
    if asked.atomic:
        return await _all_or_none(call, wanted)
    await _bind_key(call, "batch")

    async def place_one(index: int) -> Done:
        one = [wanted[index]]
        route = _item_route("batch")
        placed = await place_now(call, one, route=route, key=_item_key(key, index), body_hash=body_hash)
        return _placed(placed, 0)

    return await _each(call, len(wanted), place_one)


@operations.add("POST", "/v1/holds/release-batch", scope="holds", takes=ReleaseBatchBody, answers=BatchAnswer)
async def release(call: Call, asked: ReleaseBatchBody) -> web.Response:
    """Release many holds, each for itself. Repeating it is harmless."""
    call.app[QUOTA].take(call.principal.key_id, len(asked.ids) - 1, owed=True)
    tenant_id, by = call.tenant_id, call.by
    await _bind_key(call, "release-batch")

    async def release_one(index: int) -> Done:
        id_ = asked.ids[index]

        async def work(conn: Conn) -> dict[str, Any]:
            return as_stored(await holds.release(conn, id_, tenant_id=tenant_id, by=by, reason=asked.reason))

        key = None if call.key is None else _item_key(call.key, index)
        async with call.app[LANES].change():
            document, replayed_at = await once(call, _item_route("release-batch"), work, key=key)
        return Done(HTTPStatus.OK, as_of(again(document, replayed_at)), replayed_at is not None)

    return await _each(call, len(asked.ids), release_one)


async def _bind_key(call: Call, route: str) -> None:
    """Bind the key, if there is one, to this body before anything is done under it.

    In a transaction of its own: two bodies at the same time would otherwise each do a part, and neither could be
    completed. A repeat of this body goes on, since each item is done once by its own key. Raises
    KeyInProgressError, KeyReusedError.
    """
    if call.key is None:
        return
    tenant_id, body_hash = call.tenant_id, hash_of(call)
    item_route, items = _item_route(route), [_item_key(call.key, i) for i in range(BATCH_MAX)]

    async def work(conn: Conn) -> dict[str, Any]:
        # A repeat may have done items long after the first attempt: they outlive the row that bound the key.
        await idempotency.check_unused(
            conn, items, tenant_id=tenant_id, route=item_route, body_hash=body_hash
        )
        return idempotency.BOUND

    await once(call, route, work)


def _item_route(route: str) -> str:
    """Keep the items apart from batches: one may have the key `k#0` for its own."""
    return f"{route}-item"


def _item_key(key: str, index: int) -> str:
    return f"{key}#{index}"


def _placed(placement: Placement, index: int) -> Done:
    hold = shown(placement.holds[index], replayed=placement.replayed)
    return Done(HTTPStatus.CREATED, hold, placement.replayed)


async def _all_or_none(call: Call, wanted: list[Wanted]) -> web.Response:
    """Place all of them; what refuses one of them is its result, what refuses them all is raised."""
    try:
        placement = await place_now(call, wanted, route="batch", body_hash=hash_of(call))
    except (*COME_AGAIN, errors.KeyReusedError):
        raise  # it is not about one of them
    except errors.ExpiryError as error:
        index = 0 if len(wanted) == 1 else error.facts.pop("index", None)
        if not isinstance(index, int):  # nor is this
            raise
        refused: list[Done | errors.ExpiryError] = [NotPlacedError() for _ in wanted]
        refused[index] = error
        return _answer(call, refused)
    return _answer(call, [_placed(placement, i) for i in range(len(wanted))])


async def _each(call: Call, count: int, work: Callable[[int], Awaitable[Done]]) -> web.Response:
    """Do them one after the other, on one connection at a time, as far as time allows."""
    results: list[Done | errors.ExpiryError] = []
    until_s = time.monotonic() + TAKES_S_MAX
    for index in range(count):
        try:
            if time.monotonic() > until_s:
                raise errors.BusyError("There was no time left for this one; send the same request again.")
            results.append(await work(index))
        except errors.ExpiryError as error:
            results.append(error)
    return _answer(call, results)


def _answer(call: Call, results: Sequence[Done | errors.ExpiryError]) -> web.Response:
    done = [r for r in results if isinstance(r, Done)]
    replayed = bool(done) and all(r.replayed for r in done)
    path = call.request.rel_url.raw_path
    return answer({"results": [_result(r, path) for r in results]}, headers=REPLAYED if replayed else None)


def _result(result: Done | errors.ExpiryError, path: str) -> dict[str, Any]:
    if isinstance(result, Done):
        return {"status": result.status.value, "hold": result.hold}
    problem = refusal(result, path)
    return {"status": problem["status"], "problem": problem}
