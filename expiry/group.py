"""Places of many callers in one transaction, so that they share its commit.

Only what is simple goes together: one resource, nothing to reclaim or to replace, no lock to wait for. Whatever is
not simple is left untouched, and is placed alone (`holds.place`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from expiry.holds import PLACED, Conn, Hold, fingerprint, placed
from expiry.wanted import Wanted, request_of


@dataclass(frozen=True, slots=True)
class Ask:
    """One caller's place, once per key."""

    wanted: Wanted
    request: dict[str, Any]  # as expiry_place_group reads it
    tenant_id: str


def ask(
    wanted: Wanted, *, tenant_id: str, by: str, route: str, key: str, body_hash: bytes | None = None
) -> Ask | None:
    """Say it as a part of a group; None when it cannot be simple. Raises OutOfRangeError as `place` does."""
    if len(wanted.items) != 1 or wanted.replaces is not None:
        return None
    request = request_of(wanted)
    body_hash = body_hash or fingerprint([request])
    request |= {"tenant": tenant_id, "by": by, "route": route, "key": key, "body_hash": body_hash.hex()}
    return Ask(wanted, request, tenant_id)


PLACE_GROUP = "SELECT placed, placed_at FROM expiry_place_group($1::text::jsonb)"


async def place_group(conn: Conn, asks: Sequence[Ask]) -> list[Hold | None]:
    """Place what is simple, in one statement, and answer None for each one that is to be placed alone.

    Waits for no lock. Raises what asyncpg raises; then nothing was placed.
    """
    row = await conn.fetchrow(PLACE_GROUP, json.dumps([a.request | {"n": n} for n, a in enumerate(asks)]))
    assert row is not None  # noqa: S101 - a function with OUT parameters answers one row
    holds: list[Hold | None] = [None] * len(asks)
    placed_at = row["placed_at"].astimezone(UTC)
    for n in row["placed"]:
        one = asks[n]
        holds[n] = placed(one.wanted, one.wanted.id, one.tenant_id, placed_at, placed_at)
    PLACED.inc(len(row["placed"]))
    return holds
