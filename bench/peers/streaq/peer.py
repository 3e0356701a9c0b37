"""streaQ, one task a hold.

`concurrency` and `prefetch` as high as the work can use; no results kept (`ttl` 0), no log of each task
(`silent`); `enqueue_many`, its pipeline, for the enqueueing.
"""

import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import uvloop
from common import Work, holds, later_s, say
from streaq import Worker

AT_ONCE = 1000
work = Work()


@asynccontextmanager
async def lifespan() -> AsyncIterator[None]:
    await work.connect()
    yield
    await work.close()


worker = Worker(
    redis_url=os.environ["REDIS_URL"],
    concurrency=100,
    prefetch=100,
    lifespan=lifespan,
    anyio_kwargs={"use_uvloop": True},
)


@worker.task(ttl=0, silent=True)
async def expire(hold_id: str, generation: int) -> None:
    await work.expire(hold_id, generation)


async def fill(path: str) -> None:
    wanted = holds(path)
    async with worker:
        started_s = time.perf_counter()
        for first in range(0, len(wanted), AT_ONCE):
            tasks = []
            for hold_id, generation, due_ms in wanted[first : first + AT_ONCE]:
                task = expire.enqueue(hold_id, generation)
                if later_s(due_ms):
                    task = task.start(schedule=datetime.fromtimestamp(due_ms / 1000, UTC))
                tasks.append(task)
            await worker.enqueue_many(tasks)
        say(len(wanted), time.perf_counter() - started_s)


if sys.argv[1] == "fill":
    uvloop.run(fill(sys.argv[2]))
else:
    worker.run_sync()
