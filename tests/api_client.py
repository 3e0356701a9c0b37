"""The API as a client sees it: an application on a free port, keys, and short ways to ask it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from expiry import keys
from expiry.api import make_app
from expiry.settings import Settings
from expiry.wakeups import Wakeups, connect_redis
from governor import Bucket, GovernorSettings, LocalBucket

TENANT, OTHER_TENANT, PLATFORM = "exk_tenant", "exk_other", "exk_platform"


@dataclass
class Api:
    """One running API. Requests carry the tenant's key unless told otherwise."""

    client: TestClient[Any, Any]
    wakeups: Wakeups | None
    bucket: Bucket
    failing: dict[str, str] = field(default_factory=dict)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        key: str | None = TENANT,
        headers: Mapping[str, str] | None = None,
        **body: Any,  # noqa: ANN401 - json= or data=, as aiohttp takes them
    ) -> ClientResponse:
        """Send one request and read its answer to the end."""
        auth = {} if key is None else {"Authorization": f"Bearer {key}"}
        response = await self.client.request(method, path, headers={**auth, **(headers or {})}, **body)
        await response.read()
        return response

    async def place(self, *, key: str = TENANT, once: str | None = None, **asked: object) -> ClientResponse:
        """Place a hold on one unit of `seat` for a minute, or what is asked instead."""
        document = {"ttl_s": 60, **({} if "items" in asked else {"resource_id": "seat"}), **asked}
        if "expires_at" in asked:
            del document["ttl_s"]
        return await self.ask(
            "POST", "/v1/holds", key=key, headers={"Idempotency-Key": once or str(uuid4())}, json=document
        )

    async def placed(self, **asked: Any) -> dict[str, Any]:  # noqa: ANN401 - as place
        """Place a hold that must succeed, and answer it."""
        response = await self.place(**asked)
        assert response.status == 201, await response.text()
        return await read(response)

    async def verb(
        self,
        hold: Mapping[str, Any],
        verb: str,
        *,
        headers: Mapping[str, str] | None = None,
        **asked: object,
    ) -> ClientResponse:
        """Renew, confirm, release or return a hold."""
        return await self.ask("POST", f"/v1/holds/{hold['id']}/{verb}", headers=headers, json=asked)

    async def hold(self, hold: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the hold as it is now."""
        return await read(await self.ask("GET", f"/v1/holds/{hold['id']}"))

    async def declare(self, resource_id: str = "seat", *, capacity: int | None = 1) -> dict[str, Any]:
        """Declare a resource."""
        response = await self.ask("PUT", f"/v1/resources/{resource_id}", json={"capacity": capacity})
        assert response.status == 200, await response.text()
        return await read(response)

    async def resource(self, resource_id: str = "seat") -> dict[str, Any]:
        """Answer a resource as it is now."""
        return await read(await self.ask("GET", f"/v1/resources/{resource_id}"))


async def read(response: ClientResponse) -> dict[str, Any]:
    """Answer the JSON object of a response."""
    document = await response.json(content_type=None)
    assert isinstance(document, dict)
    return document


async def problem(response: ClientResponse, status: int, code: str) -> dict[str, Any]:
    """Check that the answer is this problem, as RFC 9457 has it, and answer it."""
    assert (response.status, response.content_type) == (status, "application/problem+json"), await response.text()
    found = await read(response)
    assert (found["status"], found["code"]) == (status, code)
    assert all(isinstance(found[member], str) for member in ("type", "title", "detail", "instance"))
    assert ("Retry-After" in response.headers) == (status in (429, 503) or code == "key_in_progress")
    return found


async def make_overdue(pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Let the deadline of every held hold have passed a second ago."""
    await pool.execute(
        "UPDATE holds SET placed_at = statement_timestamp() - (expires_at - placed_at) - interval '1 s', "
        "expires_at = statement_timestamp() - interval '1 s' WHERE state = 'held'"
    )


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
