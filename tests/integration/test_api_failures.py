from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis

from expiry import holds
from expiry.api import database
from expiry.api.hints import Hints
from expiry.wanted import Item, Wanted
from tests.api_client import WAITING, Api, make_overdue, problem, read
from tests.helpers import eventually

NOWHERE = "redis://127.0.0.1:1/0"


async def test_redis_never_fails_a_request(
    start_api: Callable[..., Any], pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    """Placing, renewing and confirming work without it."""
    api = await start_api(NOWHERE)
    hold = await api.placed()
    assert (await api.verb(hold, "renew", ttl_s=30)).status == 200
    assert (await api.verb(hold, "confirm")).status == 200
    assert await pool.fetchval("SELECT state FROM holds") == "confirmed"


async def test_a_redis_that_hangs_delays_one_request_only(start_api: Callable[..., Any]) -> None:
    """It takes connections and never answers: ten requests in a row wait for it once."""
    held: list[asyncio.StreamWriter] = []

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        await reader.read()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        api = await start_api(f"redis://127.0.0.1:{port}/0", redis_timeout_s=1)
        async with asyncio.timeout(5):
            for _ in range(10):
                await api.placed()
        for writer in held:
            writer.close()
    assert len(held) < 4


async def test_wakeups_of_concurrent_requests_go_in_one_call(
    api: Api, conn: asyncpg.Connection[asyncpg.Record], redis: Redis
) -> None:
    """While the first is on its way the others gather; none is lost."""
    assert api.wakeups is not None
    wanted = [Wanted(items=[Item("seat")], ttl_s=60) for _ in range(50)]
    placed = (await holds.place_many(conn, wanted, tenant_id="shop")).holds
    hints = Hints(api.wakeups)
    await hints.enqueue(placed[:1])  # loads the script
    await redis.config_resetstat()
    await asyncio.gather(*(hints.enqueue([hold]) for hold in placed))
    stats = await redis.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] <= 2
    assert await api.wakeups.depth() == 50


async def test_a_database_away_is_503(start_api: Callable[..., Any], redis_url: str) -> None:
    """Nobody listens there: unavailable, with Retry-After, for every request."""
    async with asyncpg.create_pool("postgresql://127.0.0.1:1/x", min_size=0) as nowhere:
        api = await start_api(redis_url, nowhere)
        await problem(await api.place(), 503, "unavailable")
        found = await problem(await api.ask("GET", "/readyz", key=None), 503, "not_ready")
        assert list(found["failing"]) == ["postgresql"]


