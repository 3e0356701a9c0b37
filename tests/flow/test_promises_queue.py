"""Promises P5, P8 and P10, each by what it says."""

from __future__ import annotations

from collections.abc import Callable

import asyncpg
import pytest
from redis.asyncio import Redis

from expiry.settings import Settings
from tests.crash import crash_everywhere
from tests.faults import POISON
from tests.fleet import (
    Counted,
    Pool,
    assert_kept,
    expired,
    holds_true,
    lags_ms,
    overdue,
    placed,
    serving,
    settings_for,
    states,
)
from tests.helpers import eventually
from tests.proxy import Cut, Proxy, proxy_to
from tests.wakes import emptied, scores

BUSY_S = 2.0  # what a busy machine may add to a bound


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    """Give a service with short bounds."""
    return settings_for(
        database_url,
        redis_url,
        sweep_interval_s=0.2,
        sweep_grace_s=0.3,
        promoter_interval_s=0.3,
        attempts_max=3,
        retry_base_s=0.05,
    )


# --- P5


async def up(_redis: Redis, _proxy: Proxy) -> None:
    """Leave Redis as it is."""


async def empty(redis: Redis, _proxy: Proxy) -> None:
    """Let Redis forget everything."""
    await redis.flushall()


async def wrong(redis: Redis, _proxy: Proxy) -> None:
    """Let Redis have it that all is due tomorrow."""
    tomorrow = {member: score + 86_400_000 for member, score in (await scores(redis)).items()}
    assert len(tomorrow) == 40
    await redis.zadd("expiry:wakeups", tomorrow)


async def gone(_redis: Redis, proxy: Proxy) -> None:
    """Let Redis refuse every connection."""
    proxy.refuse()


@pytest.mark.parametrize("redis_is", [up, empty, wrong, gone])
async def test_p5_nothing_overdue_is_forgotten(
    pool: Pool,
    conn: asyncpg.Connection[asyncpg.Record],
    redis: Redis,
    settings: Settings,
    redis_is: Callable[[Redis, Proxy], object],
) -> None:
    """Whatever Redis is, each hold ends within sweep interval + grace; a locked one so soon after the lock."""
    bound_s = settings.sweep_interval_s + settings.grace_s + BUSY_S
    async with proxy_to(settings.redis_url.get_secret_value()) as proxy:
        behind = settings_for(
            settings.database_url.get_secret_value(),
            proxy.url,
            **settings.model_dump(exclude_unset=True, exclude={"database_url", "redis_url"}),
        )
        async with serving(pool, behind) as wakeups:
            holds = await placed(pool, 40, ttl_s=1)
            await wakeups.enqueue(holds)
            transaction = conn.transaction()
            await transaction.start()
            await conn.execute("SELECT FROM holds WHERE id = $1 FOR UPDATE", holds[0].id)
            await redis_is(redis, proxy)  # type: ignore[misc]
            await eventually(expired(pool, 39))
            assert (await lags_ms(pool))[-1] < bound_s * 1000
            await transaction.rollback()
            await eventually(expired(pool, 40), within_s=bound_s)
    await assert_kept(pool)


# --- P8


async def test_p8_failures_are_kept_and_nothing_is_retried_for_ever(
    pool: Pool, redis: Redis, settings: Settings
) -> None:
    """Worker and sweep both meet a hold at fault: one dead letter with all it takes, then no attempt more."""
    await pool.execute(POISON)
    holds = await overdue(pool, 10) + await overdue(pool, 1, resource="poison{}")
    counted = Counted()

    def attempts() -> float:
        return sum(
            counted("expiry_attempts_total", outcome=outcome, by=by)
            for outcome in ("failed", "dead")
            for by in ("worker", "sweep")
        )

    async with serving(pool, settings) as wakeups:
        await wakeups.enqueue(holds)
        await eventually(holds_true(lambda: counted("expiry_dead_letters_total") >= 1))
        await eventually(emptied(redis))
        # A wake-up that was on its way when the sweep gave up may have cost one attempt more.
        assert settings.attempts_max <= attempts() <= settings.attempts_max + 1
        given_up, rounds = attempts(), counted("expiry_batch_seconds_count", by="sweep")
        await wakeups.enqueue(await placed(pool, 1, ttl_s=1))
        await eventually(expired(pool, 11))
        assert attempts() == given_up
        assert rounds <= given_up + 11
    letter = await pool.fetchrow(
        "SELECT hold_id, generation, reason, attempts, first_error, last_error, state FROM dead_letters"
    )
    assert letter is not None
    assert tuple(letter) == (holds[-1].id, 1, "23514", given_up, "23514: poison", "23514: poison", "open")
    assert await states(pool) == {"expired": 11, "held": 1}
    await assert_kept(pool)


# --- P10


@pytest.mark.parametrize("when", Cut)
async def test_p10_a_crash_at_any_instruction_loses_nothing_and_doubles_nothing(
    pool: Pool, redis: Redis, settings: Settings, when: Cut
) -> None:
    """Cut off at the 1st, 2nd, 3rd... request to either store: the next worker ends each hold, once."""
    requests = await crash_everywhere(pool, redis, settings, when)
    print(f"cut off at each of {requests} requests")  # noqa: T201
    assert requests >= 8  # connections, a claim, a statement, a settle at least
