"""The worker: punctual, in batches, within its permits, and what each outcome means for the wake-up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import asyncpg
import pytest
from redis.asyncio import Redis

from expiry.expire import Wake
from expiry.holds import release, renew
from expiry.settings import Settings
from expiry.wakeups import Again, Wakeups
from expiry.wanted import uuid7
from governor import GovernorSettings
from tests.faults import CURE, POISON, gate_shut
from tests.fleet import (
    TENANT,
    Counted,
    Pool,
    assert_kept,
    due,
    due_in,
    expired,
    holds_true,
    lags_ms,
    overdue,
    placed,
    settings_for,
    states,
    wakeups_on,
    working,
)
from tests.helpers import eventually
from tests.wakes import emptied, scores


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    """Give settings with short waits after failures."""
    return settings_for(database_url, redis_url, attempts_max=3, retry_base_s=0.05)


async def test_a_lone_hold_after_a_quiet_time_is_punctual(
    pool: Pool, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks the worker sleeps until the deadline: lag is milliseconds, not the time to the next look."""
    monkeypatch.setattr("expiry.worker.PEEK_S", 5)
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue([await due_in(pool, after_s) for after_s in (0.3, 0.6, 0.9)])
        async with working(pool, settings):
            await eventually(expired(pool, 3))
    lags = await lags_ms(pool)
    print("lags of lone holds, ms:", lags)  # noqa: T201 - figures for the reader of -s
    assert max(lags) < 250  # at the next look: 4000
    await assert_kept(pool)


async def test_a_batch_is_expired_settled_and_gone(pool: Pool, redis: Redis, settings: Settings) -> None:
    """Everything due ends once, in statements of many, and leaves nothing in Redis but the bucket."""
    holds = await overdue(pool, 600)
    counted = Counted()
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue(holds)
        async with working(pool, settings):
            await eventually(expired(pool, 600))
            await eventually(emptied(redis))
    assert await redis.keys("arq:*") == []
    assert counted("expiry_attempts_total", outcome="expired", by="worker") == 600
    assert counted("expiry_batch_seconds_count", by="worker") < 30
    await assert_kept(pool)


class Recording(Wakeups):
    """Notes the permits that are given back."""

    refunded = 0

    async def settle(self, *, done: Sequence[bytes], again: Sequence[Again] = (), refund: int = 0) -> None:
        """Note, and settle."""
        Recording.refunded += refund
        await super().settle(done=done, again=again, refund=refund)


async def test_what_started_nothing_gives_its_permit_back(
    pool: Pool, redis: Redis, settings: Settings
) -> None:
    """Early, stale, ended and missing ones refund theirs; expired ones do not."""
    early, stale, ended, good = await placed(pool, 4, ttl_s=1.5)
    async with pool.acquire() as conn:
        await renew(conn, stale.id, tenant_id=TENANT, ttl_s=60)
        await release(conn, ended.id, tenant_id=TENANT)
    at = good.expires_at - timedelta(seconds=5)
    wakes = [(Wake(h.id, 1), at) for h in (early, stale, ended)] + [(Wake(uuid7(), 1), at)]
    Recording.refunded = 0
    counted = Counted()
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue_due(wakes)
        await wakeups.enqueue([good])
        async with working(pool, settings, wakeups=Recording):
            await eventually(expired(pool, 2))
            await eventually(emptied(redis))
    assert Recording.refunded == 4
    for outcome in ("early", "stale", "ended", "missing"):
        assert counted("expiry_attempts_total", outcome=outcome, by="worker") == 1
    assert await states(pool) == {"expired": 2, "held": 1, "released": 1}
    await assert_kept(pool)


async def test_an_early_one_comes_again_at_its_deadline(pool: Pool, settings: Settings) -> None:
    """A wake-up with a score before the deadline is put where the row says, and is then punctual."""
    [hold] = await placed(pool, 1, ttl_s=1.2)
    counted = Counted()
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue_due([(Wake(hold.id, 1), hold.expires_at - timedelta(seconds=2))])
        async with working(pool, settings):
            await eventually(expired(pool, 1))
    assert counted("expiry_retries_total", reason="early") == 1
    assert (await lags_ms(pool))[0] < 250
    await assert_kept(pool)