async def test_lost_connections_are_503_and_then_forgotten(
    api: Api, pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    """After a failover the next request or the one after it succeeds, without a restart."""
    await api.placed()
    async with pool.acquire() as conn:
        await conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    responses = [await api.place() for _ in range(12)]
    assert {r.status for r in responses} <= {201, 503}
    assert responses[-1].status == 201


async def test_a_statement_cut_off_is_503(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """An administrator's shutdown in the middle of a request."""
    await api.declare()
    async with pool.acquire() as conn, conn.transaction():
        await conn.execute("SELECT FROM resources FOR UPDATE")
        request = asyncio.ensure_future(api.place())
        pid = await eventually(lambda: pool.fetchval(WAITING))
        await conn.execute("SELECT pg_terminate_backend($1)", pid)
        await problem(await request, 503, "unavailable")


async def test_no_free_connection_is_503(
    start_api: Callable[..., Any], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request does not wait for ever for the pool."""
    monkeypatch.setattr(database, "ACQUIRE_S_MAX", 0.05)
    async with asyncpg.create_pool(database_url, min_size=1, max_size=1) as small:
        api = await start_api(None, small)
        hold = await api.placed()
        async with asyncio.timeout(1), small.acquire():
            await problem(await api.ask("GET", f"/v1/holds/{hold['id']}"), 503, "busy")
        assert (await api.hold(hold))["state"] == "held"


async def fail_updates(pool: asyncpg.Pool[asyncpg.Record], sqlstate: str, times: int) -> None:
    """Let the next updates of holds fail; a sequence counts, since it does not roll back."""
    await pool.execute(
        "CREATE SEQUENCE failures; CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN "
        f"IF nextval('failures') <= {times} THEN RAISE EXCEPTION USING ERRCODE = '{sqlstate}'; END IF; "
        "RETURN new; END$$; CREATE TRIGGER fail BEFORE UPDATE ON holds FOR EACH ROW EXECUTE FUNCTION fail()"
    )


@pytest.mark.parametrize("sqlstate", ["40P01", "40001"])
@pytest.mark.parametrize("key", [None, "k"])
async def test_deadlocks_and_serialization_failures_are_retried_twice(
    api: Api, pool: asyncpg.Pool[asyncpg.Record], sqlstate: str, key: str | None
) -> None:
    """The client sees the third attempt; the hold is changed once."""
    hold = await api.placed()
    await fail_updates(pool, sqlstate, 2)
    headers = {} if key is None else {"Idempotency-Key": key}
    response = await api.verb(hold, "renew", headers=headers, ttl_s=9)
    assert response.status == 200, await response.text()
    assert (await read(response))["generation"] == 2
    assert await pool.fetchval("SELECT count(*) FROM outbox WHERE type = 'hold.renewed'") == 1


async def test_the_third_conflict_is_503(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Busy, three attempts, nothing changed."""
    hold = await api.placed()
    await fail_updates(pool, "40P01", 3)
    await problem(await api.verb(hold, "renew", ttl_s=9), 503, "busy")
    assert await pool.fetchval("SELECT last_value FROM failures") == 3
    assert (await api.hold(hold))["generation"] == 1


@pytest.mark.parametrize("sqlstate", ["22003", "23514", "P0001"])
async def test_a_poison_row_in_the_way_is_busy(
    api: Api, pool: asyncpg.Pool[asyncpg.Record], sqlstate: str
) -> None:
    """What place would reclaim and cannot: come again, once; nothing is placed."""
    await api.declare(capacity=1)
    await api.placed()
    await make_overdue(pool)
    await fail_updates(pool, sqlstate, 99)
    await problem(await api.place(), 503, "busy")
    assert await pool.fetchval("SELECT last_value FROM failures") == 1
    assert await pool.fetchval("SELECT count(*) FROM holds") == 1


@pytest.mark.parametrize(
    ("sqlstate", "code"), [("57014", "busy"), ("53300", "unavailable"), ("42501", "unavailable")]
)
async def test_other_failures_of_the_database_are_503(
    api: Api, pool: asyncpg.Pool[asyncpg.Record], sqlstate: str, code: str
) -> None:
    """Cancelled, out of connections, not allowed: never a 500, never tried again."""
    await api.declare()
    hold = await api.placed()
    await fail_updates(pool, sqlstate, 99)
    await problem(await api.verb(hold, "release"), 503, code)
    assert await pool.fetchval("SELECT last_value FROM failures") == 1
    await pool.execute("CREATE TRIGGER fail BEFORE UPDATE ON resources FOR EACH ROW EXECUTE FUNCTION fail()")
    await problem(await api.ask("PUT", "/v1/resources/seat", json={"capacity": 2}), 503, code)


async def test_a_bug_of_ours_is_a_500_that_tells_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has it; the client gets a problem."""

    def broken(_hold: object) -> dict[str, Any]:
        raise KeyError("secret")

    monkeypatch.setattr("expiry.api.holds.as_stored", broken)
    response = await api.place()
    await problem(response, 500, "internal")
    assert "secret" not in await response.text()


async def test_a_locked_resource_leaves_connections_to_others(
    start_api: Callable[..., Any], database_url: str
) -> None:
    """Whoever changes or places holds of it waits; others buy and look as ever."""
    async with asyncpg.create_pool(database_url, min_size=5, max_size=5) as five:
        api = await start_api(None, five)
        await api.declare(capacity=100)
        held = [await api.placed() for _ in range(12)]
        conn, watch = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
        try:
            async with conn.transaction():
                await conn.execute("SELECT FROM resources FOR UPDATE")
                waiting = [asyncio.ensure_future(api.verb(hold, "release")) for hold in held]
                waiting += [
                    asyncio.ensure_future(api.place(items=[{"resource_id": "seat"}, {"resource_id": "x"}]))
                ]
                await eventually(lambda: watch.fetchval(f"SELECT count(*) > 1 FROM ({WAITING}) w"))
                async with asyncio.timeout(1):
                    for _ in range(3):
                        other = await api.placed(resource_id="other")
                        assert (await api.hold(other))["state"] == "held"
            assert {answer.status for answer in await asyncio.gather(*waiting)} <= {200, 201}
        finally:
            await conn.close()
            await watch.close()
