"""Every loop survives its failures, counts them, and stands still when an operator says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg
import pytest
from redis.exceptions import RedisError

from expiry import loops
from expiry.errors import LoopNotFoundError
from tests.fleet import Counted, Pool, expired, holds_true, looping, overdue, settings_for, states, sweep_of
from tests.helpers import eventually
from tests.proxy import proxy_to


async def test_a_loop_survives_whatever_a_round_raises(pool: Pool) -> None:
    """Each failure is counted by its kind, the rounds go on, and the first good one is noted."""
    errors: list[Exception] = [asyncpg.PostgresConnectionError(), RedisError(), KeyError("ours")]
    counted = Counted()

    async def tick() -> None:
        if errors:
            raise errors.pop()

    async with looping(pool, "sweep", tick, interval_s=0.01):
        await eventually(
            holds_true(lambda: counted("expiry_loop_last_round_timestamp_seconds", loop="sweep") > 0)
        )
    for kind in ("database", "redis", "bug"):
        assert counted("expiry_loop_errors_total", loop="sweep", kind=kind) == 1


async def test_a_loop_that_keeps_failing_slows_down(pool: Pool) -> None:
    """A store that is away is not asked at every interval."""
    started: list[float] = []
    now = asyncio.get_running_loop().time

    async def tick() -> None:
        started.append(now())
        raise OSError

    async with looping(pool, "sweep", tick, interval_s=0.001):
        await eventually(holds_true(lambda: len(started) == 5))
    assert started[4] - started[3] >= 0.4 > started[1] - started[0]


async def test_a_stop_ends_a_loop_between_two_rounds(pool: Pool) -> None:
    """However long the interval, the loop ends soon after the stop."""
    rounds = 0

    async def tick() -> None:
        nonlocal rounds
        rounds += 1

    async with asyncio.timeout(2):
        async with looping(pool, "sweep", tick, interval_s=60):
            await eventually(holds_true(lambda: rounds == 1))
    assert rounds == 1


class Watched(loops.Pauses):
    """Counts how often a loop asked, and how often the table was looked at."""

    asked = looks = 0

    def paused(self, name: str) -> bool:
        """Answer as it does."""
        self.asked += name == "sweep"
        return super().paused(name)

    async def look(self) -> None:
        """Look as it does."""
        self.looks += 1
        await super().look()


@asynccontextmanager
async def watching(pool: Pool) -> AsyncIterator[Watched]:
    """Look at the table as the service does."""
    stop, pauses = asyncio.Event(), Watched(pool)
    watch = asyncio.create_task(pauses.watch(stop))
    try:
        yield pauses
    finally:
        stop.set()
        await watch


def is_paused(pauses: Watched, name: str, *, paused: bool) -> Callable[[], Awaitable[bool]]:
    """Return a check for `eventually`."""
    return holds_true(lambda: pauses.paused(name) == paused)


async def test_a_pause_stops_one_loop_until_it_is_resumed(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data stays as it is meanwhile; the others go on; who paused and why is kept."""
    monkeypatch.setattr(loops, "PAUSE_POLL_S", 0.05)
    sweep = sweep_of(pool, settings_for(database_url, "redis://127.0.0.1:1/0", mode="sweep"))
    await overdue(pool, 5)
    await loops.set_paused(conn, "sweep", paused=True, by="ann", reason="looking")
    counted = Counted()
    async with watching(pool) as pauses:
        await eventually(is_paused(pauses, "sweep", paused=True))
        assert not pauses.paused("worker")
        assert counted("expiry_loop_paused", loop="sweep") == 1
        asked = pauses.asked
        async with looping(pool, "sweep", sweep.one_pass, interval_s=0.01, pauses=pauses):
            await eventually(holds_true(lambda: pauses.asked >= asked + 10))
            assert await states(pool) == {"held": 5}
            row = await pool.fetchrow("SELECT name, paused, reason, changed_by FROM loops")
            assert row is not None
            assert tuple(row) == ("sweep", True, "looking", "ann")
            await loops.set_paused(conn, "sweep", paused=False, by="bob", reason=None)
            await eventually(expired(pool, 5))
    assert counted("expiry_loop_paused", loop="sweep") == 0


async def test_while_the_database_is_away_the_last_answer_stands(
    conn: asyncpg.Connection[asyncpg.Record], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage neither pauses nor resumes anything."""
    monkeypatch.setattr(loops, "PAUSE_POLL_S", 0.02)
    await loops.set_paused(conn, "worker", paused=True, by="ann", reason=None)
    async with (
        proxy_to(database_url) as proxy,
        asyncpg.create_pool(proxy.url, min_size=1, max_size=1) as cut_off,
        watching(cut_off) as pauses,
    ):
        await eventually(is_paused(pauses, "worker", paused=True))
        proxy.refuse()
        await loops.set_paused(conn, "worker", paused=False, by="ann", reason=None)
        looks = pauses.looks
        await eventually(holds_true(lambda: pauses.looks >= looks + 5))
        assert pauses.paused("worker")
        proxy.refuse(refusing=False)
        await eventually(is_paused(pauses, "worker", paused=False))


async def test_a_loop_that_does_not_exist_cannot_be_paused(
    conn: asyncpg.Connection[asyncpg.Record],
) -> None:
    """A slip of the pen is an error that names the loops there are."""
    with pytest.raises(LoopNotFoundError, match="worker, promoter, sweep, prune"):
        await loops.set_paused(conn, "wroker", paused=True, by="ann", reason=None)
