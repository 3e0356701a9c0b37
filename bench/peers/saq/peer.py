"""SAQ on Redis, one job a hold.

`concurrency` as high as the work can use; hiredis, which the README offers as an extra; finished jobs are
not kept (`ttl` -1); deadlines are whole seconds and looked at once a second, so it takes no part in the lag.
`max_concurrent_ops`, which bounds a producer's connections, is raised for the enqueueing.
"""

import asyncio
import logging
import math
import os
import sys
import time

import uvloop
from common import Work, holds, later_s, say
from saq import Queue, Worker

AT_ONCE = 200
work = Work()


async def expire(_ctx: dict, *, hold_id: str, generation: int) -> None:
    await work.expire(hold_id, generation)


async def fill(path: str) -> None:
    queue = Queue.from_url(os.environ["REDIS_URL"], max_concurrent_ops=100)
    await queue.connect()
    wanted = holds(path)
    started_s = time.perf_counter()
    for first in range(0, len(wanted), AT_ONCE):
        await asyncio.gather(
            *(
                queue.enqueue(
                    "expire",
                    key=f"{hold_id}:{generation}",
                    scheduled=math.ceil(due_ms / 1000) if later_s(due_ms) else 0,
                    ttl=-1,
                    hold_id=hold_id,
                    generation=generation,
                )
                for hold_id, generation, due_ms in wanted[first : first + AT_ONCE]
            )
        )
    say(len(wanted), time.perf_counter() - started_s)
    await queue.disconnect()


async def main() -> None:
    await work.connect()
    queue = Queue.from_url(os.environ["REDIS_URL"])
    await Worker(queue, functions=[expire], concurrency=50).start()


logging.basicConfig(level=logging.WARNING)
uvloop.run(fill(sys.argv[2]) if sys.argv[1] == "fill" else main())