async def test_a_contended_hold_comes_again(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], settings: Settings
) -> None:
    """A hold that somebody has locked ends soon after the lock, the others at once, and no attempt counts."""
    holds = await overdue(pool, 3)
    counted = Counted()
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue(holds)
        async with conn.transaction():
            await conn.execute("SELECT FROM holds WHERE id = $1 FOR UPDATE", holds[0].id)
            async with working(pool, settings):
                await eventually(expired(pool, 2))
                await eventually(holds_true(lambda: counted("expiry_retries_total", reason="contended") >= 2))
                assert (await states(pool))["held"] == 1
        async with working(pool, settings):
            await eventually(expired(pool, 3), within_s=2)
    assert await pool.fetchval("SELECT max(attempts) FROM holds") == 0
    await assert_kept(pool)


async def test_the_rate_of_expiries_stays_within_the_permits(pool: Pool, settings: Settings) -> None:
    """Over any window no more holds end than allowance x window + burst, and they do end at that rate."""
    n, rate, burst, jitter_s = 150, 100, 25, 0.15
    slow = GovernorSettings(floor_per_s=rate, ceiling_per_s=rate)
    holds = await overdue(pool, n)
    counted = Counted()
    async with wakeups_on(settings, slow) as wakeups:
        await wakeups.enqueue(holds)
        started_s = time.monotonic()
        async with working(pool, settings, governor=slow):
            await eventually(expired(pool, n))
    assert (n - burst) / rate - jitter_s < time.monotonic() - started_s < 3 * n / rate
    ends = [row["s"] for row in await pool.fetch(ENDS_S)]
    for i, first in enumerate(ends):
        for j in range(i + 1, n):
            assert j - i + 1 <= rate * (ends[j] - first + jitter_s) + burst
    assert counted("expiry_worker_throttled_total") > 0
    await assert_kept(pool)


ENDS_S = "SELECT extract(epoch FROM ended_at)::double precision AS s FROM holds ORDER BY 1"


async def test_a_paused_worker_claims_nothing(pool: Pool, redis: Redis, settings: Settings) -> None:
    """While paused every wake-up stays as it is; resumed, the worker goes on without a restart."""
    holds = await overdue(pool, 3)
    pauses = 0

    def paused() -> bool:
        nonlocal pauses
        pauses += 1
        return pauses < 4

    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue(holds)
        before = await scores(redis)
        async with working(pool, settings, paused=paused):
            await eventually(holds_true(lambda: pauses == 3))
            assert await scores(redis) == before
            await eventually(expired(pool, 3))
    assert await states(pool) == {"expired": 3}


async def test_statements_and_batches_are_bounded(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], redis: Redis, settings: Settings
) -> None:
    """A database that hangs has at most so many statements and holds of one worker in hand."""
    bounded = settings.model_copy(update={"batch_max": 10, "batches_in_flight_max": 2})
    holds = await overdue(pool, 100)
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue(holds)
        async with working(pool, bounded):
            async with gate_shut(conn) as hanging:

                async def both() -> bool:
                    return len(await hanging()) == 2

                await eventually(both)
                leased = [s for s in (await scores(redis)).values() if s % 1 == 0.5]
                assert len(leased) == 20
            await eventually(expired(pool, 100))
    await assert_kept(pool)


async def test_a_row_at_fault_backs_off_and_becomes_a_dead_letter(
    pool: Pool, redis: Redis, settings: Settings
) -> None:
    """The others end at once; it comes again after its back-off, so often and no more; cured, it can end."""
    await pool.execute(POISON)
    holds = await overdue(pool, 20) + await overdue(pool, 1, resource="poison{}")
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue(holds)
        async with working(pool, settings):
            await eventually(emptied(redis))
    assert await states(pool) == {"expired": 20, "held": 1}
    letter = await pool.fetchrow("SELECT hold_id, attempts, state, reason FROM dead_letters")
    assert letter is not None
    assert tuple(letter) == (holds[-1].id, 3, "open", "23514")
    await pool.execute(CURE)
    async with wakeups_on(settings) as wakeups:
        await wakeups.enqueue_due(due(holds[-1:]))
        async with working(pool, settings):
            await eventually(expired(pool, 21))
    assert await pool.fetchval("SELECT state FROM dead_letters") == "recovered"
    await assert_kept(pool)


async def test_hooks_run_as_those_of_arq_do(pool: Pool, settings: Settings) -> None:
    """`on_startup` and `on_shutdown` are awaited once each, with the worker's `ctx`."""
    seen: list[str] = []

    async def startup(ctx: dict[str, str]) -> None:
        seen.append(f"up {ctx['mine']}")

    async def shutdown(ctx: dict[str, str]) -> None:
        seen.append(f"down {ctx['mine']}")

    mine = {"mine": "here"}
    async with working(pool, settings, on_startup=startup, on_shutdown=shutdown, ctx=mine):
        await eventually(holds_true(lambda: bool(seen)))
    assert seen == ["up here", "down here"]
