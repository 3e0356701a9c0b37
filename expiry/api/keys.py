"""/v1/keys: the platform makes, lists and revokes API keys."""

from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field, TypeAdapter

from expiry import errors, keys, listing
from expiry.api import cursor
from expiry.api.database import run
from expiry.api.documents import REPLAYED
from expiry.api.once import once
from expiry.api.operation import Call, Operations, answer, nothing
from expiry.api.state import KEYS, POOL
from expiry.holds import Conn
from expiry.wire.answers import KeysAnswer, MadeKeyAnswer
from expiry.wire.bodies import KeyBody
from expiry.wire.queries import KeysQuery, NoQuery
from expiry.wire.times import rfc3339, rfc3339_or_none

operations = Operations("keys")

_POSITIONS: TypeAdapter[tuple[datetime, str]] = TypeAdapter(
    tuple[listing.Moment, Annotated[str, Field(pattern="^[0-9a-f]*$")]]
)


@operations.add(
    "POST",
    "/v1/keys",
    scope="platform",
    takes=KeyBody,
    answers=MadeKeyAnswer,
    status=HTTPStatus.CREATED,
    refuses=(errors.OutOfRangeError,),
)
async def create(call: Call, asked: KeyBody) -> web.Response:
    """Make an API key. It is shown this once: only its hash is kept.

    Repeating the request with the same Idempotency-Key answers the same key's record, without the key.
    """
    made: list[str] = []
    scopes = asked.scopes or (["platform"] if asked.tenant_id is None else ["holds", "read", "operate"])

    async def work(conn: Conn) -> dict[str, Any]:
        async with conn.transaction():  # a key that nobody has seen must not be left
            made[:] = [await keys.create(conn, tenant_id=asked.tenant_id, scopes=scopes, name=asked.name)]
            return _document(await keys.get(conn, keys.key_id(made[0])))

    document, replayed_at = await once(call, "keys", work)
    replayed = replayed_at is not None
    return answer(
        {**document, "key": None if replayed else made[0]},
        status=HTTPStatus.CREATED,
        headers=REPLAYED if replayed else None,
    )


@operations.add("GET", "/v1/keys", scope="platform", takes=KeysQuery, answers=KeysAnswer)
async def list_(call: Call, asked: KeysQuery) -> web.Response:
    """List API keys, oldest first, revoked ones too; never the keys themselves."""
    after = keys.FIRST if asked.cursor is None else cursor.read(asked.cursor, _POSITIONS, asked)
    found = await run(
        call.app[POOL],
        lambda conn: keys.list_(conn, tenant_id=asked.tenant_id, after=after, limit=asked.limit + 1),
    )
    page = found[: asked.limit]
    last = (page[-1]["created_at"], page[-1]["id"]) if len(found) > len(page) else None
    return answer(
        {
            "keys": [_document(one) for one in page],
            "next_cursor": None if last is None else cursor.write(last, _POSITIONS, asked),
        }
    )


@operations.add(
    "DELETE",
    "/v1/keys/{id}",
    scope="platform",
    takes=NoQuery,
    answers=None,
    status=HTTPStatus.NO_CONTENT,
    refuses=(errors.KeyNotFoundError,),
)
async def revoke(call: Call, _asked: NoQuery) -> web.Response:
    """Revoke an API key: refused everywhere within seconds, for good. Repeating it is harmless."""
    id_ = call.request.match_info["id"]

    async def work(conn: Conn) -> None:
        await keys.revoke(conn, id_)

    await run(call.app[POOL], work)
    call.app[KEYS].forget(id_)
    return nothing()


def _document(key: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": key["id"],
        "tenant_id": key["tenant_id"],
        "scopes": key["scopes"],
        "name": key["name"],
        "created_at": rfc3339(key["created_at"]),
        "last_used_at": rfc3339_or_none(key["last_used_at"]),
        "revoked_at": rfc3339_or_none(key["revoked_at"]),
    }
