"""PgQueuer, one job a hold, in the same PostgreSQL.

A larger `batch_size` than its 10, as its guide advises for throughput; jobs are enqueued in lists; its tables
keep the durability that they come with (logged), as the acknowledgement has to survive a crash.
"""

import logging
import os
import sys
import time
from datetime import timedelta

import asyncpg
import uvloop
from common import Work, holds, later_s, say
from pgqueuer import AsyncpgDriver, PgQueuer, Queries

AT_ONCE = 1000
work = Work()


async def fill(path: str) -> None:
    conn = await asyncpg.connect(os.environ["DATABASE_URL"])
    queries = Queries(AsyncpgDriver(conn))
    await queries.install()
    wanted = holds(path)
    started_s = time.perf_counter()
    for first in range(0, len(wanted), AT_ONCE):
        some = wanted[first : first + AT_ONCE]
        await queries.enqueue(
            ["expire"] * len(some),
            [f"{hold_id} {generation}".encode() for hold_id, generation, _ in some],
            [0] * len(some),
            [timedelta(seconds=later_s(due_ms)) for _, _, due_ms in some],
        )
    say(len(wanted), time.perf_counter() - started_s)
    await conn.close()


async def main() -> None:
    await work.connect()
    pgq = PgQueuer.from_asyncpg_connection(await asyncpg.connect(os.environ["DATABASE_URL"]))

    @pgq.entrypoint("expire")
    async def expire(job) -> None:
        hold_id, generation = job.payload.decode().split()
        await work.expire(hold_id, int(generation))

    await pgq.run(batch_size=100, dequeue_timeout=timedelta(seconds=30))


logging.basicConfig(level=logging.WARNING)
uvloop.run(fill(sys.argv[2]) if sys.argv[1] == "fill" else main())
