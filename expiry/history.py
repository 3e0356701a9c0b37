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
    async with conn.transaction(isolation="repeatable_read", readonly=True):  # the hold as its steps left it
        hold = await holds.get(conn, hold_id, tenant_id=tenant_id)
        events = await conn.fetch(HISTORY, hold_id, tenant_id, ENTRIES_MAX)
        failures = await conn.fetch(FAILURES, hold_id, ENTRIES_MAX)
    entries = [entry for row in events for entry in _of_event(row)]
    entries += [entry for row in failures for entry in _of_failures(row)]
    return hold, sorted(entries, key=lambda e: (e.at, e.generation))[-ENTRIES_MAX:]


def _of_event(row: asyncpg.Record) -> list[Entry]:
    """Read an event; an expiry that the queue brought about was preceded by its wake-up."""
    data = data_of(row["data"])
    what, at = row["type"].removeprefix("hold."), row["occurred_at"]
    generation, by = row["generation"], data["by"]
    detail = {name: data[name] for name in ("expires_at", "reason") if data.get(name) is not None}
    if what != "expired":
        return [Entry(at, what, generation, by, detail)]
    lag = at - datetime.fromisoformat(data["expires_at"])
    detail["lag_ms"] = round(lag.total_seconds() * 1000, 3)
    woken = [Entry(at, "woken", generation, by, {})] if by == QUEUE else []
    return [*woken, Entry(at, what, generation, by, detail)]


def _of_failures(row: asyncpg.Record) -> list[Entry]:
    """Read what is kept of failed attempts: the first and the last."""

    def failed(at: datetime, attempt: int, error: str, **more: str) -> Entry:
        return Entry(at, "failed", row["generation"], None, {"attempt": attempt, "error": error, **more})

    known = {"reason": row["reason"], "dead_letter": row["state"]}
    last = failed(row["last_failed_at"], row["attempts"], row["last_error"], **known)
    return [last] if row["attempts"] == 1 else [failed(row["first_failed_at"], 1, row["first_error"]), last]
