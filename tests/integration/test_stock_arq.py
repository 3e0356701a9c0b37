"""Side by side with stock arq: its worker runs our queue, and its jobs survive ours."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from arq import Worker
from redis.asyncio import Redis

from expiry.expire import Wake
from expiry.settings import Settings
from expiry.wakeups import connect_redis, deserialize, job_id
from expiry.wanted import uuid7
from expiry.worker import expire
from tests.faults import POISON
from tests.fleet import (
    Counted,
    Pool,
    assert_kept,
    due,
    expired,
    overdue,
    placed,
    settings_for,
    states,
    wakeups_on,
    working,
)
from tests.helpers import eventually
from tests.wakes import scores


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    """Give settings of a service on this queue."""
    return settings_for(database_url, redis_url)


@asynccontextmanager
async def stock_worker(pool: Pool, settings: Settings) -> AsyncIterator[Worker]:
    """Give an arq worker as anybody would write it, that ends when the queue is empty."""
    redis = connect_redis(settings)
    try:
        yield Worker(
            functions=[expire],
            queue_name=settings.queue,
            redis_pool=redis,
            job_deserializer=deserialize,
            keep_result=0,
            ctx={"pool": pool, "settings": settings},
            burst=True,
            handle_signals=False,
            poll_delay=0.02,
        )
    finally:
        await redis.aclose()  # Worker.close() calls what redis-py has deprecated


async def test_a_stock_worker_runs_our_queue_to_the_end(pool: Pool, redis: Redis, settings: Settings) -> None:
    """Holds expire once each, ended and missing ones are no-ops, and nothing is left in Redis."""
    holds = await overdue(pool, 20)
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue_due([*due(holds), (Wake(uuid7(), 1), holds[0].expires_at)])
    async with stock_worker(pool, settings) as worker:
        await worker.main()
    assert (worker.jobs_complete, worker.jobs_failed) == (21, 0)
    assert await states(pool) == {"expired": 20}
    assert await redis.keys("arq:job:*") == []
    assert await scores(redis) == {}
    await assert_kept(pool)


async def test_a_stock_worker_retries_what_is_early(pool: Pool, settings: Settings) -> None:
    """A score before the deadline: the row decides, and the job comes again when it is due."""
    [hold] = await placed(pool, 1, ttl_s=1.2)
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue_due([(Wake(hold.id, 1), hold.expires_at - timedelta(seconds=2))])
    async with stock_worker(pool, settings) as worker:
        await worker.main()
    assert (worker.jobs_complete, worker.jobs_retried, worker.jobs_failed) == (1, 1, 0)
    assert await states(pool) == {"expired": 1}
    await assert_kept(pool)


async def test_a_stock_worker_retries_a_row_at_fault_by_our_count(pool: Pool, settings: Settings) -> None:
    """Its attempts are kept on the row, and the last makes a dead letter, as with our worker."""
    await pool.execute(POISON)
    holds = await overdue(pool, 1, resource="poison{}")
    strict = settings.model_copy(update={"attempts_max": 2, "retry_base_s": 0.05})
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue(holds)
    async with stock_worker(pool, strict) as worker:
        await worker.main()
    assert worker.jobs_retried == 1
    row = await pool.fetchrow("SELECT state, attempts FROM dead_letters")
    assert row is not None
    assert tuple(row) == ("open", 2)


async def test_both_workers_on_one_queue_end_each_hold_once(pool: Pool, settings: Settings) -> None:
    """A fleet may be moved from one to the other while it runs."""
    holds = await overdue(pool, 200)
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue(holds)
    small = settings.model_copy(update={"batch_max": 3, "batches_in_flight_max": 1})
    async with stock_worker(pool, settings) as stock, working(pool, small):
        await stock.main()
        await eventually(expired(pool, 200))
    await assert_kept(pool)


class Bomb:
    """Goes off when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("a pickle was loaded",)


BOMB = pickle.dumps(Bomb())


def test_a_pickle_really_goes_off() -> None:
    """What the next tests rely on: whoever unpickles this is found out."""
    with pytest.raises(pytest.fail.Exception, match="a pickle was loaded"):
        pickle.loads(BOMB)  # noqa: S301


@pytest.mark.parametrize(
    "body", [BOMB, pickle.dumps({"f": "expire"}), b"", b"\x00", b"[]", b'"expire"', b"null", b"\xff"]
)
def test_our_deserializer_reads_json_objects_only(body: bytes) -> None:
    """Anything else is refused with an error and never looked into."""
    with pytest.raises((ValueError, TypeError)):
        deserialize(body)


async def test_jobs_of_others_are_neither_run_nor_lost(pool: Pool, redis: Redis, settings: Settings) -> None:
    """Stock jobs in our set, pickles among them, are moved aside as they are; our holds expire."""
    async with Redis.from_url(settings.redis_url.get_secret_value()) as client:
        bodies = {b"job-1": BOMB, b"job-2": pickle.dumps({"f": "send", "a": (), "k": {}, "t": 1, "et": 0})}
        for id_, body in bodies.items():
            await client.zadd(settings.queue, {id_: 5})
            await client.set(b"arq:job:" + id_, body, px=60_000)
    holds = await overdue(pool, 3)
    counted = Counted()
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue(holds)
        async with working(pool, settings):
            await eventually(expired(pool, 3))
    assert counted("expiry_wakeups_unknown_total") == 2
    assert await scores(redis, f"{settings.queue}:unknown") == {b"job-1": 5.0, b"job-2": 5.0}
    assert {i: await redis.get(b"arq:job:" + i) for i in bodies} == bodies
    assert await scores(redis) == {}


async def test_a_body_that_is_no_json_harms_no_hold(pool: Pool, redis: Redis, settings: Settings) -> None:
    """Our id with somebody's pickle for a body: the id says all, so the hold expires and nothing goes off."""
    [hold] = await overdue(pool, 1)
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue([hold])
        await redis.set(f"arq:job:{job_id(Wake(hold.id, 1))}", BOMB)
        async with working(pool, settings):
            await eventually(expired(pool, 1))
    await assert_kept(pool)
