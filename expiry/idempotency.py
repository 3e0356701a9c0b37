"""Once per key: the first answer to a request with an Idempotency-Key is kept and answered again.

`place` does the same inside its own function (schema.sql); this is for the other verbs.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any

from expiry import errors
from expiry.holds import Conn

PLATFORM = ""  # stands for the tenant of keys without one; no tenant has this name

# A duplicate must not park a connection: it is told at once and comes again.
TRY_LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended($1 || '/' || $2 || '/' || $3, 0))"
KNOWN = """
SELECT body_hash, response::text, clock_timestamp() AS now FROM idempotency_keys
 WHERE tenant_id = $1 AND route = $2 AND key = $3
"""
KEEP = """
INSERT INTO idempotency_keys (tenant_id, route, key, body_hash, response)
VALUES ($1, $2, $3, $4, $5::text::jsonb)
"""
# Index: the primary key.
REUSED = """
SELECT EXISTS (SELECT FROM idempotency_keys k
                WHERE k.tenant_id = $1 AND k.route = $2 AND k.key = ANY ($3) AND k.body_hash <> $4)
"""

BOUND: dict[str, Any] = {}  # the answer of a row that binds a key to a body and answers nothing itself


async def check_unused(
    conn: Conn, keys: Sequence[str], *, tenant_id: str, route: str, body_hash: bytes
) -> None:
    """Raise KeyReusedError if one of these keys was used with another body."""
    if await conn.fetchval(REUSED, tenant_id, route, keys, body_hash):
        raise errors.KeyReusedError


async def once(
    conn: Conn,
    work: Callable[[Conn], Awaitable[dict[str, Any]]],
    *,
    tenant_id: str,
    route: str,
    key: str,
    body_hash: bytes,
) -> tuple[dict[str, Any], datetime | None]:
    """Do the work and keep its answer in one transaction, or answer as the first time.

    Beside the answer stands the database's clock at a replay, None where the work was done now.

    What the work raises leaves the key free. Raises KeyInProgressError, KeyReusedError (another body).
    """
    async with conn.transaction():
        if not await conn.fetchval(TRY_LOCK, tenant_id, route, key):
            raise errors.KeyInProgressError
        # A statement of its own: its snapshot must be younger than the lock.
        known = await conn.fetchrow(KNOWN, tenant_id, route, key)
        if known is None:
            answer = await work(conn)
            await conn.execute(KEEP, tenant_id, route, key, body_hash, json.dumps(answer))
            return answer, None
        if known["body_hash"] != body_hash:
            raise errors.KeyReusedError
        return json.loads(known["response"]), known["now"]
