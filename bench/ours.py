"""This service as the bench runs it: wake-ups by its own client, then `expiry worker` as in production.

python -m bench.ours fill|zadd HOLDS_FILE
"""

import json
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import uvloop
from redis.asyncio import Redis

from expiry.expire import Wake
from expiry.settings import Settings
from expiry.wakeups import Wakeups, connect_redis, job_id
from governor import GovernorSettings

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BULK = 1000


async def fill(wakes: list[tuple[Wake, int]]) -> float:
    """Enqueue as whoever placed the holds does, one call after another; answer the seconds."""
    settings = Settings.model_validate({"redis_url": os.environ["REDIS_URL"]})
    wakeups = Wakeups(connect_redis(settings), settings, GovernorSettings())
    due = [(wake, EPOCH + timedelta(milliseconds=ms)) for wake, ms in wakes]
    started_s = time.perf_counter()
    await wakeups.enqueue_due(due)
    seconds = time.perf_counter() - started_s
    await wakeups.redis.aclose()
    return seconds


async def zadd(wakes: list[tuple[Wake, int]]) -> float:
    """Add the same members to a sorted set and do nothing else: what Redis and its client can do."""
    redis = Redis.from_url(os.environ["REDIS_URL"])
    members = [(job_id(wake), ms) for wake, ms in wakes]
    started_s = time.perf_counter()
    for first in range(0, len(members), BULK):
        await redis.zadd("members", dict(members[first : first + BULK]))
    seconds = time.perf_counter() - started_s
    await redis.aclose()
    return seconds


def main() -> None:
    """Read the holds, enqueue, and print what it took."""
    verb, path = sys.argv[1:]
    start_ms = os.environ.get("START_MS")  # a drain: all look at once, at this time
    wakes = []
    for line in Path(path).read_text().splitlines():
        hold_id, generation, due_ms = line.split("\t")
        wakes.append((Wake(UUID(hold_id), int(generation)), int(start_ms or due_ms)))
    seconds = uvloop.run({"fill": fill, "zadd": zadd}[verb](wakes))
    print(json.dumps({"n": len(wakes), "seconds": seconds}))


if __name__ == "__main__":
    main()
