"""Work that fails by its own fault: counted, backed off, kept as a dead letter, replayed by a person."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import structlog
from prometheus_client import Counter

from expiry.errors import ExpiryError, NotFoundError
from expiry.holds import Conn
from expiry.settings import Settings

WAIT_S_MAX = 300  # between two attempts of one row
LIST_MAX = 200

# A hold (alias h) that worker and sweep may end once it is due: neither backed off, nor given up though its row
# refuses to say so. Indexes: holds_due, dead_letters_unresolved.
IN_REACH = """h.state = 'held' AND h.next_attempt_at IS NULL
   AND NOT EXISTS (SELECT FROM dead_letters d
                    WHERE d.hold_id = h.id AND d.kind = 'expire' AND d.state = 'open')"""

# SQLSTATE classes of errors that lie in the row itself: data exception, integrity constraint, PL/pgSQL.
_ROW_ERRORS = frozenset({"22", "23", "P0"})

DEAD = Counter("expiry_dead_letters", "Holds given up after too many failures of their own.")

log = structlog.get_logger()


class Failure(NamedTuple):
    """What was noted: attempts so far, the wait before the next, whether it was the last."""

    attempts: int
    wait_s: float
    dead: bool
    at_ms: float


# The row keeps the attempts, so that they survive Redis and any worker; it leaves the head of the due scan.
RECORD_FAILURE = """
WITH noted AS (
    UPDATE holds h
       SET attempts = h.attempts + 1,
           next_attempt_at = CASE WHEN h.attempts + 1 >= $4 THEN 'infinity'::timestamptz
               ELSE clock_timestamp() + least($5 * 2 ^ h.attempts, $6) * $7 * interval '1 second' END
     WHERE h.id = $1 AND h.generation = $2 AND h.state = 'held'
    RETURNING h.tenant_id, h.attempts
)
INSERT INTO dead_letters AS d (tenant_id, kind, hold_id, generation, reason, attempts, first_error, last_error,
                               first_failed_at, last_failed_at, state)
SELECT n.tenant_id, 'expire', $1, $2, $3, n.attempts, $8, $8, clock_timestamp(), clock_timestamp(),
       CASE WHEN n.attempts >= $4 THEN 'open' ELSE 'retrying' END
  FROM noted n
ON CONFLICT (hold_id, kind) WHERE state IN ('retrying', 'open') DO UPDATE
   SET generation = EXCLUDED.generation, reason = EXCLUDED.reason, attempts = EXCLUDED.attempts,
       last_error = EXCLUDED.last_error, last_failed_at = EXCLUDED.last_failed_at, state = EXCLUDED.state
RETURNING attempts, state = 'open' AS dead, extract(epoch FROM clock_timestamp())::double precision * 1000 AS at_ms
"""


# A row that refuses every UPDATE (say, a constraint added NOT VALID) cannot keep its own attempts.
RECORD_UNWRITABLE = """
INSERT INTO dead_letters AS d (tenant_id, kind, hold_id, generation, reason, attempts, first_error, last_error,
                               first_failed_at, last_failed_at, state)
SELECT h.tenant_id, 'expire', h.id, h.generation, $3, 1, $5, $5, clock_timestamp(), clock_timestamp(),
       CASE WHEN $4 <= 1 THEN 'open' ELSE 'retrying' END
  FROM holds h WHERE h.id = $1 AND h.generation = $2 AND h.state = 'held'
ON CONFLICT (hold_id, kind) WHERE state IN ('retrying', 'open') DO UPDATE
   SET reason = EXCLUDED.reason, attempts = d.attempts + 1, last_error = EXCLUDED.last_error,
       last_failed_at = EXCLUDED.last_failed_at,
       state = CASE WHEN d.attempts + 1 >= $4 THEN 'open' ELSE 'retrying' END
RETURNING attempts, state = 'open' AS dead,
          extract(epoch FROM clock_timestamp())::double precision * 1000 AS at_ms
