"""What operators look at first: how many holds were due, how many of them have ended, how old the rest is.

Every count is bounded and served by an index, so that looking is cheap however bad things are.
"""

from dataclasses import dataclass
from datetime import datetime

from expiry.deadletters import IN_REACH
from expiry.holds import Conn

COUNT_MAX = 100_000
EVENTS_MAX = 50_000
WINDOW_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The database's side of the overview; a count of COUNT_MAX means that many or more."""

    now: datetime
    due: int  # held and past the deadline, in reach of worker and sweep
    backed_off: int  # held and past the deadline, waiting after failures of their own
    oldest_due_at: datetime | None  # of the due ones
    expired: int  # since window_started_at
    window_started_at: datetime  # WINDOW_S ago, or later where EVENTS_MAX events do not reach back so far
    dead_letters_open: int

    @property
    def difference(self) -> int:
        """How many holds should have ended and have not."""
        return self.due + self.backed_off

    @property
    def eligible(self) -> int:
        """How many holds of the window were to end by time: those that did and those that have not."""
        return self.expired + self.difference

    @property
    def oldest_due_age_s(self) -> float:
        """Age of the oldest due hold in the database, 0 when there is none."""
        return (
            0.0 if self.oldest_due_at is None else max(0.0, (self.now - self.oldest_due_at).total_seconds())
        )


# Indexes: holds_due, holds_backed_off, dead_letters_unresolved, outbox_by_time.
OVERVIEW = f"""
WITH reach AS MATERIALIZED (
    SELECT expiry_reach(statement_timestamp() - make_interval(secs => $3), $2) AS start
)
SELECT clock_timestamp() AS now,
       (SELECT count(*) FROM (SELECT FROM holds h WHERE {IN_REACH}
                                 AND h.expires_at <= statement_timestamp() ORDER BY h.expires_at LIMIT $1) d) AS due,
       (SELECT count(*) FROM (SELECT FROM holds h WHERE h.state = 'held' AND h.next_attempt_at IS NOT NULL
                               LIMIT $1) b) AS backed_off,
       (SELECT h.expires_at FROM holds h WHERE {IN_REACH}
           AND h.expires_at <= statement_timestamp() ORDER BY h.expires_at LIMIT 1) AS oldest_due_at,
       (SELECT count(*) FROM expiry_recent(r.start, $2) e WHERE e.type = 'hold.expired') AS expired,
       r.start AS window_started_at,
       (SELECT count(*) FROM (SELECT FROM dead_letters l WHERE l.state = 'open' LIMIT $1) l) AS dead_letters_open
  FROM reach r
"""


async def read(conn: Conn) -> Overview:
    """Answer the overview as of now."""
    row = await conn.fetchrow(OVERVIEW, COUNT_MAX, EVENTS_MAX, float(WINDOW_S))
    assert row is not None  # noqa: S101 - an aggregate answers one row
    return Overview(**row)
