"""Faults that the queue and the loops once had, each with the test that showed it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest
from redis.asyncio import Redis

from expiry import local
from expiry.deadletters import replay
from expiry.expire import Wake, expire
from expiry.holds import release, renew
from expiry.permits import Permits
from expiry.promoter import Promoter
from expiry.settings import Settings
from expiry.wakeups import Claim, Wakeups, job_id
from expiry.wanted import uuid7
from governor import GovernorSettings
from tests.faults import CURE, POISON, gate_shut
from tests.fleet import (
    BACKDATE,
    TENANT,
    Counted,
    Pool,
    assert_kept,
    due,
    due_in,
    expired,
    holds_true,
    lags_ms,
    looping,
    overdue,
    permits_of,
    placed,
    settings_for,
    sweep_of,
    wakeups_on,
    working,
)
from tests.helpers import data_parent, eventually
from tests.proxy import Cut, proxy_to


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    """Give the test settings for its own stores."""
    return settings_for(database_url, redis_url)


# 1 worker.Skew -----------------------------------------------------------------------------------


def with_clock(off_ms: float) -> type[Wakeups]:
    """Return wake-ups of a Redis whose clock is off by so much."""

    class Off(Wakeups):
        async def claim(self, want: int, *, skew_ms: float) -> Claim:
            return await super().claim(want, skew_ms=skew_ms + off_ms)

    return Off


async def test_a_difference_is_learned_once_by_batches_in_flight(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], settings: Settings
) -> None:
    """Two batches claimed with the old estimate: the second does not add the difference again."""
    single = settings.model_copy(update={"batch_max": 1})
    counted = Counted()
    async with wakeups_on(settings) as wakeups, working(pool, single, wakeups=with_clock(-1000)):
        async with gate_shut(conn) as hanging:
            await wakeups.enqueue(await overdue(pool, 2))

            async def both() -> bool:
                return len(await hanging()) == 2

            await eventually(both)
        await eventually(expired(pool, 2))
        await wakeups.enqueue(await placed(pool, 1, ttl_s=2))
        await eventually(expired(pool, 3))
    assert counted("expiry_attempts_total", outcome="early", by="worker") == 0


class Stalls(Wakeups):
    """The process stands still for 40 ms after the first claim's answer arrived."""

    stalled = False

    async def claim(self, want: int, *, skew_ms: float) -> Claim:
        """Claim, then hold up the whole event loop once."""
        claim = await super().claim(want, skew_ms=skew_ms)
        if claim.wakes and not self.stalled:
            self.stalled = True
            time.sleep(0.04)  # noqa: ASYNC251 - that is the fault
        return claim


async def test_a_stall_after_a_claim_is_not_taken_for_skew(pool: Pool, settings: Settings) -> None:
    """A busy event loop does not make every later claim early."""
    counted = Counted()
    async with wakeups_on(settings) as wakeups, working(pool, settings, wakeups=Stalls):
        for n in range(1, 4):
            await wakeups.enqueue([await due_in(pool, 0.7)])
            await eventually(expired(pool, n))
    assert counted("expiry_attempts_total", outcome="early", by="worker") == 0


