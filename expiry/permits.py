"""Where the loops of the fleet get their permits, and who says how many there are.

Until a controller steers it the allowance is fixed at the ceiling. It lives in Redis, beside the wake-ups;
PostgreSQL's row stands in while Redis is away, and is the only one where there is no Redis.
"""

import math
import time
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from governor import Bucket, BucketUnavailable, GovernorSettings, Limiter

PUBLISH_INTERVAL_S = 2.0
PUBLISHED_FOR_S = 3 * PUBLISH_INTERVAL_S + 1  # one lost publication must not drop the fleet to the floor
PRIMARY_AVOIDED_S = 5.0  # after it failed: a Redis that hangs would cost its timeout at every batch
BATCH_S_OF_ALLOWANCE = 0.2  # a batch is at most this much of the allowance, so that the flow is smooth

GATHER_S = 0.05  # who is short of permits comes this often, so that statements stay batches

log = structlog.get_logger()


def batch_size(batch_max: int, allowance_per_s: float) -> int:
    """Answer how many holds one statement may take at this allowance: 1..batch_max."""
    return max(1, min(batch_max, int(allowance_per_s * BATCH_S_OF_ALLOWANCE)))


@dataclass(slots=True)
class Permits:
    """Permits from the first bucket that answers."""

    primary: Bucket | None  # Redis
    fallback: Bucket  # PostgreSQL: who has no PostgreSQL needs no permit
    governor: GovernorSettings
    _avoid_until_s: float = field(default=0.0, init=False)
    _limiters: dict[int, Limiter] = field(default_factory=dict, init=False)

    async def publish(self) -> None:
        """Publish the fixed allowance for a while; run it every PUBLISH_INTERVAL_S.

        Only one bucket may have it, or the fleet would start twice as much: whoever reaches Redis says so
        in PostgreSQL, with an epoch that is ahead of the clock; the row takes the allowance only when
        nobody has said so for as long as Redis would still grant it.
        """
        ceiling = {"allowance_per_s": self.governor.ceiling_per_s, "ttl_s": PUBLISHED_FOR_S}
        if self.primary in self._in_order():
            try:
                await self.primary.publish(**ceiling, epoch=0)
            except BucketUnavailable:
                self._avoid(self.primary)
            else:
                floor = {"allowance_per_s": self.governor.floor_per_s, "ttl_s": PUBLISHED_FOR_S}
                with suppress(BucketUnavailable):
                    epoch = await self._database_s() + math.ceil(PUBLISHED_FOR_S) + 1
                    await self.fallback.publish(**floor, epoch=epoch)
                return
        with suppress(BucketUnavailable):
            await self.fallback.publish(**ceiling, epoch=await self._database_s())

    async def _database_s(self) -> int:
        # Of the bucket's own clock: one process whose clock is a day ahead must not fence the others off.
        return (await self.fallback.read()).micros // 1_000_000

    async def take(self, want: int, *, timeout_s: float) -> int:
        """Answer 1..want permits, or 0 when there was none within `timeout_s`.

        Raises BucketUnavailable when neither bucket answers.
        """
        for bucket in self._in_order():
            limiter = self._limiters.setdefault(id(bucket), Limiter(bucket))
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

    def _in_order(self) -> list[Bucket]:
        if self.primary is None or time.monotonic() < self._avoid_until_s:
            return [self.fallback]
        return [self.primary, self.fallback]

    def _avoid(self, bucket: Bucket) -> None:
        if bucket is self.primary:
            self._avoid_until_s = time.monotonic() + PRIMARY_AVOIDED_S
            log.warning("permits.moved", to="postgresql", for_s=PRIMARY_AVOIDED_S)
