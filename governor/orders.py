"""What operators order: pause, and an override that lowers the ceiling for a while; by whom and why.

Rows that the leader reads every interval. Whatever was in force is kept with each decision in the journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from governor.lease import Connection

OVERRIDE_S_MAX = 7 * 86_400.0  # a longer one is a setting

GOVERNOR_ORDERS_DDL = """
-- What operators ordered and is in force, by fleet and kind (pause, override).
CREATE TABLE IF NOT EXISTS governor_orders (
    name          text             NOT NULL,
    kind          text             NOT NULL CHECK (kind IN ('pause', 'override')),
    -- of an override, permits/s; lowers the ceiling, never raises it
    ceiling_per_s double precision CHECK ((ceiling_per_s IS NULL) = (kind = 'pause') AND ceiling_per_s > 0),
    reason        text             NOT NULL,
    ordered_by    text             NOT NULL,
    ordered_at    timestamptz      NOT NULL DEFAULT clock_timestamp(),
    -- it ends by itself; null: when somebody ends it
    ends_at       timestamptz,
    PRIMARY KEY (name, kind)
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order in force."""

    kind: str  # pause or override
    ceiling_per_s: float | None
    reason: str
    ordered_by: str
    ordered_at: datetime
    ends_at: datetime | None

    def as_dict(self) -> dict[str, Any]:
        """Say it as JSON has it."""
        return {
            "kind": self.kind,
            "ceiling_per_s": self.ceiling_per_s,
            "reason": self.reason,
            "ordered_by": self.ordered_by,
            "ordered_at": self.ordered_at.isoformat(),
            "ends_at": None if self.ends_at is None else self.ends_at.isoformat(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """All orders in force, at most one of each kind."""

    pause: Order | None = None
    override: Order | None = None

    @classmethod
    def of(cls, orders: Iterable[Order]) -> Orders:
        """Return them by kind."""
        return cls(**{order.kind: order for order in orders})

    @property
    def paused(self) -> bool:
        """Whether an operator paused the fleet."""
        return self.pause is not None

    @property
    def ceiling_per_s(self) -> float | None:
        """The override's ceiling, permits/s; None without one."""
        return None if self.override is None else self.override.ceiling_per_s

    def as_list(self) -> list[dict[str, Any]]:
        """Say them as JSON has it."""
        return [order.as_dict() for order in (self.pause, self.override) if order is not None]


READ = """
SELECT kind, ceiling_per_s, reason, ordered_by, ordered_at, ends_at FROM governor_orders
 WHERE name = $1 AND (ends_at IS NULL OR ends_at > clock_timestamp())
"""


async def read(conn: Connection, name: str) -> Orders:
    """Return what is in force now; an override that has ended is none."""
    return Orders.of(Order(**row) for row in await conn.fetch(READ, name))


ORDER = """
INSERT INTO governor_orders (name, kind, ceiling_per_s, reason, ordered_by, ends_at)
VALUES ($1, $2, $3, $4, $5, clock_timestamp() + $6::double precision * interval '1 second')
    ON CONFLICT (name, kind) DO UPDATE
   SET ceiling_per_s = EXCLUDED.ceiling_per_s, reason = EXCLUDED.reason, ordered_by = EXCLUDED.ordered_by,
       ordered_at = clock_timestamp(), ends_at = EXCLUDED.ends_at
RETURNING kind, ceiling_per_s, reason, ordered_by, ordered_at, ends_at
"""
END = "DELETE FROM governor_orders WHERE name = $1 AND kind = $2"


async def pause(conn: Connection, name: str, *, reason: str, by: str) -> Order:
    """Allow nothing from the next interval on, until `resume`."""
    return Order(**await conn.fetchrow(ORDER, name, "pause", None, reason, by, None))


async def resume(conn: Connection, name: str) -> None:
    """End a pause; without one nothing changes. The law resumes at half the last good rate."""
    await conn.execute(END, name, "pause")


async def override(
    conn: Connection,
    name: str,
    *,
    ceiling_per_s: float,
    most_per_s: float,
    ttl_s: float,
    reason: str,
    by: str,
) -> Order:
    """Lower the ceiling (most_per_s) for ttl_s, then it is as before; replaces an earlier override.

    Raises: ValueError, naming the field and its range: an override may only lower.
    """
    if not 0 < ceiling_per_s <= most_per_s:
        raise ValueError(
            f"ceiling_per_s must be above 0 and at most the ceiling, {most_per_s:g}: an override only lowers"
        )
    if not 1 <= ttl_s <= OVERRIDE_S_MAX:
        raise ValueError(f"ttl_s must be 1..{OVERRIDE_S_MAX:g}")
    return Order(**await conn.fetchrow(ORDER, name, "override", ceiling_per_s, reason, by, ttl_s))


async def withdraw(conn: Connection, name: str) -> None:
    """End an override before its time; without one nothing changes."""
    await conn.execute(END, name, "override")
