"""Every decision with its whole reading and the law's state before it: what happened, and to be run again.

A row is enough to repeat its decision: restore the law from `snapshot`, step `reading`. Kept in PostgreSQL,
capped by rows and by age.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from governor.law import Decision
from governor.lease import Connection
from governor.reading import Reading

PRUNE_MAX = 1000  # rows that one statement deletes

GOVERNOR_JOURNAL_DDL = """
-- Decisions of the controller, a row each interval, oldest ones deleted.
CREATE TABLE IF NOT EXISTS governor_journal (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name          text        NOT NULL,
    decided_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    holder        text        NOT NULL,
    epoch         bigint      NOT NULL,
    -- enforce or observe
    mode          text        NOT NULL,
    -- of the law's settings: other settings have another history
    settings_hash text        NOT NULL,
    -- what the law was told, what it remembered before, what it decided: as text, to keep every digit
    reading       json        NOT NULL,
    snapshot      json        NOT NULL,
    decision      json        NOT NULL,
    -- a candidate's decision on the same reading, never enforced; null without one
    shadow        json,
    -- orders of operators in force
    orders        json        NOT NULL,
    -- probe -> value as measured, where it tells, and what is the matter with probes
    notes         json        NOT NULL
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One decision, with all that it was made from."""

    holder: str
    epoch: int
    mode: str
    settings_hash: str
    reading: dict[str, Any]
    snapshot: dict[str, Any]
    decision: dict[str, Any]
    shadow: dict[str, Any] | None
    orders: list[dict[str, Any]]
    notes: dict[str, Any]
    id: int = 0
    decided_at: datetime | None = None

    def as_line(self) -> str:
        """Say it as one line of JSON."""
        return json.dumps(asdict(self), default=_plain, separators=(",", ":"))

    @classmethod
    def of_line(cls, line: str) -> Entry:
        """Read one line. Raises ValueError for what is none."""
        try:
            said = json.loads(line)
            at = said.pop("decided_at", None)
            known = {name: said[name] for name in said if name in _NAMES}
            return cls(**known, decided_at=None if at is None else datetime.fromisoformat(at))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no line of a journal: {error}") from error

    @property
    def decided(self) -> Decision:
        """The decision."""
        return Decision(**self.decision)

    @property
    def read(self) -> Reading:
        """The reading, exactly as the law was told it."""
        return Reading(**self.reading)


_NAMES = frozenset(each.name for each in fields(Entry))


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def as_reading(reading: Reading) -> dict[str, Any]:
    """Say a reading as JSON has it."""
    return {**asdict_shallow(reading), "saturation": dict(reading.saturation)}


def as_decision(decision: Decision) -> dict[str, Any]:
    """Say a decision as JSON has it."""
    return asdict_shallow(decision)


def asdict_shallow(value: Reading | Decision) -> dict[str, Any]:
    """Return the fields by name."""
    return {each.name: getattr(value, each.name) for each in fields(value)}


WRITE = """
INSERT INTO governor_journal (name, holder, epoch, mode, settings_hash, reading, snapshot, decision, shadow,
                              orders, notes)
VALUES ($1, $2, $3, $4, $5, $6::text::json, $7::text::json, $8::text::json, $9::text::json,
        $10::text::json, $11::text::json)
RETURNING id
"""


async def write(conn: Connection, name: str, entry: Entry) -> int:
    """Keep a decision; returns its id."""
    shadow = None if entry.shadow is None else json.dumps(entry.shadow)
    documents = [json.dumps(each) for each in (entry.reading, entry.snapshot, entry.decision)]
    id_: int = await conn.fetchval(
        WRITE,
        *(name, entry.holder, entry.epoch, entry.mode, entry.settings_hash, *documents, shadow),
        *(json.dumps(entry.orders), json.dumps(entry.notes)),
    )
    return id_


# Index: the primary key, walked from the oldest; $1 rows and $2 seconds are kept, $3 at most deleted. Ids are
# as good as consecutive, so the newest less the rows says which are too many.
PRUNE = """
WITH gone AS (
    DELETE FROM governor_journal WHERE id IN (
        SELECT j.id FROM (SELECT id, decided_at FROM governor_journal ORDER BY id LIMIT $3) j
         WHERE j.id <= (SELECT max(id) FROM governor_journal) - $1::bigint
            OR j.decided_at < clock_timestamp() - $2::double precision * interval '1 second')
    RETURNING 1
)
SELECT count(*) FROM gone
"""


async def prune(conn: Connection, *, rows_max: int, age_s_max: float) -> int:
    """Delete what is too old or too much, at most PRUNE_MAX rows; returns how many."""
    gone: int = await conn.fetchval(PRUNE, rows_max, age_s_max, PRUNE_MAX)
    return gone


_ENTRY = """id, decided_at, holder, epoch, mode, settings_hash, reading::text, snapshot::text,
       decision::text, shadow::text, orders::text, notes::text"""
# Index: the primary key, from the newest.
TAIL = f"""
SELECT {_ENTRY} FROM governor_journal
 WHERE name = $1 AND id < $2 ORDER BY id DESC LIMIT $3
"""
# Index: the primary key, from the oldest.
PAGE = f"""
SELECT {_ENTRY} FROM governor_journal
 WHERE name = $1 AND id > $2 ORDER BY id LIMIT $3
"""
_END = 2**63 - 1


async def tail(conn: Connection, name: str, *, limit: int, before: int = _END) -> list[Entry]:
    """Return the last decisions, newest first."""
    return [_entry(row) for row in await conn.fetch(TAIL, name, before, limit)]


async def page(conn: Connection, name: str, *, after: int, limit: int) -> list[Entry]:
    """Return decisions after this one, oldest first; page on with the last one's id."""
    return [_entry(row) for row in await conn.fetch(PAGE, name, after, limit)]


# Index: the primary key, from the newest.
POSITION = """
SELECT coalesce(min(j.id) - 1, 0) FROM (
    SELECT id FROM governor_journal WHERE name = $1 ORDER BY id DESC LIMIT $2) j
"""


async def position(conn: Connection, name: str, *, back: int) -> int:
    """Return after which id the newest `back` decisions are."""
    found: int = await conn.fetchval(POSITION, name, back)
    return found


LAST = f"""
SELECT {_ENTRY}, extract(epoch FROM clock_timestamp() - decided_at)::double precision AS age_s
  FROM governor_journal WHERE name = $1 ORDER BY id DESC LIMIT 1
"""


async def last(conn: Connection, name: str) -> tuple[Entry, float] | None:
    """Return the last decision and its age, s, on the database's clock; None where there is none."""
    row = await conn.fetchrow(LAST, name)
    return None if row is None else (_entry(row), row["age_s"])


def _entry(row: Mapping[str, Any]) -> Entry:
    found = {name: row[name] for name in _NAMES}
    for name in ("reading", "snapshot", "decision", "shadow", "orders", "notes"):
        found[name] = None if found[name] is None else json.loads(found[name])
    return Entry(**found)
