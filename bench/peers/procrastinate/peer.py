"""procrastinate, one job a hold, in the same PostgreSQL.

`concurrency` as high as the work can use; `delete_jobs` successful, which its docs advise to keep the table
small; deferred in batches.
"""

import logging
import os
import sys
import time
from datetime import UTC, datetime

import uvloop
from common import Work, holds, later_s, say
from procrastinate import App, PsycopgConnector

AT_ONCE = 1000
CONCURRENCY = 30
app = App(
    connector=PsycopgConnector(
        conninfo=os.environ["DATABASE_URL"], min_size=CONCURRENCY // 2, max_size=CONCURRENCY // 2
    )
)
work = Work()


@app.task(name="expire", queue="expire")
async def expire(hold_id: str, generation: int) -> None:
    await work.expire(hold_id, generation)


async def fill(path: str) -> None:
    wanted = holds(path)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        started_s = time.perf_counter()
        now, later = [], []
        for hold_id, generation, due_ms in wanted:
            job = {"hold_id": hold_id, "generation": generation}
            later.append((due_ms, job)) if later_s(due_ms) else now.append(job)
        for first in range(0, len(now), AT_ONCE):
            await expire.batch_defer_async(*now[first : first + AT_ONCE])
        for due_ms, job in later:  # a batch has one time for all
            at = datetime.fromtimestamp(due_ms / 1000, UTC)
            await expire.configure(schedule_at=at).defer_async(**job)
        say(len(wanted), time.perf_counter() - started_s)


async def main() -> None:
    await work.connect()
    async with app.open_async():
        await app.run_worker_async(concurrency=CONCURRENCY, delete_jobs="successful")


logging.basicConfig(level=logging.WARNING)
uvloop.run(fill(sys.argv[2]) if sys.argv[1] == "fill" else main())
