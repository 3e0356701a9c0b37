"""Gauges that no loop moves by itself: how much is due and how old it is, how far the event feed is behind."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import asyncpg
from prometheus_client import Gauge

from expiry.deadletters import IN_REACH
from expiry.wakeups import Wakeups

COUNT_MAX = 10_000  # a scrape must stay cheap when a million are due

OVERDUE = Gauge(
    "expiry_overdue_holds", f"Held past the deadline: eligible minus expired. Counted up to {COUNT_MAX}."
)
BACKED_OFF = Gauge("expiry_backed_off_holds", "Held, waiting after failures of their own.")
OLDEST_DUE = Gauge(
    "expiry_oldest_due_age_seconds",
    "Age of the oldest hold past its deadline (database), or of the head of the queue; 0 when none is due.",
    ["store"],
)
DEPTH = Gauge("expiry_queue_wakeups", "Wake-ups in Redis.")
EVENTS_DELAY = Gauge(
    "expiry_events_delay_seconds",
    "How far the event feed is behind: events wait for the oldest transaction that still runs. 0: nothing waits.",
)
DEAD_LETTERS = Gauge("expiry_dead_letters_open", "Dead letters that wait for a person.")
for _store in ("database", "queue"):
    OLDEST_DUE.labels(_store)

# Indexes: holds_due, holds_backed_off, dead_letters_unresolved.
BACKLOG = f"""
SELECT (SELECT count(*) FROM (SELECT FROM holds h WHERE {IN_REACH}
                                 AND h.expires_at <= statement_timestamp() ORDER BY h.expires_at LIMIT $1) d) AS due,
       (SELECT extract(epoch FROM statement_timestamp() - min(o.expires_at))::double precision
          FROM (SELECT h.expires_at FROM holds h WHERE {IN_REACH}
                 ORDER BY h.expires_at LIMIT 1) o) AS oldest_age_s,
       (SELECT count(*) FROM (SELECT FROM holds h WHERE h.state = 'held' AND h.next_attempt_at IS NOT NULL
                               LIMIT $1) b) AS backed_off,
       (SELECT count(*) FROM (SELECT FROM dead_letters l WHERE l.state = 'open' LIMIT $1) l) AS dead,
       extract(epoch FROM statement_timestamp())::double precision * 1000 AS now_ms,
       f.xid::text::bigint AS feed_xid, f.next::text::bigint AS next_xid
  FROM expiry_feed_end() f
"""


LOOKS_MAX = 2000  # remembered; at one in two seconds a little more than an hour


@dataclass(slots=True)
class Observer:
    """Looks at both stores, every now and then."""

    pool: "asyncpg.Pool[asyncpg.Record]"
    wakeups: Wakeups | None
    clock: Callable[[], float] = time.monotonic
    # (seconds, next transaction then): an event of an older one is readable once the feed has come so far.
    _looks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=LOOKS_MAX), init=False)

    async def look(self) -> None:
        """Take one look. Raises when a store is away; the gauges then keep their last value."""
        row = await self.pool.fetchrow(BACKLOG, COUNT_MAX)
        assert row is not None  # noqa: S101 - no FROM, one row
        OVERDUE.set(row["due"])
        BACKED_OFF.set(row["backed_off"])
        DEAD_LETTERS.set(row["dead"])
        OLDEST_DUE.labels("database").set(max(0.0, row["oldest_age_s"] or 0.0))
        EVENTS_DELAY.set(self._delay_s(row["feed_xid"], row["next_xid"]))
        if self.wakeups is not None:
            DEPTH.set(await self.wakeups.depth())
            head_ms = await self.wakeups.oldest_ms()
            OLDEST_DUE.labels("queue").set(max(0.0, (row["now_ms"] - head_ms) / 1000) if head_ms else 0.0)

    def _delay_s(self, feed_xid: int, next_xid: int) -> float:
        """Answer how long ago the feed would have shown everything there was."""
        now_s = self.clock()
        if self._looks and self._looks[-1][1] > next_xid:  # another server, which counts anew
            self._looks.clear()
        self._looks.append((now_s, next_xid))
        while len(self._looks) > 1 and self._looks[1][1] <= feed_xid:
            self._looks.popleft()
        return 0.0 if feed_xid >= next_xid else now_s - self._looks[0][0]
