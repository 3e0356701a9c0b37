"""Where the loops of the fleet get their permits, and what the governor is told of their attempts.

Permits are in Redis, beside the wake-ups; PostgreSQL's row stands in while Redis is away, and is the only
bucket where there is no Redis. How many there are says the governor's controller; where that is off or only
observes, the allowance is fixed at the ceiling, and every process publishes that.
"""

import math
import time
from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import asyncpg
import structlog

from expiry.expire import Outcome
from expiry.holds import Conn
from governor import Bucket, BucketUnavailable, GovernorSettings, Limiter, Outcomes, Priority
from governor.controller import DEAD_INTERVALS
from governor.probes.pool_wait import Waits
from governor.telemetry import CUTS

FLEET = "expiry"  # of governor_lease, governor_journal and governor_orders: one database, one budget
PUBLISH_INTERVAL_S = 2.0
PUBLISHED_FOR_S = 3 * PUBLISH_INTERVAL_S + 1  # one lost publication must not drop the fleet to the floor
PRIMARY_AVOIDED_S = 5.0  # after it failed: a Redis that hangs would cost its timeout at every batch
BATCH_S_OF_ALLOWANCE = 0.2  # a batch is at most this much of the allowance, so that the flow is smooth
# Who comes for one permit when one is there gets all it asks for: at 5/s a fleet with a backlog would look idle.
BATCH_MIN = 2
GOVERNOR_GONE_S = 60.0  # a controller that has published nothing for so long was turned off
CUT_FACTOR = 0.5

GATHER_S = 0.05  # who is short of permits comes this often, so that statements stay batches

# Of the dependency, and passing: connection, rollback, resources, locks, operator, system.
_TRANSIENT = frozenset({"08", "40", "53", "55", "57", "58"})

log = structlog.get_logger()


def batch_size(batch_max: int, allowance_per_s: float) -> int:
    """Answer how many holds one statement may take at this allowance: BATCH_MIN..batch_max."""
    return min(batch_max, max(BATCH_MIN, int(allowance_per_s * BATCH_S_OF_ALLOWANCE)))


def failure_of(error: BaseException) -> str | None:
    """Name what the governor is told: `timed_out`, `failed`; None for what is no matter of load."""
    if isinstance(error, asyncpg.QueryCanceledError | TimeoutError):
        return "timed_out"
    if isinstance(error, asyncpg.PostgresError):
        return "failed" if (error.sqlstate or "")[:2] in _TRANSIENT else None
    return "failed" if isinstance(error, asyncpg.InterfaceError | OSError) else None


