"""An API for each test that asks for one, on the test's own database and queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeAlias

import asyncpg
import pytest
import uvloop
from aiohttp.test_utils import TestClient, TestServer

from expiry import keys
from expiry.api import make_app
from expiry.settings import Settings
from expiry.wakeups import Wakeups, connect_redis
from governor import GovernorSettings, LocalBucket
from tests.api_client import OTHER_TENANT, PLATFORM, TENANT, Api

LoopFactory: TypeAlias = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Run a file that says ON_BOTH_LOOPS on uvloop too, as the commands do; the loops' sockets are not alike."""
    loops: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if getattr(getattr(item, "module", None), "ON_BOTH_LOOPS", False):
        loops["uvloop"] = uvloop.new_event_loop
    return loops


@pytest.fixture
async def start_api(pool: asyncpg.Pool[asyncpg.Record]) -> AsyncIterator[Callable[..., Any]]:
    """Give the test a way to start APIs, with keys of two tenants and of the platform."""
    async with pool.acquire() as conn:
        every = ("holds", "read", "operate")
        await keys.create(conn, tenant_id="shop", scopes=every, key=TENANT)
        await keys.create(conn, tenant_id="other", scopes=every, key=OTHER_TENANT)
        await keys.create(conn, tenant_id=None, scopes=("platform",), key=PLATFORM)
    running: list[TestClient[Any, Any]] = []
    clients: list[Any] = []

    async def start(redis_url: str | None, pool: asyncpg.Pool[asyncpg.Record] = pool, **changes: Any) -> Api:  # noqa: ANN401
        settings = Settings(
            redis_url=redis_url or "redis://localhost:1", mode="hybrid" if redis_url else "sweep", **changes
        )
        wakeups = None
        if redis_url is not None:
            redis = connect_redis(settings)
            clients.append(redis)
            wakeups = Wakeups(redis, settings, GovernorSettings())
        bucket = LocalBucket(floor_per_s=1)
        failing: dict[str, str] = {}
        app = make_app(pool=pool, settings=settings, wakeups=wakeups, bucket=bucket, ready=lambda: failing)
        client = TestClient(TestServer(app))
        await client.start_server()
        running.append(client)
        return Api(client, wakeups, bucket, failing)

    yield start
    for client in running:
        await client.close()
    for redis in clients:
        await redis.aclose()


@pytest.fixture
async def api(start_api: Callable[..., Any], redis_url: str) -> Api:
    """Give the test an API with its queue."""
    started: Api = await start_api(redis_url)
    return started
