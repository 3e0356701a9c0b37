"""Who leads: one row in PostgreSQL, held for a few intervals at a time, on the database's clock.

The row also says at which bucket the allowance is (its home) and until when a publication made there may
count, so that whoever leads next never opens a second bucket beside the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

GOVERNOR_LEASE_DDL = """
-- Who decides the allowance, one row per fleet; rewritten every interval.
CREATE TABLE IF NOT EXISTS governor_lease (
    name       text        PRIMARY KEY,
    -- who leads, or led last
    holder     text        NOT NULL,
    -- grows with every change of leader: buckets refuse a lower one
    epoch      bigint      NOT NULL,
    -- others may lead after this
    until      timestamptz NOT NULL,
    -- bucket that has the allowance: redis or postgres
    home       text        NOT NULL,
    -- what was published there counts no longer than this
    home_until timestamptz NOT NULL,
    -- of the leader's settings: whoever has others says so
    settings_hash text     NOT NULL DEFAULT ''
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);
"""


class Connection(Protocol):
    """The part of an asyncpg pool or connection that the controller uses."""

    async def fetch(self, query: str, *args: object) -> list[Any]:
        """Return all rows."""

    async def fetchrow(self, query: str, *args: object) -> Any:  # noqa: ANN401 - a Record
        """Return the first row, None without one."""

    async def fetchval(self, query: str, *args: object) -> Any:  # noqa: ANN401 - a value
        """Return the first value of the first row."""

    async def execute(self, query: str, *args: object) -> str:
        """Run a statement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The row as it is."""

    holder: str
    epoch: int
    until: datetime
    home: str
    home_until: datetime
    settings_hash: str
    left_s: float  # until it ends, on the database's clock; below 0 = since when it is free


_COLUMNS = "holder, epoch, until, home, home_until, settings_hash"
_LEFT = "extract(epoch FROM until - clock_timestamp())::double precision AS left_s"
_AFTER = "clock_timestamp() + {} * interval '1 second'"

READ = f"SELECT {_COLUMNS}, {_LEFT} FROM governor_lease WHERE name = $1"


async def read(conn: Connection, name: str) -> Lease | None:
    """Return the row; None where nobody ever led, or it was deleted."""
    row = await conn.fetchrow(READ, name)
    return None if row is None else Lease(**row)


# $2 holder, $3 highest epoch known, $4 lease, $5 home and $6 until when it may count where there is no row,
# $7 how long it must have been free. A row that was deleted says nothing of what was published.
ACQUIRE = f"""
INSERT INTO governor_lease AS l (name, holder, epoch, until, home, home_until)
VALUES ($1, $2, $3::bigint + 1, {_AFTER.format("$4::double precision")}, $5,
        {_AFTER.format("$6::double precision")})
    ON CONFLICT (name) DO UPDATE
   SET holder = EXCLUDED.holder, until = EXCLUDED.until, epoch = greatest(l.epoch, $3::bigint) + 1
 WHERE l.until <= clock_timestamp() - $7::double precision * interval '1 second'
RETURNING {_COLUMNS}, {_LEFT}
"""


async def acquire(
    conn: Connection,
    name: str,
    *,
    holder: str,
    epoch_seen: int,
    lease_s: float,
    home: str,
    home_s: float,
    free_s: float = 0.0,
) -> Lease | None:
    """Lead from now on for lease_s, under a new epoch; None if somebody leads.

    free_s: only if it has been free for so long. home_s: where there is no row, whatever was published at
    `home` may count for so long.
    """
    row = await conn.fetchrow(ACQUIRE, name, holder, epoch_seen, lease_s, home, home_s, free_s)
    return None if row is None else Lease(**row)


_MOVES = "(l.home = $6 OR $8::boolean OR l.home_until <= clock_timestamp())"
# $2 holder, $3 epoch, $4 highest epoch known, $5 lease, $6 home wanted, $7 how long it may count there,
# $8 whether the old home is known to be at the floor, $9 the settings' hash.
RENEW = f"""
UPDATE governor_lease AS l
   SET until = {_AFTER.format("$5::double precision")},
       epoch = CASE WHEN l.epoch < $4::bigint THEN $4 + 1 ELSE l.epoch END,
       home = CASE WHEN {_MOVES} THEN $6 ELSE l.home END,
       home_until = CASE WHEN {_MOVES} THEN {_AFTER.format("$7::double precision")} ELSE l.home_until END,
       settings_hash = $9
 WHERE l.name = $1 AND l.holder = $2 AND l.epoch = $3 AND l.until > clock_timestamp()
RETURNING {_COLUMNS}, {_LEFT}
"""


async def renew(  # noqa: PLR0913 - a row
    conn: Connection,
    name: str,
    *,
    holder: str,
    epoch: int,
    epoch_seen: int,
    lease_s: float,
    home: str,
    home_s: float,
    home_left: bool = False,
    settings_hash: str = "",
) -> Lease | None:
    """Go on leading for lease_s; None if the lease ended, was taken or was deleted.

    The answer's `home` is where to publish. It becomes the one that is asked for as soon as nothing that was
    published at the old one can count any more (home_left: it has been lowered). Raises the epoch where a
    bucket has seen a higher one than this row, which was lost then.
    """
    row = await conn.fetchrow(
        RENEW, name, holder, epoch, epoch_seen, lease_s, home, home_s, home_left, settings_hash
    )
    return None if row is None else Lease(**row)


RELEASE = "UPDATE governor_lease SET until = clock_timestamp() WHERE name = $1 AND holder = $2 AND epoch = $3"


async def release(conn: Connection, name: str, *, holder: str, epoch: int) -> None:
    """Let another lead at once."""
    await conn.execute(RELEASE, name, holder, epoch)