@dataclass(slots=True)
class Permits:
    """Permits from the first bucket that answers."""

    primary: Bucket | None  # Redis
    fallback: Bucket  # PostgreSQL: who has no PostgreSQL needs no permit
    governor: GovernorSettings
    outcomes: Outcomes = field(default_factory=Outcomes)
    waits: Waits = field(default_factory=Waits)  # for connections of the loops' pool
    moved: Callable[[], bool] = lambda: False  # whether the allowance is at the fallback
    _avoid_until_s: float = field(default=0.0, init=False)
    _limiters: dict[tuple[int, Priority], Limiter] = field(default_factory=dict, init=False)

    async def publish(self) -> None:
        """Publish the fixed allowance for a while; run it every PUBLISH_INTERVAL_S where nobody governs.

        Only one bucket may have it, or the fleet would start twice as much: whoever reaches Redis says so
        in PostgreSQL, with an epoch that is ahead of the clock; the row takes the allowance only when
        nobody has said so for as long as Redis would still grant it.
        """
        ceiling_per_s = self.governor.ceiling_per_s
        if self.primary in self._in_order():
            try:
                await self._publish_fixed(self.primary)
            except BucketUnavailable:
                self._avoid(self.primary)
            else:
                with suppress(BucketUnavailable):
                    epoch = await self._database_s() + math.ceil(PUBLISHED_FOR_S) + 1
                    await self.fallback.publish(
                        allowance_per_s=self.governor.floor_per_s, ttl_s=PUBLISHED_FOR_S, epoch=epoch
                    )
                return
        with suppress(BucketUnavailable):
            await self.fallback.publish(
                allowance_per_s=ceiling_per_s, ttl_s=PUBLISHED_FOR_S, epoch=await self._database_s()
            )

    async def _publish_fixed(self, bucket: Bucket) -> None:
        done = await bucket.publish(
            allowance_per_s=self.governor.ceiling_per_s, ttl_s=PUBLISHED_FOR_S, epoch=0
        )
        if done.accepted:
            return
        # A controller was here. While one is alive it overrules a fixed allowance; once it is turned off,
        # its epoch must not keep the fleet at the floor for ever.
        state = await bucket.read()
        if state.micros - state.until > GOVERNOR_GONE_S * 1_000_000:
            await bucket.publish(
                allowance_per_s=self.governor.ceiling_per_s, ttl_s=PUBLISHED_FOR_S, epoch=state.epoch
            )

    async def _database_s(self) -> int:
        # Of the bucket's own clock: one process whose clock is a day ahead must not fence the others off.
        return (await self.fallback.read()).micros // 1_000_000

    async def take(self, want: int, *, timeout_s: float, priority: Priority = Priority.EXPIRE) -> int:
        """Answer 1..want permits, or 0 when there was none within `timeout_s`.

        Raises BucketUnavailable when neither bucket answers.
        """
        for bucket in self._in_order():
            limiter = self._limiters.get((id(bucket), priority))
            if limiter is None:
                limiter = self._limiters[id(bucket), priority] = Limiter(bucket, priority=priority)
            try:
                return await limiter.acquire(want, timeout_s=timeout_s)
            except BucketUnavailable:
                if bucket is self.fallback:
                    raise
                self._avoid(bucket)
        raise BucketUnavailable

    async def refund(self, n: int) -> None:
        """Give back permits that started nothing; losing them in an outage only slows us down."""
        bucket = self._in_order()[0]
        try:
            await bucket.refund(n)
        except BucketUnavailable:
            self._avoid(bucket)

    @asynccontextmanager
    async def connection(self, pool: "asyncpg.Pool[asyncpg.Record]") -> AsyncIterator[Conn]:
        """Take a connection for a batch; how long that takes is a signal: more work would only queue there."""
        with self.waits.waiting():
            conn = await pool.acquire()
        try:
            yield conn
        finally:
            await pool.release(conn)

    def note(self, outcomes: Iterable[Outcome]) -> None:
        """Count attempts that ended; contended ones and rows at fault say nothing of the database."""
        self.outcomes.note(completed=Tally(o.kind for o in outcomes)["expired"])

    async def note_failure(self, error: BaseException, n: int) -> None:
        """Count n attempts that this error ended, and brake at once if it says that the database is overrun."""
        kind = failure_of(error)
        if kind is None:
            return
        self.outcomes.note(**{kind: n})
        if isinstance(error, asyncpg.TooManyConnectionsError):
            await self._cut("too_many_clients")
        elif self.outcomes.burst:
            await self._cut("timeouts")

    async def _cut(self, cause: str) -> None:
        """Halve the allowance, once per dead time in the whole fleet; lowering needs no leader."""
        if self.governor.mode != "enforce":
            return
        dead_time_s = DEAD_INTERVALS * self.governor.interval_s
        with suppress(BucketUnavailable):
            done = await self._in_order()[0].cut(factor=CUT_FACTOR, dead_time_s=dead_time_s)
            if done.applied:
                CUTS.labels(cause).inc()
                log.warning("rate.cut", cause=cause, allowance_per_s=done.allowance_per_s)

    def _in_order(self) -> list[Bucket]:
        if self.primary is None or self.moved() or time.monotonic() < self._avoid_until_s:
            return [self.fallback]
        return [self.primary, self.fallback]

    def _avoid(self, bucket: Bucket) -> None:
        if bucket is self.primary:
            self._avoid_until_s = time.monotonic() + PRIMARY_AVOIDED_S
            log.warning("permits.moved", to="postgresql", for_s=PRIMARY_AVOIDED_S)
