"""arq, one job a hold.

Fast: `max_jobs` as high as the work can use, `poll_delay` low and `keep_result` 0 (all in the API reference);
`queue_read_limit` well above `max_jobs`, for jobs in flight stay at the head of the queue. Results are not
logged. Stock: all as it comes. There is no bulk enqueue; jobs are enqueued concurrently.
"""

import asyncio
import logging
import os
import sys
import time
from datetime import UTC, datetime

import uvloop
from arq import create_pool, func
from arq.connections import RedisSettings
from arq.worker import Worker
from common import FAST, Work, holds, later_s, say

AT_ONCE = 200
SETTINGS = RedisSettings.from_dsn(os.environ["REDIS_URL"])
WORKER = {
    "max_jobs": 100,
    "queue_read_limit": 1000,
    "poll_delay": 0.02,
    "keep_result": 0,
    "log_results": False,
}
work = Work()


async def expire(_ctx: dict, hold_id: str, generation: int) -> None:
    await work.expire(hold_id, generation)


async def fill(path: str) -> None:
    redis = await create_pool(SETTINGS)
    wanted = holds(path)
    started_s = time.perf_counter()
    for first in range(0, len(wanted), AT_ONCE):
        await asyncio.gather(
            *(
                redis.enqueue_job(
                    "expire",
                    hold_id,
                    generation,
                    _job_id=f"{hold_id}:{generation}",
                    _defer_until=datetime.fromtimestamp(due_ms / 1000, UTC) if later_s(due_ms) else None,
                )
                for hold_id, generation, due_ms in wanted[first : first + AT_ONCE]
            )
        )
    say(len(wanted), time.perf_counter() - started_s)
    for number in range(
        int(os.environ.get("IN_FLIGHT", "0"))
    ):  # as another worker leaves them while it runs them
        await redis.enqueue_job("expire", "elsewhere", number, _job_id=f"elsewhere:{number}")
        await redis.set(f"arq:in-progress:elsewhere:{number}", b"1", ex=600)


async def main() -> None:
    await work.connect()
    poll = {"poll_delay": float(os.environ["POLL_DELAY_S"])} if "POLL_DELAY_S" in os.environ else {}
    worker = Worker([func(expire)], redis_settings=SETTINGS, **(WORKER if FAST else {}), **poll)
    await worker.main()


if sys.argv[1] == "fill":
    uvloop.run(fill(sys.argv[2]))
else:
    logging.basicConfig(level=logging.INFO if not FAST else logging.WARNING)
    uvloop.run(main())
