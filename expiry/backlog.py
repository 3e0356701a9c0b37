"""What the governor has to know of our work: what is due, and what falls due within its objective.

PostgreSQL knows the future: every deadline is there. Counts are bounded, so that looking stays cheap.
"""

from dataclasses import dataclass

import asyncpg

from expiry.deadletters import IN_REACH
from governor import Backlog

COUNT_MAX = 20_000  # more is urgent all the same; about 10 ms of one core

# Index: holds_due, walked from the oldest, then from now on.
BACKLOG = f"""
WITH due AS MATERIALIZED (
    SELECT h.expires_at FROM holds h WHERE {IN_REACH}
       AND h.expires_at <= statement_timestamp() ORDER BY h.expires_at LIMIT $1
), soon AS MATERIALIZED (
    SELECT h.expires_at FROM holds h WHERE h.state = 'held' AND h.next_attempt_at IS NULL
       AND h.expires_at > statement_timestamp()
       AND h.expires_at <= statement_timestamp() + $2::double precision * interval '1 second'
     ORDER BY h.expires_at LIMIT $1
)
SELECT (SELECT count(*) FROM due) AS due_depth,
       coalesce(extract(epoch FROM statement_timestamp() - (SELECT min(d.expires_at) FROM due d)), 0)
           ::double precision AS oldest_due_age_s,
       (SELECT count(*) FROM soon) AS arrivals,
       extract(epoch FROM (SELECT max(s.expires_at) FROM soon s) - statement_timestamp())::double precision AS span_s,
       (SELECT max(n) FROM (SELECT count(*) AS n FROM soon s GROUP BY floor(extract(epoch FROM s.expires_at))) p)
           AS peak
"""


@dataclass(slots=True)
class HoldsBacklog:
    """The holds of one database, as the governor asks for them."""

    pool: "asyncpg.Pool[asyncpg.Record]"
    objective_s: float

    async def __call__(self) -> Backlog:
        """Answer as of now. Raises what asyncpg raises."""
        row = await self.pool.fetchrow(BACKLOG, COUNT_MAX, self.objective_s)
        assert row is not None  # noqa: S101 - no FROM, one row
        # What was not counted lies beyond the last one that was.
        whole = row["arrivals"] < COUNT_MAX
        span_s = self.objective_s if whole else max(row["span_s"], 1.0)
        return Backlog(
            oldest_due_age_s=max(0.0, row["oldest_due_age_s"]),
            due_depth=row["due_depth"],
            arrivals_per_s=row["arrivals"] / span_s,
            arrivals_peak_per_s=row["peak"] or 0,
        )
