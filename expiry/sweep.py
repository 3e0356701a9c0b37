"""The sweep: finds holds that the queue forgot and expires them through the same transition.

A pass walks what is overdue, oldest first, in bounded batches with a keyset cursor (starting at the head
each time would meet every row that it just ended again, under an old snapshot). It never re-enqueues.
"""

import asyncio
from collections import Counter as Tally
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import structlog
from prometheus_client import Counter, Gauge

from expiry.deadletters import IN_REACH
from expiry.expire import NOT_STARTED, Outcome, Wake, expire_batch
from expiry.loops import rest
from expiry.permits import GATHER_S, Permits, batch_size
from expiry.settings import Settings

RECOVERED = Counter("expiry_sweep_recovered", "Holds that the sweep expired.")
THROTTLED = Counter("expiry_sweep_throttled", "Times that the sweep got no permit for a second.")
LEFT_OVER = Gauge(
    "expiry_sweep_left_over_holds",
    "Overdue holds that the last pass saw and could not end (contended, failed).",
)
PERMIT_WAIT_S_MAX = 1.0  # a pass looks at stop and pause at least this often

log = structlog.get_logger()

CLOCK = "SELECT clock_timestamp()"
# Overdue by more than the grace, after the cursor. Index: holds_due.
DUE_PAGE = f"""
SELECT h.id, h.generation, h.expires_at AS due_at FROM holds h
 WHERE {IN_REACH}
   AND h.expires_at <= $1::timestamptz AND (h.expires_at, h.id) > ($2, $3)
 ORDER BY h.expires_at, h.id LIMIT $4
"""
# Rows whose back-off after a failure of their own is over. Index: holds_backed_off.
BACKED_OFF_PAGE = """
SELECT id, generation, next_attempt_at AS due_at FROM holds
 WHERE state = 'held' AND next_attempt_at IS NOT NULL
   AND next_attempt_at <= $1::timestamptz
   AND (next_attempt_at, id) > ($2, $3)
 ORDER BY next_attempt_at, id LIMIT $4
"""
_START = (datetime(1970, 1, 1, tzinfo=UTC), UUID(int=0))


@dataclass(slots=True)
class Sweep:
    """One pass after another over what is overdue."""

    pool: "asyncpg.Pool[asyncpg.Record]"
    permits: Permits
    settings: Settings
    stop: asyncio.Event
    paused: Callable[[], bool]

    async def one_pass(self) -> Tally[str]:
        """Expire all that is overdue by more than the grace; answer how many had which outcome.

        What is contended is left for the next pass. Raises when a store is away; what was ended by
        then has ended.
        """
        tally: Tally[str] = Tally()
        # A pass has an end: what becomes due meanwhile is the next one's, or what is contended would wait
        # until nothing becomes due any more.
        now: datetime = await self.pool.fetchval(CLOCK)
        await self._walk(DUE_PAGE, now - timedelta(seconds=self.settings.grace_s), tally)
        await self._walk(BACKED_OFF_PAGE, now, tally)
        LEFT_OVER.set(tally["contended"] + tally["failed"])
        if tally:
            log.info("sweep.finished", **tally)
        return tally

    async def _walk(self, page: str, until: datetime, tally: Tally[str]) -> None:
        cursor = _START
        size = batch_size(self.settings.batch_max, self.permits.governor.ceiling_per_s)
        rows: list[asyncpg.Record] = []
        while not self.stop.is_set() and not self.paused():
            if not rows:
                rows = await self.pool.fetch(page, until, *cursor, size)
            if not rows:
                return
            # Permits are for holds that are there: an idle sweep takes none from the workers.
            granted = await self.permits.take(len(rows), timeout_s=PERMIT_WAIT_S_MAX)
            if not granted:
                THROTTLED.inc()
                continue
            outcomes = await self._expire(rows[:granted])
            tally.update(o.kind for o in outcomes)
            cursor = (rows[granted - 1]["due_at"], rows[granted - 1]["id"])
            rows = rows[granted:]
            if rows:  # short of permits: let a batch of them gather
                await rest(self.stop, GATHER_S)

    async def _expire(self, rows: list[asyncpg.Record]) -> list[Outcome]:
        wakes = [Wake(r["id"], r["generation"]) for r in rows]
        try:
            async with self.permits.connection(self.pool) as conn:
                outcomes = await expire_batch(conn, wakes, by="sweep", settings=self.settings)
        except Exception as error:
            await self.permits.note_failure(error, len(wakes))
            raise
        self.permits.note(outcomes)
        RECOVERED.inc(sum(o.kind == "expired" for o in outcomes))
        unused = sum(o.kind in NOT_STARTED for o in outcomes)
        if unused:
            await self.permits.refund(unused)
        return outcomes
