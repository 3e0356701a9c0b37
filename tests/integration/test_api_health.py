from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from aiohttp import ClientSession, ServerDisconnectedError, web
from redis.asyncio import Redis

from expiry import errors
from expiry.api import make_app, make_health_app, serve
from expiry.api.readiness import Readiness
from expiry.settings import Settings
from tests.api_client import TENANT, WAITING, Api, problem
from tests.helpers import eventually

NOWHERE = "redis://127.0.0.1:1/0"


async def test_health_readiness_and_metrics_need_no_key(api: Api) -> None:
    """All three answer on the API's own port; routes are labels, ids are not."""
    hold = await api.placed()
    await api.hold(hold)
    await api.ask("GET", "/never/heard/of")
    for path in ("/healthz", "/readyz"):
        assert (await api.ask("GET", path, key=None)).status == 200
    response = await api.ask("GET", "/metrics", key=None)
    text = await response.text()
    assert response.headers["Content-Type"].startswith("text/plain")
    assert 'expiry_api_requests_total{method="POST",route="/v1/holds",status="201"}' in text
    assert 'expiry_api_requests_total{method="POST",route="/v1/holds",status="503"}' in text
    assert 'expiry_api_request_seconds_count{route="/v1/holds/{id}"}' in text
    assert hold["id"] not in text
    assert "/never" not in text


async def test_methods_are_bounded_labels(api: Api) -> None:
    """A made-up method counts as other."""
    assert (await api.ask("PURGE", "/v1/holds")).status == 405
    assert "PURGE" not in await (await api.ask("GET", "/metrics")).text()


async def test_not_ready_names_what_fails(
    start_api: Callable[..., Any], redis_url: str, pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    """Redis away: 503 names it, alive all the same; in sweep mode it does not matter."""
    api = await start_api(NOWHERE)
    found = await problem(await api.ask("GET", "/readyz", key=None), 503, "not_ready")
    assert list(found["failing"]) == ["redis"]
    assert (await api.ask("GET", "/healthz", key=None)).status == 200
    assert (await (await start_api(None)).ask("GET", "/readyz", key=None)).status == 200
    sweep = Readiness(pool=pool, settings=Settings(mode="sweep"), wakeups=api.wakeups, ready=dict)
    assert await sweep.failing() == {}

    api = await start_api(redis_url)
    api.failing["worker"] = "has not claimed for 60 s"
    found = await problem(await api.ask("GET", "/readyz", key=None), 503, "not_ready")
    assert found["failing"] == {"worker": "has not claimed for 60 s"}


async def test_a_store_that_refuses_writes_is_not_ready(
    start_api: Callable[..., Any], redis_url: str, database_url: str, redis: Redis
) -> None:
    """A standby, and a Redis out of memory: both answer reads, and neither is ready."""
    read_only = {"default_transaction_read_only": "on"}
    async with asyncpg.create_pool(database_url, server_settings=read_only, min_size=1) as standby:
        api = await start_api(redis_url, standby)
        await redis.config_set("maxmemory", "1")
        try:
            found = await problem(await api.ask("GET", "/readyz", key=None), 503, "not_ready")
        finally:
            await redis.config_set("maxmemory", "0")
        assert sorted(found["failing"]) == ["postgresql", "redis"]
        await problem(await api.place(), 503, "unavailable")


async def test_probes_share_one_check(pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Fifty at once write once, and a second later once more."""
    await pool.execute(
        "CREATE SEQUENCE writes; CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN PERFORM nextval('writes'); RETURN new; END$$; "
        "CREATE TRIGGER note BEFORE UPDATE ON expiry_schema FOR EACH ROW EXECUTE FUNCTION note()"
    )
    now_s = 0.0
    settings = Settings(mode="sweep")
    readiness = Readiness(pool=pool, settings=settings, wakeups=None, ready=dict, clock=lambda: now_s)
    for second in (1, 2):
        assert await asyncio.gather(*(readiness.failing() for _ in range(50))) == [{}] * 50
        assert await pool.fetchval("SELECT last_value FROM writes") == second
        now_s += 1


async def refused(port: int) -> bool:
    """Say whether new connections are turned away."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    writer.close()
    return False


@pytest.mark.parametrize("patient", [True, False])
async def test_stopping_waits_for_running_requests(
    start_api: Callable[..., Any], pool: asyncpg.Pool[asyncpg.Record], *, patient: bool
) -> None:
    """A place that waits for a lock at SIGTERM is answered within the grace period, and cut off after it."""
    await (await start_api(None)).declare()
    stop = asyncio.Event()
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    settings = Settings(mode="sweep", stop_grace_s=10 if patient else 0.1)
    app = make_app(pool=pool, settings=settings, wakeups=None, bucket=None)
    async with asyncio.TaskGroup() as group, ClientSession() as session:
        serving = group.create_task(serve(app, settings, 0, stop, bound=bound))
        port = await bound

        async def place() -> int:
            headers = {"Authorization": f"Bearer {TENANT}", "Idempotency-Key": "k"}
            seat = {"ttl_s": 5, "resource_id": "seat"}
            async with session.post(
                f"http://127.0.0.1:{port}/v1/holds", json=seat, headers=headers
            ) as response:
                return response.status

        async with pool.acquire() as conn, conn.transaction():
            await conn.execute("SELECT FROM resources FOR UPDATE")
            request = asyncio.ensure_future(place())
            await eventually(lambda: pool.fetchval(WAITING))
            stop.set()
            await eventually(lambda: refused(port))
            if not patient:
                async with asyncio.timeout(5):
                    await serving
        if patient:
            assert await request == 201
        else:
            with pytest.raises(ServerDisconnectedError):
                await request  # placed or not: its key will tell


async def test_a_port_in_use_is_told_in_one_sentence(pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """SetupError, which the command line turns into status 2."""
    stop = asyncio.Event()
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    settings = Settings(mode="sweep")

    def app() -> web.Application:
        return make_health_app(pool=pool, settings=settings, wakeups=None)

    async with asyncio.TaskGroup() as group:
        group.create_task(serve(app(), settings, 0, stop, bound=bound))
        port = await bound
        with pytest.raises(errors.SetupError, match=rf"127\.0\.0\.1:{port}"):
            await serve(app(), settings, port, stop)
        stop.set()


async def test_a_process_without_the_api_has_health_and_metrics_only(
    pool: asyncpg.Pool[asyncpg.Record],
) -> None:
    """/v1 is not there."""
    stop = asyncio.Event()
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    settings = Settings(mode="sweep")
    app = make_health_app(pool=pool, settings=settings, wakeups=None)
    async with asyncio.TaskGroup() as group, ClientSession() as session:
        group.create_task(serve(app, settings, 0, stop, bound=bound))
        base = f"http://127.0.0.1:{await bound}"
        statuses = {}
        for path in ("/healthz", "/readyz", "/metrics", "/v1/overview"):
            async with session.get(base + path) as response:
                statuses[path] = response.status
        assert statuses == {"/healthz": 200, "/readyz": 200, "/metrics": 200, "/v1/overview": 404}
        stop.set()
