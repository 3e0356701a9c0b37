"""Holds as documents, and as answers."""

from collections.abc import Mapping
from datetime import datetime
from http import HTTPStatus
from typing import Any

from aiohttp import web

from expiry.api.operation import answer
from expiry.holds import Hold
from expiry.wire.times import parse_rfc3339, rfc3339, rfc3339_or_none

REPLAYED = {"Idempotent-Replayed": "true"}


def as_stored(hold: Hold) -> dict[str, Any]:
    """Say the hold as its row said it; what depends on the clock is filled in by `as_of`."""
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


def as_of(document: dict[str, Any], *, replayed: bool = False) -> dict[str, Any]:
    """Show the hold as of its server_time, the database's clock: past its deadline nothing is held.

    A replay keeps the state that was answered first: by now the hold may be confirmed or renewed.
    """
    if document["state"] == "held":
        now = parse_rfc3339(document["server_time"])
        left_s = (parse_rfc3339(document["expires_at"]) - now).total_seconds()
        document["expires_in_s"] = max(0.0, left_s)
        if left_s <= 0 and not replayed:
            document["state"] = "expired"
    return document


def again(document: dict[str, Any], replayed_at: datetime | None) -> dict[str, Any]:
    """Set the clock of a document that is answered again; None: it is answered for the first time."""
    return document if replayed_at is None else document | {"server_time": rfc3339(replayed_at)}


def shown(hold: Hold, *, replayed: bool = False) -> dict[str, Any]:
    """Show a hold that was just read."""
    return as_of(as_stored(hold), replayed=replayed)


def answer_hold(
    document: dict[str, Any],
    *,
    status: int = HTTPStatus.OK,
    replayed: bool = False,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """Answer a hold with its ETag."""
    tag = {"ETag": f'"g{document["generation"]}"'}
    return answer(
        as_of(document, replayed=replayed),
        status=status,
        headers={**tag, **(REPLAYED if replayed else {}), **(headers or {})},
    )
