from __future__ import annotations

from collections.abc import Callable
from typing import Any

import asyncpg

from expiry.deadletters import record_failure
from expiry.settings import Settings
from tests.api_client import PLATFORM, Api, make_overdue, problem, read

NOWHERE = "redis://127.0.0.1:1/0"


async def overview(api: Api) -> dict[str, Any]:
    """Answer the overview."""
    response = await api.ask("GET", "/v1/overview", key=PLATFORM)
    assert response.status == 200
    return await read(response)


# --- overview


async def test_an_idle_service_has_nothing_to_show(api: Api) -> None:
    """Zeros, not nulls."""
    found = await overview(api)
    assert [found[f] for f in ("eligible", "expired", "difference", "due", "backed_off", "queue_depth")] == [
        0
    ] * 6
    assert found["oldest_due_age_s"] == {"database": 0, "queue": 0}
    assert found["dead_letters_open"] == 0


async def test_the_overview_says_what_is_late(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Eligible are the expired and the overdue ones; the difference is what should have ended and has not."""
    await api.declare(capacity=3)
    for _ in range(3):
        await api.placed()
    await make_overdue(pool)
    await api.placed(quantity=1)  # expires one on the way
    assert api.wakeups is not None
    await api.wakeups.redis.zadd(api.wakeups.queue, {"expire:x": 1})
    found = await overview(api)
    assert [found[f] for f in ("eligible", "expired", "difference", "due")] == [3, 1, 2, 2]
    assert 1 <= found["oldest_due_age_s"]["database"] < 60
    assert found["oldest_due_age_s"]["queue"] > 1_000_000_000
    assert found["queue_depth"] == 5


async def test_poison_rows_and_dead_letters_are_counted(
    api: Api, pool: asyncpg.Pool[asyncpg.Record], conn: asyncpg.Connection[asyncpg.Record]
) -> None:
    """A row that backs off is still late; a dead letter is open until somebody closes it."""
    await api.placed()
    await make_overdue(pool)
    hold_id = await conn.fetchval("SELECT id FROM holds")
    error = asyncpg.CheckViolationError("poison")
    await record_failure(conn, hold_id, 1, error=error, settings=Settings(attempts_max=2))
    assert (await overview(api))["dead_letters_open"] == 0
    await record_failure(conn, hold_id, 1, error=error, settings=Settings(attempts_max=2))
    found = await overview(api)
    assert [found[f] for f in ("due", "backed_off", "difference", "dead_letters_open")] == [0, 1, 1, 1]


async def test_the_overview_does_without_the_queue(start_api: Callable[..., Any]) -> None:
    """Redis away, or not used at all: its figures are null, the database's are there."""
    for redis_url in (NOWHERE, None):
        found = await overview(await start_api(redis_url))
        assert (found["queue_depth"], found["oldest_due_age_s"]["queue"]) == (None, None)
        assert found["due"] == 0


# --- loops


async def test_an_operator_pauses_and_resumes_a_loop(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Who and why is kept; an unknown loop is 404, a pause without a reason 422."""
    paused = await api.ask("POST", "/v1/loops/sweep/pause", key=PLATFORM, json={"reason": "vacuum"})
    assert paused.status == 200
    row = await pool.fetchrow("SELECT paused, reason, changed_by FROM loops WHERE name = 'sweep'")
    assert row is not None
    assert (row["paused"], row["reason"]) == (True, "vacuum")
    assert row["changed_by"].startswith("api:")
    assert (await api.ask("POST", "/v1/loops/sweep/resume", key=PLATFORM)).status == 200
    assert await pool.fetchval("SELECT paused FROM loops") is False
    unknown = await api.ask("POST", "/v1/loops/nap/pause", key=PLATFORM, json={"reason": "x"})
    await problem(unknown, 404, "not_found")
    await problem(await api.ask("POST", "/v1/loops/sweep/pause", key=PLATFORM, json={}), 422, "invalid")