"""


def lies_in_row(error: asyncpg.PostgresError) -> bool:
    """Whether the row itself is at fault, not the database or another transaction."""
    return (error.sqlstate or "")[:2] in _ROW_ERRORS


async def record_failure(
    conn: Conn, hold_id: UUID, generation: int, *, error: asyncpg.PostgresError, settings: Settings
) -> Failure:
    """Note that expiring this hold failed by its own fault, and say when to try again."""
    jitter = random.uniform(0.8, 1.2)  # noqa: S311 - spreads retries, guards nothing
    # Not the error's DETAIL: it quotes the row, and with it what customers wrote.
    text = f"{error.sqlstate}: {error.args[0]}"[:2000]
    who = (hold_id, generation, error.sqlstate, settings.attempts_max)
    try:
        row = await conn.fetchrow(
            RECORD_FAILURE, *who, float(settings.retry_base_s), float(WAIT_S_MAX), jitter, text
        )
    except asyncpg.PostgresError as refused:
        if not lies_in_row(refused):
            raise
        row = await conn.fetchrow(RECORD_UNWRITABLE, *who, text)
    if row is None:  # ended or renewed meanwhile: nothing is left to retry
        return Failure(attempts=0, wait_s=0, dead=False, at_ms=0)
    wait_s = min(settings.retry_base_s * 2 ** (row["attempts"] - 1), WAIT_S_MAX) * jitter
    if row["dead"]:
        DEAD.inc()
        log.error("dead_letter.opened", hold_id=str(hold_id), attempts=row["attempts"], reason=text)
    else:
        log.warning("attempt.failed", hold_id=str(hold_id), attempt=row["attempts"], reason=text)
    return Failure(row["attempts"], wait_s, row["dead"], row["at_ms"])


LIST = """
SELECT id, tenant_id, kind, hold_id, generation, reason, attempts, first_error, last_error, first_failed_at,
       last_failed_at, state, resolved_at, resolved_by
  FROM dead_letters
 WHERE ($1::text IS NULL OR tenant_id = $1) AND state = $2 AND id < $3
 ORDER BY id DESC LIMIT $4
"""


async def list_(
    conn: Conn,
    *,
    tenant_id: str | None = None,
    state: str = "open",
    before: int = 2**62,
    limit: int = LIST_MAX,
) -> list[dict[str, Any]]:
    """Answer dead letters, newest first, at most LIST_MAX."""
    return [dict(r) for r in await conn.fetch(LIST, tenant_id, state, before, min(limit, LIST_MAX))]


REPLAY = """
WITH chosen AS (
    UPDATE dead_letters d SET state = 'replayed', resolved_at = clock_timestamp(), resolved_by = $2
     WHERE d.id = ANY ($1) AND d.state IN ('open', 'discarded') RETURNING d.id, d.hold_id
), again AS (
    UPDATE holds h SET attempts = 0, next_attempt_at = NULL
     WHERE h.id = ANY (ARRAY(SELECT c.hold_id FROM chosen c)) AND h.state = 'held'
)
SELECT id FROM chosen ORDER BY id
"""
DISCARD = """
UPDATE dead_letters d SET state = 'discarded', resolved_at = clock_timestamp(), resolved_by = $2
 WHERE d.id = ANY ($1) AND d.state = 'open' RETURNING d.id
"""


async def replay(conn: Conn, ids: Sequence[int], *, by: str) -> list[int]:
    """Give these dead letters, open or discarded, a fresh set of attempts at the next sweep; note who did.

    Answers the ids that it found. Raises NotFoundError when there was none.
    """
    return await _resolve(conn, REPLAY, ids, by)


async def discard(conn: Conn, ids: Sequence[int], *, by: str) -> list[int]:
    """Close these open dead letters without another attempt; their holds stay as they are."""
    return await _resolve(conn, DISCARD, ids, by)


async def _resolve(conn: Conn, statement: str, ids: Sequence[int], by: str) -> list[int]:
    try:
        done = [row["id"] for row in await conn.fetch(statement, list(ids), by)]
    except asyncpg.PostgresError as error:
        if not lies_in_row(error):
            raise
        raise ExpiryError(f"the row still refuses any change ({error.args[0]}): mend that first") from error
    if not done:
        raise NotFoundError("none of these is an open dead letter: list them first")
    return done
