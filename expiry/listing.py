"""Lists of holds, in pages that are served by an index and look at a bounded number of rows.

A page continues after the last row it looked at (keyset), so that what is placed or ended meanwhile shifts
nothing. Where filters beside the indexed one leave few rows, a page may be short, or empty, and not the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, NamedTuple
from uuid import UUID

from pydantic import AwareDatetime, Field

from expiry.errors import OutOfRangeError
from expiry.holds import Conn, Hold, columns, from_row

SCAN_MAX = 1000  # rows that one page looks at for those it wants
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# In a cursor, which anybody can make up; with an offset a time may be later than any that UTC can say.
Moment = Annotated[AwareDatetime, Field(ge=EPOCH, le=datetime.max.replace(tzinfo=UTC))]


class Position(NamedTuple):
    """Where a page ended: deadline and id of the last hold that was looked at."""

    expires_at: Moment
    id: UUID


FIRST = Position(EPOCH, UUID(int=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which holds; None: whatever. `state` is the one shown, by which nothing is held past its deadline.

    Without an `external_ref` only holds that have not ended are found.
    """

    state: str | None = None
    resource_id: str | None = None
    holder: str | None = None
    external_ref: str | None = None
    overdue: bool | None = None  # past the deadline and not ended yet
    expires_before: datetime | None = None  # not ended yet

    def matches(self, hold: Hold) -> bool:
        """Say whether the hold, as of its `read_at`, is one of these."""
        overdue = hold.state == "held" and hold.expires_at <= hold.read_at
        state = hold.state if self.overdue and self.state == "held" else hold.shown_state
        return (
            self.state in (None, state)
            and self.holder in (None, hold.holder)
            and self.external_ref in (None, hold.external_ref)
            and (self.resource_id is None or any(i.resource_id == self.resource_id for i in hold.items))
            and (self.overdue is None or (hold.state == "held" and overdue == self.overdue))
            and (
                self.expires_before is None
                or (hold.state == "held" and hold.expires_at < self.expires_before)
            )
        )

    @property
    def asks_for_ended(self) -> bool:
        """Whether it names a state that only an ended hold can have; most indexes know no such holds."""
        return self.state not in (None, "held") and not (self.state == "expired" and self.overdue)


@dataclass(frozen=True, slots=True)
class Page:
    """Holds in order, and where the next page starts, if there is one."""

    holds: Sequence[Hold]
    next: Position | None


# Index: holds_by_external_ref.
BY_REFERENCE = f"""
SELECT {columns("h.")} FROM holds h
 WHERE h.tenant_id = $1 AND h.external_ref = $2 AND h.id > $3 ORDER BY h.id LIMIT $4
"""
# Index: holds_by_holder.
BY_HOLDER = f"""
SELECT {columns("h.")} FROM holds h
 WHERE h.state = 'held' AND h.holder = $2 AND h.tenant_id = $1 AND h.id > $3 ORDER BY h.id LIMIT $4
"""
# By deadline, from the cursor or (held and not past it) from now, until now (overdue) or some time.
_RANGE = """(h.expires_at, h.id) > ($2, $3)
   AND h.expires_at > CASE WHEN $4 THEN '-infinity' ELSE statement_timestamp() END
   AND h.expires_at <= CASE WHEN $5 THEN 'infinity' ELSE statement_timestamp() END
   AND h.expires_at < coalesce($6, 'infinity'::timestamptz)"""
# Index: holds_by_tenant.
BY_DEADLINE = f"""
SELECT {columns("h.")} FROM holds h
 WHERE CASE WHEN h.state = 'held' THEN true END AND h.tenant_id = $1 AND {_RANGE}
 ORDER BY h.expires_at, h.id LIMIT $7
"""
# Indexes: holds_by_resource, and holds_by_further_resource for holds that have it as a later item; of these as
# many are looked at as there are.
BY_RESOURCE = f"""
SELECT {columns("h.")} FROM (
    (SELECT * FROM holds h
      WHERE h.state = 'held' AND h.tenant_id = $1 AND h.resource_ids[1] = $8 AND {_RANGE}
      ORDER BY h.expires_at, h.id LIMIT $7)
    UNION ALL
    (SELECT * FROM holds h
      WHERE CASE WHEN h.state = 'held' THEN cardinality(h.resource_ids) END > 1
        AND h.resource_ids @> ARRAY[$8] AND h.resource_ids[1] <> $8 AND h.tenant_id || '' = $1
        AND {_RANGE.replace("h.expires_at", "h.expires_at + interval '0 s'")}
      ORDER BY h.expires_at, h.id LIMIT $7)) h
 ORDER BY h.expires_at, h.id LIMIT $7
"""


async def read(
    conn: Conn, which: Filter, *, tenant_id: str, after: Position = FIRST, limit: int = 50
) -> Page:
    """Answer holds that match, after a place. Raises OutOfRangeError for ended ones without external_ref."""
    # Only lists by reference or holder have filters that their index does not serve: those look at more rows.
    by_id = which.external_ref is not None or which.holder is not None
    alone = which in (Filter(external_ref=which.external_ref), Filter(holder=which.holder))
    scan = limit + 1 if alone or not by_id else max(limit + 1, SCAN_MAX)
    if which.external_ref is not None:
        rows = await conn.fetch(BY_REFERENCE, tenant_id, which.external_ref, after.id, scan)
    elif which.asks_for_ended:
        raise OutOfRangeError(
            "no index serves ended holds without external_ref: add it, ask for state=held or overdue=true, or "
            "read the events"
        )
    elif which.holder is not None:
        rows = await conn.fetch(BY_HOLDER, tenant_id, which.holder, after.id, scan)
    else:
        past = which.overdue is True or (which.overdue is None and which.state != "held")
        range_ = (*after, past, which.overdue is not True, which.expires_before, scan)
        if which.resource_id is None:
            rows = await conn.fetch(BY_DEADLINE, tenant_id, *range_)
        else:
            rows = await conn.fetch(BY_RESOURCE, tenant_id, *range_, which.resource_id)
    return _page([from_row(row) for row in rows], which, limit, more=len(rows) == scan)


def _page(seen: Sequence[Hold], which: Filter, limit: int, *, more: bool) -> Page:
    """Take what matches of the rows that were looked at; `more`: there may be others after them."""
    found: list[Hold] = []
    for number, hold in enumerate(seen, start=1):
        if which.matches(hold):
            found.append(hold)
        if len(found) == limit and (more or number < len(seen)):
            return Page(found, Position(hold.expires_at, hold.id))
    return Page(found, Position(seen[-1].expires_at, seen[-1].id) if more else None)
