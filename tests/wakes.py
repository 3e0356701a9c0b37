"""What tests of single queue operations share: wake-ups without holds, a bucket to be filled, the set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from redis.asyncio import Redis

from expiry.expire import Wake
from expiry.wakeups import Wakeups
from expiry.wanted import uuid7
from governor import GovernorSettings, RedisBucket

FROZEN = GovernorSettings(floor_per_s=0.001)  # next to nothing flows into the bucket by itself


def some(n: int, *, due_in_s: float = -1) -> list[tuple[Wake, datetime]]:
    """Return n wake-ups with the same deadline, of holds that nobody placed."""
    at = datetime.now(UTC) + timedelta(seconds=due_in_s)
    return [(Wake(uuid7(), 1), at) for _ in range(n)]


async def fill(wakeups: Wakeups, *, allowance_per_s: float = 100_000) -> RedisBucket:
    """Set the allowance, and let the bucket hold all it may: a quarter of a second of it."""
    bucket = RedisBucket(wakeups.redis, wakeups.bucket_key, floor_per_s=FROZEN.floor_per_s)
    await bucket.publish(allowance_per_s=allowance_per_s, ttl_s=60, epoch=0)
    await bucket.refund(100_000)
    return bucket


async def scores(redis: Redis, queue: str = "expiry:wakeups") -> dict[bytes, float]:
    """Return what is in the set."""
    return dict(await redis.zrange(queue, 0, -1, withscores=True))


def emptied(redis: Redis, queue: str = "expiry:wakeups") -> Callable[[], Awaitable[bool]]:
    """Return a check for `eventually`: no wake-up is left."""

    async def check() -> bool:
        return not await redis.exists(queue)

    return check
