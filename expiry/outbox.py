"""The event feed: what happened to a tenant's holds, in an order that skips nothing.

A transaction that began earlier may commit later, so the feed ends below the oldest one that still runs
(expiry_feed_end in schema.sql); what is read is final. A page costs as many rows as it looks at.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, NamedTuple
from uuid import UUID

from pydantic import Field

from expiry.holds import Conn
from expiry.wire.times import rfc3339

SCAN_MAX = 5000  # rows that one page looks at for those it wants
# After the generation, so that a hold's events count upwards: its end comes after its renewals.
_AFTER = {"hold.placed": 0, "hold.renewed": 0, "hold.returned": 2}


Number = Annotated[int, Field(ge=0, lt=2**63)]


class Position(NamedTuple):
    """A position in the log: epoch of the server, transaction, and number."""

    epoch: Number
    xid: Number
    id: Number


OLDEST = Position(0, 0, 0)  # before the oldest event that is kept


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `key` is its name however often it is read."""

    key: str
    type: str
    hold_id: UUID
    generation: int
    occurred_at: datetime
    data: dict[str, Any]

    @property
    def sequence(self) -> int:
        """Answer a number that grows with each event of the hold."""
        return self.generation + _AFTER.get(self.type, 1)


@dataclass(frozen=True, slots=True)
class Page:
    """Events in order, and where to go on. `expired`: events after the place that was asked for are gone."""

    events: Sequence[Event]
    next: Position
    more: bool
    expired: bool
    read_at: datetime


FEED = """
SELECT epoch, xid::text AS xid, id, key, type, hold_id, generation, occurred_at, data::text AS data
  FROM expiry_feed($1, $2, $3::text::xid8, $4, $5, $6, $7, $8)
"""


async def read(
    conn: Conn,
    *,
    tenant_id: str,
    after: Position = OLDEST,
    type_: str | None = None,
    hold_id: UUID | None = None,
    limit: int = 100,
) -> Page:
    """Answer the events after a place, at most `limit`, of one type or one hold if asked."""
    scan = limit if type_ is None else max(limit, SCAN_MAX)
    *rows, last = await conn.fetch(
        FEED, tenant_id, after.epoch, str(after.xid), after.id, type_, hold_id, limit, scan
    )
    expired = last["type"] == "expired"
    return Page(
        events=[
            Event(r["key"], r["type"], r["hold_id"], r["generation"], r["occurred_at"], data_of(r["data"]))
            for r in rows
        ],
        next=after if expired else Position(last["epoch"], int(last["xid"]), last["id"]),
        more=last["type"] == "more",
        expired=expired,
        read_at=last["occurred_at"],
    )


def data_of(text: str) -> dict[str, Any]:
    """Say an event's data as everywhere on the wire: items, and times in UTC whatever the writer's session had."""
    data: dict[str, Any] = json.loads(text)
    if "resource_ids" in data:
        items = zip(data.pop("resource_ids"), data.pop("quantities"), strict=True)
        data = {"items": [{"resource_id": r, "quantity": q} for r, q in items]} | data
    if "expires_at" in data:
        data["expires_at"] = rfc3339(datetime.fromisoformat(data["expires_at"]))
    return data


END = """
SELECT p.epoch, p.xid::text AS xid, p.id
  FROM expiry_feed_end() e, expiry_feed_place($1, e.epoch, e.xid, 0, '0', 0) p
"""


async def end(conn: Conn, *, tenant_id: str) -> Position:
    """Answer where a tenant's feed ends now; what comes later is read after it."""
    row = await conn.fetchrow(END, tenant_id)
    assert row is not None  # noqa: S101 - functions with OUT parameters answer one row
    return Position(row["epoch"], int(row["xid"]), row["id"])
