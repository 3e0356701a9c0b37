"""What happened to one hold: its events, its failed attempts, how late its end was."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from expiry import holds
from expiry.holds import Conn, Hold
from expiry.outbox import data_of

ENTRIES_MAX = 1000  # the latest; a hold that was renewed more often has a shorter memory
QUEUE = "worker"  # in ended_by: a wake-up from the queue ended the hold


@dataclass(frozen=True, slots=True)
class Entry:
    """One step: `what` is the verb's past tense, `woken` or `failed`."""

    at: datetime
    what: str
    generation: int
    by: str | None
    detail: dict[str, Any]


# Index: outbox_once.
HISTORY = """
SELECT o.type, o.generation, o.occurred_at, o.data::text AS data FROM outbox o
 WHERE o.hold_id = $1 AND o.tenant_id || '' = $2
 ORDER BY o.generation DESC, o.occurred_at DESC LIMIT $3
"""
# Index: dead_letters_by_hold.
FAILURES = """
SELECT d.generation, d.reason, d.attempts, d.first_error, d.last_error, d.first_failed_at, d.last_failed_at, d.state
  FROM dead_letters d WHERE d.hold_id = $1 ORDER BY d.id DESC LIMIT $2
"""


async def read(conn: Conn, hold_id: UUID, *, tenant_id: str) -> tuple[Hold, list[Entry]]:
    """Answer the hold and its steps, oldest first, at most ENTRIES_MAX. Raises HoldNotFoundError."""
    hold = await holds.get(conn, hold_id, tenant_id=tenant_id)
    entries: list[Entry] = []
    for row in await conn.fetch(HISTORY, hold_id, tenant_id, ENTRIES_MAX):
        entries += _of_event(row)
    for row in await conn.fetch(FAILURES, hold_id, ENTRIES_MAX):
        entries += _of_failures(row)
    return hold, sorted(entries, key=lambda e: (e.at, e.generation))[-ENTRIES_MAX:]


def _of_event(row: asyncpg.Record) -> list[Entry]:
    """Read an event; an expiry that the queue brought about was preceded by its wake-up."""
    data = data_of(row["data"])
    what, at, generation, by = (
        row["type"].removeprefix("hold."),
        row["occurred_at"],
        row["generation"],
        data["by"],
    )
    detail = {name: data[name] for name in ("expires_at", "reason") if data.get(name) is not None}
    if what != "expired":
        return [Entry(at, what, generation, by, detail)]
    lag = at - datetime.fromisoformat(data["expires_at"])
    detail["lag_ms"] = round(lag.total_seconds() * 1000, 3)
    woken = [Entry(at, "woken", generation, by, {})] if by == QUEUE else []
    return [*woken, Entry(at, what, generation, by, detail)]


def _of_failures(row: asyncpg.Record) -> list[Entry]:
    """Read what is kept of failed attempts: the first and the last."""
    first = Entry(
        row["first_failed_at"], "failed", row["generation"], None, {"attempt": 1, "error": row["first_error"]}
    )
    if row["attempts"] == 1:
        first.detail.update(reason=row["reason"], dead_letter=row["state"])
        return [first]
    detail = {
        "attempt": row["attempts"],
        "error": row["last_error"],
        "reason": row["reason"],
        "dead_letter": row["state"],
    }
    return [first, Entry(row["last_failed_at"], "failed", row["generation"], None, detail)]
