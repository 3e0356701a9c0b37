"""Pruning: ended holds, events, resolved dead letters and idempotency keys leave after their retention.

In bounded batches, each with permits that expiry left over: pruning never competes with it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg
import structlog
from prometheus_client import Counter

from expiry.permits import Permits
from expiry.settings import Settings
from governor import Priority

BATCH_MAX = 500
BATCH_S_OF_ALLOWANCE = 0.05  # a fifth of the burst: whoever expires meanwhile still finds permits
TENANTS_MAX = 1000  # whose events one pass prunes
KEYS_KEPT_S = 2 * 86_400  # idempotency keys: at least the day that the contract promises

PRUNED = Counter("expiry_pruned_rows", "Rows that left after their retention.", ["table"])
for _table in ("holds", "outbox", "dead_letters", "idempotency_keys"):
    PRUNED.labels(_table)

log = structlog.get_logger()

CLOCK = "SELECT clock_timestamp()"
# Ids are ordered by the time of placing, so the primary key finds what is old. Long holds that are still
# held, or ended lately, stay.
OLD_HOLDS = """
SELECT id, state <> 'held' AND coalesce(returned_at, ended_at) < $2 AS old FROM holds
 WHERE id > $1 AND id < $3 ORDER BY id LIMIT $4
"""
FORGET = "SELECT expiry_forget($1)"
# Each tenant's oldest event is one probe of the primary key away, and so is the next tenant.
TENANTS_WITH_OLD_EVENTS = """
WITH RECURSIVE tenant AS (
    (SELECT o.tenant_id FROM outbox o WHERE o.tenant_id > '' ORDER BY o.tenant_id LIMIT 1)
    UNION ALL
    SELECT (SELECT o.tenant_id FROM outbox o WHERE o.tenant_id > t.tenant_id ORDER BY o.tenant_id LIMIT 1)
      FROM tenant t WHERE t.tenant_id IS NOT NULL
)
SELECT t.tenant_id FROM tenant t
 CROSS JOIN LATERAL (SELECT o.occurred_at FROM outbox o WHERE o.tenant_id = t.tenant_id
                      ORDER BY o.epoch, o.xid, o.id LIMIT 1) oldest
 WHERE oldest.occurred_at < $1 LIMIT $2
"""
PRUNE_OUTBOX = "SELECT expiry_forget_events($3, $1, $2)"
PRUNE_DEAD_LETTERS = """
WITH gone AS (
    DELETE FROM dead_letters WHERE id IN (
        SELECT d.id FROM dead_letters d
         WHERE d.resolved_at < $1
           AND NOT EXISTS (SELECT FROM holds h WHERE h.id = d.hold_id AND h.state || '' = 'held')
         ORDER BY d.id LIMIT $2)
    RETURNING 1
)
SELECT count(*) FROM gone
"""
# Index: idempotency_keys_by_age.
PRUNE_IDEMPOTENCY_KEYS = """
WITH gone AS (
    DELETE FROM idempotency_keys k USING (
        SELECT tenant_id, route, key FROM idempotency_keys WHERE created_at < $1 ORDER BY created_at LIMIT $2) old
     WHERE k.tenant_id = old.tenant_id AND k.route = old.route AND k.key = old.key
    RETURNING 1
)
SELECT count(*) FROM gone
"""


@dataclass(slots=True)
class Prune:
    """One pass after another over what has outlived its retention."""

    pool: "asyncpg.Pool[asyncpg.Record]"
    permits: Permits
    settings: Settings
    stop: asyncio.Event
    paused: Callable[[], bool]
    _cursor: UUID = field(default=UUID(int=0), init=False)  # a pass that was cut short is continued

    async def one_pass(self) -> int:
        """Delete what is old, as far as permits are left over; answer how many rows."""
        now: datetime = await self.pool.fetchval(CLOCK)
        kept_since = now - timedelta(seconds=self.settings.retention_s)
        total = await self._holds(kept_since)
        for row in await self.pool.fetch(TENANTS_WITH_OLD_EVENTS, kept_since, TENANTS_MAX):
            total += await self._rows("outbox", PRUNE_OUTBOX, kept_since, row["tenant_id"])
        total += await self._rows("dead_letters", PRUNE_DEAD_LETTERS, kept_since)
        keys_since = now - timedelta(seconds=KEYS_KEPT_S)
        total += await self._rows("idempotency_keys", PRUNE_IDEMPOTENCY_KEYS, keys_since)
        if total:
            log.info("rows.pruned", rows=total)
        return total

    async def _holds(self, kept_since: datetime) -> int:
        gone = 0
        before = UUID(int=int(kept_since.timestamp() * 1000) << 80)
        while granted := await self._granted():
            rows = await self.pool.fetch(OLD_HOLDS, self._cursor, kept_since, before, granted)
            self._cursor = rows[-1]["id"] if rows else UUID(int=0)
            old = [row["id"] for row in rows if row["old"]]
            gone += await self.pool.fetchval(FORGET, old) if old else 0
            await self.permits.refund(granted - len(rows))
            if not rows:
                break
        PRUNED.labels("holds").inc(gone)
        return gone

    async def _rows(self, table: str, statement: str, since: datetime, *args: str) -> int:
        gone = 0
        while granted := await self._granted():
            deleted: int = await self.pool.fetchval(statement, since, granted, *args)
            PRUNED.labels(table).inc(deleted)
            gone += deleted
            await self.permits.refund(granted - deleted)
            if deleted < granted:
                break
        return gone

    async def _granted(self) -> int:
        """Take permits for a batch, if there are any at once; what expiry needs is not waited for."""
        if self.stop.is_set() or self.paused():
            return 0
        want = int(self.permits.governor.ceiling_per_s * BATCH_S_OF_ALLOWANCE)
        return await self.permits.take(max(1, min(BATCH_MAX, want)), timeout_s=0, priority=Priority.PRUNE)
