"""The three forms of the bucket agree on one clock; the shared two are safe on their servers'."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import asyncpg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from governor import (
    GOVERNOR_BUCKET_DDL,
    Bucket,
    BucketUnavailable,
    Limiter,
    LocalBucket,
    PostgresBucket,
    RedisBucket,
    bucket_library,
)
from tests.buckets import FLOOR_PER_S, STEPS, Clock, Step
from tests.helpers import eventually

Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"
Make: TypeAlias = Callable[..., Bucket]

NAME = "expire"
# A burst of 3/s is less than one of the floor: to be seen for 50 ms after the lapse, so not left
# to chance.
LAPSE_OF_A_LOW_ALLOWANCE = [
    Step(
        elapsed_us=0,
        operation="publish",
        args={"allowance_per_s": 3.0, "ttl_s": 6.0, "epoch": 1},
    ),
    Step(elapsed_us=6_010_000, operation="take", args={"n": 0}),
]


@pytest.fixture(params=["redis", "postgres"])
def make(request: pytest.FixtureRequest, redis: Redis, pool: Pool) -> Make:
    """Give the test each shared form: `make()` is one more worker at the same bucket."""

    def bucket(**options: Any) -> Bucket:  # noqa: ANN401 - as the constructors have them
        if request.param == "redis":
            return RedisBucket(redis, NAME, floor_per_s=FLOOR_PER_S, **options)
        return PostgresBucket(pool, NAME, floor_per_s=FLOOR_PER_S, **options)

    return bucket


@settings(
    max_examples=40,
    deadline=None,  # two servers answer
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # each example empties both
)
@example(steps=LAPSE_OF_A_LOW_ALLOWANCE, back_us=[0, 0])
@given(steps=STEPS, back_us=st.lists(st.sampled_from([0, 0, 0, 900_000, 1_500_000]), min_size=40))
async def test_the_three_forms_agree(steps: list[Step], back_us: list[int], redis: Redis, pool: Pool) -> None:
    """Whatever happens in whatever order, all three say and hold the same, to the nano-permit."""
    await redis.flushdb()
    await pool.execute("DELETE FROM governor_bucket")
    clock = Clock()
    forms: list[Bucket] = [
        LocalBucket(floor_per_s=FLOOR_PER_S, clock_us=clock),
        RedisBucket(redis, NAME, floor_per_s=FLOOR_PER_S, clock_us=clock),
        PostgresBucket(pool, NAME, floor_per_s=FLOOR_PER_S, clock_us=clock),
    ]
    for form in forms:
        await form.take(0)  # a bucket begins with its first call, the one in process with its birth
    for step, step_back_us in zip(steps, back_us, strict=False):
        clock.us += step.elapsed_us
        said = [await step.on(form) for form in forms]
        assert said[0] == said[1] == said[2]
        clock.us -= step_back_us
        held = [await form.read() for form in forms]
        assert held[0] == held[1] == held[2]


async def test_many_workers_share_one_bucket(make: Make) -> None:
    """Fifty takes at one instant get what is there, once."""
    clock = Clock()
    await make(clock_us=clock).publish(allowance_per_s=1000, ttl_s=6, epoch=1)
    clock.advance(1)
    grants = await asyncio.gather(*(make(clock_us=clock).take(10) for _ in range(50)))
    assert sum(grant.granted for grant in grants) == 250
    assert {grant.granted for grant in grants} == {0, 10}


async def test_many_workers_meet_a_new_bucket(make: Make) -> None:
    """The very first calls may come at once: one bucket results, empty."""
    grants = await asyncio.gather(*(make().take(10) for _ in range(20)))
    assert {grant.granted for grant in grants} == {0}
    assert {grant.allowance_per_s for grant in grants} == {FLOOR_PER_S}


async def test_the_server_keeps_the_time(make: Make) -> None:
    """No worker's clock is asked: permits come as the server's own time passes, and no faster."""
    bucket = make()
    start_s = time.monotonic()
    await bucket.publish(allowance_per_s=1000, ttl_s=60, epoch=1)
    limiter = Limiter(bucket)
    granted = [await limiter.acquire(1000, timeout_s=10) for _ in range(20)]
    assert min(granted) >= 1
    # It was empty at the start, so there is no burst to allow for.
    assert sum(granted) <= 1000 * (time.monotonic() - start_s)


async def test_what_is_stored_is_within_bounds(make: Make, redis: Redis, pool: Pool) -> None:
    """Who looks at the hash or the row, and not through a bucket, sees no more than is there."""
    clock = Clock()
    bucket = make(clock_us=clock)
    script = redis.register_script("return redis.call('HMGET', KEYS[1], 'tokens', 'debt')")

    async def stored() -> list[float]:
        row = await pool.fetchrow("SELECT tokens, debt FROM governor_bucket")
        return [int(value) / 10**9 for value in row or await script(keys=[NAME])]

    await bucket.publish(allowance_per_s=400, ttl_s=6, epoch=1)
    await bucket.refund(10**6)
    assert await stored() == [100, 0]
    await bucket.publish(allowance_per_s=100, ttl_s=6, epoch=1)
    assert await stored() == [25, 0]
    await bucket.charge(10**9)
    assert await stored() == [1.25, 100]
    await bucket.publish(allowance_per_s=50, ttl_s=6, epoch=1)
    assert await stored() == [1.25, 50]


async def test_a_lost_bucket_starts_empty(make: Make, redis: Redis, pool: Pool) -> None:
    """An emptied store grants nothing at once, is back at the floor and takes any epoch."""
    clock = Clock()
    bucket = make(clock_us=clock)
    await bucket.publish(allowance_per_s=1000, ttl_s=6, epoch=9)
    clock.advance(1)
    await redis.flushall()
    await pool.execute("DELETE FROM governor_bucket")
    grant = await bucket.take(100)
    assert (grant.granted, grant.allowance_per_s) == (0, FLOOR_PER_S)
    assert (await bucket.publish(allowance_per_s=10, ttl_s=6, epoch=1)).accepted


async def test_reading_writes_nothing(make: Make, redis: Redis, pool: Pool) -> None:
    """An observer may look at a bucket that does not exist, and does not make it."""
    state = await make().read()
    assert (state.tokens, state.allowance_per_s) == (0, FLOOR_PER_S)
    assert await redis.dbsize() == 0
    assert await pool.fetchval("SELECT count(*) FROM governor_bucket") == 0


async def test_a_forgotten_script_is_sent_again(redis: Redis) -> None:
    """A Redis that restarted, and so knows no script, is no error."""
    bucket = RedisBucket(redis, NAME, floor_per_s=FLOOR_PER_S)
    await bucket.take(1)
    await redis.script_flush()
    assert (await bucket.take(1)).granted == 0


async def test_a_script_takes_permits_and_works_in_one_call(redis: Redis) -> None:
    """The library stands in front of another script, which takes, works and gives back."""
    clock = Clock()
    bucket = RedisBucket(redis, NAME, floor_per_s=FLOOR_PER_S, clock_us=clock)
    await bucket.publish(allowance_per_s=400, ttl_s=6, epoch=1)
    clock.advance(1)
    claim = redis.register_script(
        bucket_library()
        + """
        local now_us = tonumber(ARGV[3])
        local granted, wait_us, state = bucket.take(KEYS[2], tonumber(ARGV[1]), ARGV[2], now_us)
        local claimed = #redis.call('ZPOPMIN', KEYS[1], granted) / 2
        bucket.refund(KEYS[2], granted - claimed, ARGV[2], now_us)
        return {granted, wait_us, bucket.in_force(state), claimed}
        """
    )
    await redis.zadd("work", {f"hold {number}": number for number in range(30)})
    args = [100, FLOOR_PER_S, clock.us]
    granted, wait_us, milli_per_s, claimed = await claim(keys=["work", NAME], args=args)
    assert (granted, wait_us, milli_per_s, claimed) == (100, 2500, 400_000, 30)
    assert (await bucket.read()).permits == 70


@settings(
    max_examples=40,
    deadline=None,  # a server answers
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # each example empties it
)
@given(steps=STEPS)
async def test_a_script_is_told_the_same_wait(steps: list[Step], redis: Redis) -> None:
    """The wait that the library returns to a script is the one that Python computes."""
    await redis.flushdb()
    clock = Clock()
    bucket = RedisBucket(redis, NAME, floor_per_s=FLOOR_PER_S, clock_us=clock)
    ask = redis.register_script(
        f"{bucket_library()} return {{bucket.take(KEYS[1], 0, {FLOOR_PER_S}, ARGV[1])}}"
    )
    for step in steps:
        clock.us += step.elapsed_us
        await step.on(bucket)
        wait_us = (await ask(keys=[NAME], args=[clock.us]))[1]
        assert wait_us == (await bucket.read()).wait_us


async def test_an_absent_redis_is_unavailable() -> None:
    """Nobody listens: an error that says what to do, with the driver's as its cause."""
    async with Redis(host="127.0.0.1", port=1) as nobody:
        bucket = RedisBucket(nobody, NAME, floor_per_s=FLOOR_PER_S)
        with pytest.raises(BucketUnavailable, match="start nothing") as caught:
            await bucket.take(1)
    assert caught.value.__cause__ is not None


