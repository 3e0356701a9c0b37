"""Places of many callers in one transaction, so that they share its commit.

Only what is simple goes together: one resource, nothing to reclaim or to replace, no lock to wait for. Whatever is
not simple is left untouched, and is placed alone (`holds.place`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from enum import Enum
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


class Left(Enum):
    """Why a place was left out of a group."""

    ALONE = "alone"  # it is not simple: place it by itself
    LOCKED = "locked"  # somebody has its resource for the moment: a group that waits may have it


PLACE_GROUP = "SELECT placed, locked, placed_at FROM expiry_place_group($1::text::jsonb, $2)"


async def place_group(
    conn: Conn, asks: Sequence[Ask], *, wait: bool = False, timeout_s: float | None = None
) -> list[Hold | Left]:
    """Place what is simple, in one statement, and say of each other one why it was left out.

    `wait`: for locked resources, at most 0.1 s. Raises what asyncpg raises; then nothing was placed, unless the
    connection was lost or the time was over.
    """
    requests = json.dumps([a.request | {"n": n} for n, a in enumerate(asks)])
    row = await conn.fetchrow(PLACE_GROUP, requests, wait, timeout=timeout_s)
    assert row is not None  # noqa: S101 - a function with OUT parameters answers one row
    found: list[Hold | Left] = [Left.ALONE] * len(asks)
    placed_at = row["placed_at"].astimezone(UTC)
    for n in row["placed"]:
        one = asks[n]
        found[n] = placed(one.wanted, one.wanted.id, one.tenant_id, placed_at, placed_at)
    for n in row["locked"]:
        found[n] = Left.LOCKED
    PLACED.inc(len(row["placed"]))
    return found
