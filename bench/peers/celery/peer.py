"""Celery on a Redis broker, one task a hold.

From its guide to optimizing: a high `worker_prefetch_multiplier` for short tasks, results ignored, and what
workers tell one another turned off. `acks_late`, for a task must be acknowledged after its commit, as
everybody's here. The pool is the one that was the fastest for this work: POOL says which.
"""

import json
import os
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from celery import Celery

POOL = os.environ.get("POOL", "prefork")
CONCURRENCY = os.environ.get("CONCURRENCY", "4")
app = Celery("peer", broker=os.environ["REDIS_URL"])
app.conf.update(
    task_ignore_result=True,
    task_acks_late=True,
    worker_prefetch_multiplier=128,
    worker_enable_remote_control=False,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
)
statement = os.environ["EXPIRE_SQL"]
here = threading.local()


@app.task(name="expire")
def expire(hold_id: str, generation: int) -> None:
    import psycopg  # noqa: PLC0415 - after gevent has patched what it uses

    if not hasattr(here, "cursor"):
        conn = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True, prepare_threshold=0)
        here.cursor = psycopg.RawCursor(conn)
    for _ in range(100):
        if here.cursor.execute(statement, (hold_id, generation)).rowcount:
            return
        print("early", flush=True)
        time.sleep(0.001)


def fill(path: str) -> None:
    lines = [line.split("\t") for line in Path(path).read_text().splitlines()]
    started_s = time.perf_counter()
    with app.producer_pool.acquire(block=True) as producer:
        for hold_id, generation, due_ms in lines:
            due_s = int(due_ms) / 1000
            eta = datetime.fromtimestamp(due_s, UTC) if due_s > time.time() else None
            expire.apply_async((hold_id, int(generation)), eta=eta, producer=producer)
    print(json.dumps({"n": len(lines), "seconds": time.perf_counter() - started_s}))


if sys.argv[1] == "fill":
    fill(sys.argv[2])
else:
    sys.argv = ["celery"]
    app.worker_main(
        [
            *("worker", "--pool", POOL, "--concurrency", CONCURRENCY, "--loglevel", "WARNING"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        ]
    )
