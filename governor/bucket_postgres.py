"""The bucket in one row of PostgreSQL: the arithmetic of bucket.py as one statement."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import asyncpg

from governor.bucket import BucketState, BucketUnavailable, Form

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

GOVERNOR_BUCKET_DDL = """
-- The token bucket as a row, for a fleet without Redis. Every batch of permits rewrites the row: no
-- index but the key and a page kept nearly empty, so that each update is HOT and prunes the last.
CREATE TABLE IF NOT EXISTS governor_bucket (
    name      text   PRIMARY KEY,
    -- nano-permits
    tokens    bigint NOT NULL DEFAULT 0 CHECK (tokens >= 0),
    -- nano-permits charged and not yet repaid
    debt      bigint NOT NULL DEFAULT 0 CHECK (debt >= 0),
    -- last refill, us since 1970; null = never used
    micros    bigint,
    -- published allowance, milli-permits/s; counts until `until`, then the floor does
    rate      bigint NOT NULL DEFAULT 0 CHECK (rate >= 0),
    -- milli-permits/s, of whoever called last
    floor     bigint NOT NULL DEFAULT 0 CHECK (floor >= 0),
    -- highest that published: a lower one is refused
    epoch     bigint NOT NULL DEFAULT 0,
    -- us since 1970: the published allowance lapses
    until     bigint NOT NULL DEFAULT 0,
    -- us since 1970: the last cut holds, and no other may follow
    cut_until bigint NOT NULL DEFAULT 0,
    -- of the last statement, for its own RETURNING
    outcome   bigint NOT NULL DEFAULT 0,
    -- permits granted and charged, less those refunded
    spent       bigint NOT NULL DEFAULT 0,
    -- us with an unmet request of the first priority
    unmet       bigint NOT NULL DEFAULT 0,
    -- us since 1970: the last unmet request could be met
    unmet_until bigint NOT NULL DEFAULT 0,
    -- how the fleet's attempts ended
    completed   bigint NOT NULL DEFAULT 0,
    failed      bigint NOT NULL DEFAULT 0,
    timed_out   bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);