async def test_a_locked_row_is_unavailable_in_time(pool: Pool) -> None:
    """A transaction that sits on the row costs the others their time limit, no more."""
    bucket = PostgresBucket(pool, NAME, floor_per_s=FLOOR_PER_S)
    await bucket.take(0)
    async with pool.acquire() as conn, conn.transaction():
        await conn.execute("SELECT FROM governor_bucket FOR UPDATE")
        hasty = PostgresBucket(pool, NAME, floor_per_s=FLOOR_PER_S, timeout_s=0.05)
        with pytest.raises(BucketUnavailable):
            await hasty.take(1)
    assert (await bucket.take(0)).granted == 0


async def test_time_spent_waiting_for_the_row_counts(pool: Pool) -> None:
    """The clock is read after the lock, or a long wait would look like a clock set back."""
    bucket = PostgresBucket(pool, NAME, floor_per_s=FLOOR_PER_S)
    await bucket.publish(allowance_per_s=400, ttl_s=60, epoch=1)
    async with pool.acquire() as conn:
        async with conn.transaction():
            await conn.execute("SELECT FROM governor_bucket FOR UPDATE")
            waiting = asyncio.create_task(bucket.take(1))
            await eventually(lambda: _waits_for_a_lock(pool))
            released_us = await conn.fetchval(
                "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
            )
        await waiting
        taken_us = await conn.fetchval("SELECT micros FROM governor_bucket")
    assert taken_us >= released_us


async def _waits_for_a_lock(pool: Pool) -> bool:
    return bool(
        await pool.fetchval(
            "SELECT true FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
    )


async def test_a_missing_table_is_unavailable(pool: Pool) -> None:
    """Without its table the bucket grants nothing, and the cause names the table."""
    await pool.execute("DROP TABLE governor_bucket")
    with pytest.raises(BucketUnavailable) as caught:
        await PostgresBucket(pool, NAME, floor_per_s=FLOOR_PER_S).take(1)
    assert "governor_bucket" in str(caught.value.__cause__)


async def test_the_documented_table_is_the_schema_s(pool: Pool) -> None:
    """Who uses the governor alone gets the same table from its DDL."""
    described = """
        SELECT column_name, data_type, is_nullable, column_default
          FROM information_schema.columns
         WHERE table_name = 'governor_bucket' ORDER BY ordinal_position
    """
    from_schema = await pool.fetch(described)
    await pool.execute("DROP TABLE governor_bucket")
    await pool.execute(GOVERNOR_BUCKET_DDL)
    assert await pool.fetch(described) == from_schema
