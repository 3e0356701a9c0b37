"""The promoter: loads the next slice of deadlines from PostgreSQL into Redis as time moves.

Redis is a rebuildable cache of the near future: whoever places a hold enqueues a deadline within the
horizon, the promoter brings the later ones when they come near, and rescans the whole horizon when Redis
restarted or changed identity, and what is near when Redis knows of fewer than PostgreSQL. All of it is
idempotent, so every process may run one.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import cast
from uuid import UUID

import asyncpg
import structlog
from prometheus_client import Counter

from expiry.expire import Wake
from expiry.settings import Settings
from expiry.wakeups import Wakeups, job_id

PAGE_MAX = 5000  # holds read by one statement
NEAR_S = (1, 60)  # the two stores are compared over deadlines this far ahead
NEAR_MAX = 1000  # and the first so many, so that the comparison stays cheap

PROMOTED = Counter("expiry_promoted", "Wake-ups that the promoter brought to Redis.")
RESCANS = Counter("expiry_promoter_rescans", "Scans for wake-ups that Redis should have had.", ["reason"])
for _reason in ("lost", "restarted", "fewer"):
    RESCANS.labels(_reason)

log = structlog.get_logger()

CLOCK = "SELECT clock_timestamp()"
# Deadlines of a slice, in pages. Index: holds_due.
HELD_BETWEEN = """
SELECT id, generation, expires_at FROM holds
 WHERE state = 'held' AND next_attempt_at IS NULL AND (expires_at, id) > ($1, $2) AND expires_at <= $3
 ORDER BY expires_at, id LIMIT $4
"""
_LAST_ID = UUID(int=2**128 - 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Promoter:
    """Keeps the horizon in Redis; how far it came is kept in Redis too, and so is lost with the rest."""

    pool: "asyncpg.Pool[asyncpg.Record]"
    wakeups: Wakeups
    settings: Settings

    async def tick(self) -> int:
        """Bring what Redis lacks; answer how many wake-ups were new. Raises when a store is away."""
        if not await self._my_turn():
            return 0
        now: datetime = await self.pool.fetchval(CLOCK)
        run_id = await self._run_id()
        reached, reason = await self._reached(now, run_id)
        until = now + timedelta(seconds=self.settings.horizon_s)
        queued = await self._promote(reached, until)
        await self._remember(until, run_id)
        if not reason and await self._fewer(now):
            # Part of the set was lost. What is near is mended now, the rest when it comes near.
            reason = "fewer"
            since = _EPOCH if self.settings.mode == "queue" else now
            queued += await self._promote(since, now + timedelta(seconds=NEAR_S[1]))
        if reason:
            RESCANS.labels(reason).inc()
        PROMOTED.inc(queued)
        if queued or reason == "fewer":
            log.info("slice.promoted", queued=queued, rescan=reason)
        return queued

    async def _my_turn(self) -> bool:
        """One process an interval: not for correctness, only to do the work once."""
        px = round(self.settings.promoter_interval_s * 900)
        return bool(await self.wakeups.redis.set(f"{self.wakeups.queue}:turn", b"1", nx=True, px=px))

    async def _reached(self, now: datetime, run_id: str) -> tuple[datetime, str | None]:
        """How far this Redis is known to be filled, or from where to fill it again, and why."""
        # What is overdue by more than the grace is the sweep's, if there is one.
        overdue_since = now - timedelta(seconds=self.settings.grace_s)
        start = _EPOCH if self.settings.mode == "queue" else overdue_since
        known: dict[bytes, bytes] = await cast(
            "Awaitable[dict[bytes, bytes]]", self.wakeups.redis.hgetall(self._marker)
        )
        if not known:
            return start, "lost"
        if known[b"run_id"].decode() != run_id:
            return start, "restarted"
        return datetime.fromtimestamp(int(known[b"until_ms"]) / 1000, UTC), None

    async def _promote(self, after: datetime, until: datetime) -> int:
        queued, cursor = 0, (after, _LAST_ID)
        while True:
            rows = await self.pool.fetch(HELD_BETWEEN, *cursor, until, PAGE_MAX)
            done = await self.wakeups.enqueue_due(
                [(Wake(r["id"], r["generation"]), r["expires_at"]) for r in rows]
            )
            queued += done.queued
            if len(rows) < PAGE_MAX:
                return queued
            cursor = (rows[-1]["expires_at"], rows[-1]["id"])

    async def _remember(self, until: datetime, run_id: str) -> None:
        # Whole milliseconds, rounded down: a slice may overlap the last, never leave a gap.
        marker = {"until_ms": int(until.timestamp() * 1000), "run_id": run_id}
        await cast("Awaitable[int]", self.wakeups.redis.hset(self._marker, mapping=marker))

    async def _fewer(self, now: datetime) -> bool:
        """Whether Redis lacks any of the next deadlines (of all overdue ones too, where there is no sweep)."""
        low, high = (now + timedelta(seconds=s) for s in NEAR_S)
        if self.settings.mode == "queue":
            low = _EPOCH
        rows = await self.pool.fetch(HELD_BETWEEN, low, _LAST_ID, high, NEAR_MAX)
        if not rows:
            return False
        ids = [job_id(Wake(r["id"], r["generation"])) for r in rows]
        return None in await self.wakeups.redis.zmscore(self.wakeups.queue, ids)

    async def _run_id(self) -> str:
        info = await self.wakeups.redis.info("server")
        return str(info["run_id"])

    @property
    def _marker(self) -> str:
        return f"{self.wakeups.queue}:promoted"