"""


class _Connection(Protocol):
    """The part of an asyncpg pool or connection that a bucket uses."""

    async def fetchrow(self, query: str, *args: object) -> Any: ...  # noqa: ANN401 - a Record


def _burst_sql(rate: str) -> str:
    return f"least({rate}, 1) * greatest(1000000000, {rate} * 250000)"


# $1 name, $2 the caller's floor, $3 now (null = the server's clock, read after the row lock). Every
# step is materialized: inlined into one another they would be computed many times over.
REFILLED = f"""
    WITH clock AS MATERIALIZED (
        SELECT coalesce($3::bigint,
                        (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now_us
    ), known AS MATERIALIZED (
        SELECT now_us, coalesce(now_us >= b.micros - 1000000, false) AS ok FROM clock
    ), start AS MATERIALIZED (
        SELECT CASE WHEN ok THEN greatest(now_us, b.micros) ELSE now_us END AS micros,
               CASE WHEN ok THEN b.micros ELSE now_us END AS since,
               CASE WHEN ok THEN b.tokens ELSE 0 END AS tokens,
               CASE WHEN ok THEN b.debt ELSE 0 END AS debt,
               CASE WHEN ok THEN b.rate ELSE 0 END AS rate,
               CASE WHEN ok THEN b.floor ELSE $2::bigint END AS floor,
               CASE WHEN ok THEN b.until ELSE 0 END AS until,
               CASE WHEN ok THEN b.cut_until ELSE 0 END AS cut_until,
               CASE WHEN ok THEN b.spent ELSE 0 END AS spent,
               CASE WHEN ok THEN b.unmet + greatest(0, least(now_us, b.unmet_until) - b.micros)
                    ELSE 0 END AS unmet,
               CASE WHEN ok THEN b.unmet_until ELSE 0 END AS unmet_until
          FROM known
    ), split AS MATERIALIZED (
        SELECT *, least(greatest(until, since), micros) AS split,
               CASE WHEN micros < until THEN rate ELSE $2::bigint END AS in_force
          FROM start
    ), spans AS MATERIALIZED (
        SELECT *, least(split - since, 3600000000) AS published_us,
               least(micros - split, 3600000000) AS lapsed_us
          FROM split
    ), repaid AS MATERIALIZED (
        SELECT *, least(debt, published_us * greatest(rate - floor, 0)) AS repaid FROM spans
    ), published AS MATERIALIZED (
        SELECT *, CASE WHEN published_us > 0
                       THEN least({_burst_sql("rate")}, tokens + published_us * rate - repaid)
                       ELSE tokens END AS tokens_published
          FROM repaid
    ), lapsed AS MATERIALIZED (
        SELECT *, CASE WHEN lapsed_us > 0
                       THEN least({_burst_sql("floor")}, tokens_published + lapsed_us * floor)
                       ELSE tokens_published END AS tokens_lapsed
          FROM published
    ), s AS MATERIALIZED (
        SELECT micros, rate, until, cut_until, in_force, coalesce(b.epoch, 0) AS epoch,
               spent, unmet, unmet_until,
               least(tokens_lapsed, {_burst_sql("in_force")}) AS tokens,
               least(debt - repaid, greatest(1000000000, in_force * 1000000)) AS debt
          FROM lapsed
    )"""


def _update(operation: str) -> str:
    """Return the statement for a select of the columns that are named below as `o`.

    ON CONFLICT locks the newest version of the row and computes on that. A plain UPDATE computes
    first and locks then; where it must compute again it reuses what WITH held, and two workers
    spend the same permits. `outcome` is stored because RETURNING sees only what is stored.
    """
    return f"""
INSERT INTO governor_bucket AS b (name) VALUES ($1) ON CONFLICT (name) DO UPDATE
   SET (tokens, debt, rate, epoch, until, cut_until, spent, unmet_until, outcome, micros, floor, unmet)
     = ({REFILLED},
    changed AS MATERIALIZED (
        SELECT o.*, s.micros, s.unmet,
               CASE WHEN s.micros < o.until THEN o.rate ELSE $2::bigint END AS in_force
          FROM s CROSS JOIN LATERAL ({operation}
               ) AS o (tokens, debt, rate, epoch, until, cut_until, spent, unmet_until, outcome)
    )
    SELECT least(tokens, {_burst_sql("in_force")}),
           least(debt, greatest(1000000000, in_force * 1000000)),
           rate, epoch, until, cut_until, spent, unmet_until, outcome, micros, $2::bigint, unmet
      FROM changed)
RETURNING outcome, tokens, debt, micros, rate, floor, epoch, until, cut_until, spent, unmet, unmet_until
"""


class PostgresBucket(Form):
    """A bucket in one row of `governor_bucket` (GOVERNOR_BUCKET_DDL), on the server's clock.

    Every operation is one statement, but the first on a new name is two: one inserts the row.
    Inside a transaction it keeps the fleet waiting for the row until the commit: charge after it.
    """

    # $4 want, $5 priority
    TAKE_AT = _update(f"""
        SELECT s.tokens - granted * 1000000000, s.debt, s.rate, s.epoch, s.until, s.cut_until,
               s.spent + granted,
               CASE WHEN granted < $4 AND $5 = 0
                    THEN greatest(s.unmet_until, s.micros + least(250000, coalesce(
                         (least($4 - granted, 1000000) * 1000000000 + s.in_force - 1)
                         / nullif(s.in_force, 0), 250000)))
                    ELSE s.unmet_until END,
               granted
          FROM (SELECT greatest(0, {_burst_sql("s.in_force")} - 1000000000) * $5::bigint / 4
                       AS spared) AS p
         CROSS JOIN LATERAL (
               SELECT CASE WHEN $5 > 0 AND s.micros < s.unmet_until THEN 0
                           ELSE least($4::bigint, greatest(0, s.tokens - spared) / 1000000000) END
                      AS granted) AS g""")

    REFUND = _update("""
        SELECT s.tokens + $4::bigint * 1000000000, s.debt,
               s.rate, s.epoch, s.until, s.cut_until, s.spent - $4, s.unmet_until, 0""")

    CHARGE = _update(f"""
        SELECT s.tokens - paid, s.debt + $4::bigint * 1000000000 - paid,
               s.rate, s.epoch, s.until, s.cut_until, s.spent + $4, s.unmet_until, 0
          FROM (SELECT least(s.in_force, $2) AS kept) AS k
         CROSS JOIN LATERAL (
               SELECT least($4::bigint * 1000000000,
                            greatest(0, s.tokens - {_burst_sql("kept")})) AS paid) AS p
    """)

    # $4 rate, $5 ttl, $6 epoch, $7 by (0 = never too late)
    PUBLISH = _update("""
        SELECT s.tokens, s.debt, CASE WHEN fenced THEN s.rate ELSE least($4::bigint, cap) END,
               CASE WHEN fenced THEN s.epoch ELSE $6::bigint END,
               CASE WHEN fenced THEN s.until ELSE s.micros + $5::bigint END,
               s.cut_until, s.spent, s.unmet_until, (NOT fenced)::int
          FROM (SELECT $6::bigint < s.epoch OR $7::bigint > 0 AND s.micros > $7 AS fenced,
                       CASE WHEN s.micros < s.cut_until
                            THEN greatest(s.rate, $2) END AS cap) AS p""")

    CUT = _update("""
        SELECT s.tokens, s.debt, CASE WHEN applied THEN target ELSE s.rate END, s.epoch, s.until,
               CASE WHEN applied THEN s.micros + $5::bigint ELSE s.cut_until END,
               s.spent, s.unmet_until, applied::int
          FROM (SELECT greatest($2, s.in_force * $4::bigint / 1000000) AS target) AS t
         CROSS JOIN LATERAL (
               SELECT s.micros >= s.cut_until AND target < s.in_force AS applied) AS a""")

    READ = f"""
SELECT 0, s.tokens, s.debt, s.micros, s.rate, $2::bigint, s.epoch, s.until, s.cut_until,
       s.spent, s.unmet, s.unmet_until
  FROM (VALUES ($1::text)) AS wanted (name) LEFT JOIN governor_bucket AS b USING (name)
 CROSS JOIN LATERAL ({REFILLED} SELECT * FROM s) AS s
"""

    # The totals alone: a row that this makes has no micros, and so was never used as a bucket.
    COUNT = """
INSERT INTO governor_bucket AS b (name, completed, failed, timed_out) VALUES ($1, $2, $3, $4)
    ON CONFLICT (name) DO UPDATE SET completed = b.completed + EXCLUDED.completed,
       failed = b.failed + EXCLUDED.failed, timed_out = b.timed_out + EXCLUDED.timed_out
RETURNING completed, failed, timed_out
"""

    def __init__(
        self,
        connection: _Connection,
        name: str,
        *,
        floor_per_s: float,
        timeout_s: float = 1.0,
        clock_us: Callable[[], int] | None = None,
    ) -> None:
        """Use row `name` through an asyncpg pool or connection; `clock_us` as for RedisBucket."""
        super().__init__(floor_per_s)
        self._connection = connection
        self._name = name
        self._timeout_s = timeout_s
        self._clock_us = clock_us

    async def _call(self, operation: str, *args: int) -> tuple[int, BucketState]:
        statement = getattr(self, operation.upper())
        now_us = None if self._clock_us is None else self._clock_us()
        values = (self._name, self._floor, now_us, *args)
        async with self._bounded():
            row = await self._connection.fetchrow(statement, *values)
            if row["micros"] is None:  # this inserted the row, and did nothing else
                row = await self._connection.fetchrow(statement, *values)
        outcome, *fields = row
        return outcome, BucketState.of(fields)

    async def _count(self, completed: int, failed: int, timed_out: int) -> tuple[int, int, int]:
        async with self._bounded():
            row = await self._connection.fetchrow(self.COUNT, self._name, completed, failed, timed_out)
        return row["completed"], row["failed"], row["timed_out"]

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            raise BucketUnavailable from error