SLOW_COMMIT = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.4); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON outbox DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (NEW.type = 'hold.expired') EXECUTE FUNCTION slow()
"""


async def test_a_slow_commit_is_not_taken_for_skew(pool: Pool, settings: Settings) -> None:
    """With synchronous replication of 400 ms a commit, holds still end at their deadline."""
    await pool.execute(SLOW_COMMIT)
    async with wakeups_on(settings) as wakeups, working(pool, settings):
        for n in range(1, 4):
            await wakeups.enqueue([await due_in(pool, 0.7)])
            await eventually(expired(pool, n))
    assert sorted(await lags_ms(pool))[1] < 250  # the median: 400


# 2 batches under throttle ------------------------------------------------------------------------

TIGHT = GovernorSettings(floor_per_s=1000, ceiling_per_s=1000)


async def test_a_throttled_worker_still_works_in_batches(pool: Pool, settings: Settings) -> None:
    """1,000 holds at 1,000/s are a few dozen statements, not hundreds of one or two holds."""
    holds = await overdue(pool, 1000)
    counted = Counted()
    async with wakeups_on(settings, TIGHT) as wakeups:
        await wakeups.enqueue(holds)
    async with working(pool, settings, governor=TIGHT):
        await eventually(expired(pool, 1000))
    assert counted("expiry_batch_seconds_count", by="worker") < 100


async def test_a_throttled_sweep_still_works_in_batches(pool: Pool, settings: Settings) -> None:
    """The same; and a page that was read is used up before the next is read."""
    await overdue(pool, 1000)
    counted = Counted()
    await sweep_of(pool, settings, governor=TIGHT).one_pass()
    assert counted("expiry_batch_seconds_count", by="sweep") < 100


async def test_no_ops_do_not_hold_up_the_floor(pool: Pool, settings: Settings) -> None:
    """At 5/s, a hold behind 20 wake-ups that give their permits back does not wait 20 permits long."""
    floor = GovernorSettings(floor_per_s=5, ceiling_per_s=5)
    [hold] = await overdue(pool, 1)
    async with wakeups_on(settings, floor) as wakeups:
        before = hold.expires_at - timedelta(seconds=1)
        await wakeups.enqueue_due([(Wake(uuid7(), 1), before) for _ in range(20)])
        await wakeups.enqueue([hold])
    started_s = time.monotonic()
    async with working(pool, settings, governor=floor):
        await eventually(expired(pool, 1))
    assert time.monotonic() - started_s < 3  # 20 permits take 4 s


# 3 a pass of the sweep without end ---------------------------------------------------------------


async def test_p5_a_contended_hold_does_not_wait_for_a_quiet_moment(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], database_url: str
) -> None:
    """While holds become due all the time, one that was locked for a moment ends at the next pass."""
    settings = settings_for(database_url, "redis://127.0.0.1:1/0", mode="sweep")
    [locked] = await overdue(pool, 1)
    others = await placed(pool, 3000, ttl_s=60)
    now = await pool.fetchval("SELECT clock_timestamp()")
    await pool.execute(
        BACKDATE, [h.id for h in others], [now + timedelta(milliseconds=200 + i) for i in range(3000)]
    )
    transaction = conn.transaction()
    await transaction.start()
    await conn.execute("SELECT FROM holds WHERE id = $1 FOR UPDATE", locked.id)

    async def ended() -> bool:
        return bool(await pool.fetchval("SELECT state = 'expired' FROM holds WHERE id = $1", locked.id))

    async with looping(pool, "sweep", sweep_of(pool, settings).one_pass, interval_s=0.1):
        await eventually(expired(pool, 10))
        await transaction.rollback()
        await eventually(ended, within_s=2)  # others become due for 3 s


# 4 back-off --------------------------------------------------------------------------------------


async def test_an_outage_that_is_over_is_forgotten(pool: Pool, redis_url: str, database_url: str) -> None:
    """A hiccup long after an outage costs 0.1 s, though nothing was due in between."""
    counted = Counted()
    async with proxy_to(redis_url) as proxy, working(pool, settings_for(database_url, proxy.url)):
        proxy.refuse()
        await eventually(
            holds_true(lambda: counted("expiry_loop_errors_total", loop="worker", kind="redis") >= 5)
        )
        proxy.refuse(refusing=False)
        rounds = Counted()
        last = "expiry_loop_last_round_timestamp_seconds"
        await eventually(holds_true(lambda: rounds(last, loop="worker") > 1))
        proxy.cut_at(b"EVALSHA", Cut.BEFORE)
        await eventually(holds_true(lambda: proxy.cuts == 1))
        after = Counted()
        started_s = time.monotonic()
        await eventually(holds_true(lambda: after(last, loop="worker") > 0))
        assert time.monotonic() - started_s < 1.2  # a sixth failure in a row: 1.6 s at least


# 5 outcomes --------------------------------------------------------------------------------------


async def test_two_generations_in_one_batch_are_two_outcomes(pool: Pool) -> None:
    """The older one did not expire anything: one expiry is counted, one permit comes back."""
    [hold] = await placed(pool, 1, ttl_s=1)
    async with pool.acquire() as conn:
        await renew(conn, hold.id, tenant_id=TENANT, ttl_s=1)
        await pool.execute(BACKDATE, [hold.id], [hold.placed_at])
        outcomes = await expire(conn, [Wake(hold.id, 1), Wake(hold.id, 2)], by="worker")
    assert [o.kind for o in outcomes] in (["ended", "expired"], ["stale", "expired"])


# 6 P9 --------------------------------------------------------------------------------------------


async def test_p9_one_lost_answer_does_not_double_the_allowance(
    pool: Pool, database_url: str, redis_url: str
) -> None:
    """One process meets one dropped connection; together with another it stays within ceiling + floor."""
    governor = GovernorSettings(floor_per_s=5, ceiling_per_s=200)
    got: list[int] = []
    async with proxy_to(redis_url) as proxy:
        near, far = settings_for(database_url, redis_url), settings_for(database_url, proxy.url)
        async with wakeups_on(near, governor) as one, wakeups_on(far, governor) as other:
            mine, theirs = permits_of(pool, one, governor), permits_of(pool, other, governor)
            for permits in (mine, theirs):
                await permits.publish()
            proxy.cut_at(b"EVALSHA", Cut.BEFORE)
            await theirs.take(1, timeout_s=0)
            for permits in (mine, theirs):
                await permits.publish()
            started_s = time.monotonic()

            async def drain(permits: Permits) -> None:
                while time.monotonic() < started_s + 2:
                    got.append(await permits.take(100, timeout_s=0.5))

            await asyncio.gather(drain(mine), drain(theirs))
    window_s = time.monotonic() - started_s
    assert sum(got) <= (200 + 5) * window_s + 2 * 50


# 7 failover --------------------------------------------------------------------------------------


async def test_a14_a_primary_that_became_a_replica_is_left(
    pool: Pool, database_url: str, redis_url: str, redis: Redis
) -> None:
    """Behind a name that now leads to the new primary, the worker does not cling to the old connection."""
    with tempfile.TemporaryDirectory(prefix="expiry-", dir=data_parent()) as parent:
        old = await asyncio.to_thread(local.start, Path(parent) / "data")
        try:
            async with Redis.from_url(old.redis_url) as old_redis, proxy_to(old.redis_url) as name:
                # Both ask for the password of the first.
                password = old.redis_url.split("@")[0].rpartition(":")[2]
                await redis.config_set("requirepass", password)
                try:
                    settings = settings_for(database_url, name.url)
                    counted = Counted()
                    async with working(pool, settings):
                        await eventually(
                            holds_true(
                                lambda: counted("expiry_loop_last_round_timestamp_seconds", loop="worker") > 0
                            )
                        )
                        await old_redis.execute_command("REPLICAOF", "127.0.0.1", "1")
                        name.lead_to(redis_url)
                        async with wakeups_on(settings) as wakeups:
                            await wakeups.enqueue(await placed(pool, 3, ttl_s=1))
                        await eventually(expired(pool, 3), within_s=8)
                finally:
                    await redis.config_set(
                        "requirepass", redis_url.split("@", maxsplit=1)[0].rpartition(":")[2]
                    )
        finally:
            await asyncio.to_thread(old.stop)


# 8 the promoter ----------------------------------------------------------------------------------


async def test_a_loss_is_seen_behind_wake_ups_of_ended_holds(
    pool: Pool, redis: Redis, settings: Settings
) -> None:
    """Holds that were released leave wake-ups behind; those must not hide what is missing."""
    async with wakeups_on(settings) as wakeups:
        gone = await placed(pool, 20, ttl_s=5)
        held = await placed(pool, 10, ttl_s=5)
        promoter = Promoter(pool, wakeups, settings)
        await promoter.tick()
        async with pool.acquire() as conn:
            for hold in gone:
                await release(conn, hold.id, tenant_id=TENANT)
        await redis.zrem(wakeups.queue, *[job_id(w) for w, _ in due(held)])
        await redis.delete(f"{wakeups.queue}:turn")
        assert await promoter.tick() == 10


async def test_queue_mode_finds_what_was_lost_after_it_was_due(
    pool: Pool, redis: Redis, settings: Settings
) -> None:
    """Without a sweep, an overdue hold whose wake-up is gone is brought back by the promoter."""
    queue_only = settings.model_copy(update={"mode": "queue"})
    async with wakeups_on(queue_only) as wakeups:
        promoter = Promoter(pool, wakeups, queue_only)
        await promoter.tick()
        await overdue(pool, 3, by_s=5)
        await redis.delete(f"{wakeups.queue}:turn")
        assert await promoter.tick() == 3


async def test_queue_mode_replays(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], redis: Redis, settings: Settings
) -> None:
    """A replayed dead letter is tried again in queue mode too."""
    queue_only = settings.model_copy(update={"mode": "queue", "attempts_max": 1})
    await pool.execute(POISON)
    holds = await overdue(pool, 1, resource="poison{}")
    async with wakeups_on(queue_only) as wakeups, working(pool, queue_only):
        promoter = Promoter(pool, wakeups, queue_only)
        await promoter.tick()
        await wakeups.enqueue(holds)
        counted = Counted()
        await eventually(holds_true(lambda: counted("expiry_dead_letters_total") >= 1))
        await pool.execute(CURE)
        [letter] = await pool.fetch("SELECT id FROM dead_letters")
        await replay(conn, [letter["id"]], by="ann")
        await redis.delete(f"{wakeups.queue}:turn")
        await promoter.tick()
        await eventually(expired(pool, 1), within_s=3)


# 9 a row that hangs ------------------------------------------------------------------------------

HANGS = """
CREATE FUNCTION hangs() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_sleep(60); RETURN NEW; END $$;
CREATE TRIGGER hangs BEFORE UPDATE ON holds FOR EACH ROW
    WHEN (NEW.state = 'expired' AND NEW.resource_ids[1] LIKE 'slow%') EXECUTE FUNCTION hangs()
"""


async def test_p5_one_row_that_hangs_does_not_keep_its_batch(
    pool: Pool, database_url: str, settings: Settings
) -> None:
    """A statement that times out because of one row ends the others at the next try."""
    await pool.execute(HANGS)
    await overdue(pool, 20)
    await overdue(pool, 1, resource="slow{}")
    limits = {"statement_timeout": "300"}
    async with asyncpg.create_pool(database_url, server_settings=limits) as limited:
        sweep = sweep_of(limited, settings)
        async with looping(pool, "sweep", sweep.one_pass, interval_s=0.05):
            await eventually(expired(pool, 20), within_s=8)
    await assert_kept(pool)


# 10 arq ------------------------------------------------------------------------------------------


async def test_hooks_find_redis_in_ctx(pool: Pool, settings: Settings) -> None:
    """`ctx['redis']` is there, as arq's own worker puts it."""
    seen: list[bool] = []

    async def startup(ctx: dict[str, object]) -> None:
        seen.append("redis" in ctx)

    async with working(pool, settings, on_startup=startup):
        await eventually(holds_true(lambda: bool(seen)))
    assert seen == [True]


# 11 a rest that does not hear of what comes again ------------------------------------------------


async def test_what_comes_again_soon_is_not_slept_through(pool: Pool, settings: Settings) -> None:
    """A wake-up 100 ms early is put back for the deadline, and the worker is there then."""
    async with wakeups_on(settings) as wakeups, working(pool, settings):
        for n in range(1, 4):
            hold = await due_in(pool, 0.7)
            early = hold.expires_at - timedelta(milliseconds=100)
            await wakeups.enqueue_due([(Wake(hold.id, 1), early)])
            await eventually(expired(pool, n))
    assert sorted(await lags_ms(pool))[1] < 250  # the median: 400


async def test_a_contended_hold_is_tried_again_when_it_says(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], settings: Settings
) -> None:
    """Contended comes again after 50 to 250 ms, not at the next look half a second later."""
    counted = Counted()
    async with wakeups_on(settings) as wakeups:
        holds = await overdue(pool, 1)
        await wakeups.enqueue(holds)
        async with conn.transaction():
            await conn.execute("SELECT FROM holds FOR UPDATE")
            async with working(pool, settings):
                await eventually(holds_true(lambda: counted("expiry_retries_total", reason="contended") >= 1))
                started_s = time.monotonic()
                await eventually(holds_true(lambda: counted("expiry_retries_total", reason="contended") >= 5))
                assert time.monotonic() - started_s < 4 * 0.45
