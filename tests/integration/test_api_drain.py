"""Told to stop, a server leaves in an order that breaks no request."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import AsyncExitStack

import pytest

from expiry import keys
from expiry.api import connection
from expiry.service import Service
from expiry.settings import Settings
from governor import GovernorSettings
from tests.api_client import TENANT, WAITING
from tests.edges import HEALTH, WITHIN_S, Pool, Served, request, served
from tests.helpers import eventually

ON_BOTH_LOOPS = True  # they close in ways of their own

READY = HEALTH.replace(b"healthz", b"readyz")
BODY = b'{"ttl_s": 60, "resource_id": "seat"}'
PLACE = request("POST", "/v1/holds", key=TENANT, body=BODY, Idempotency_Key="k")


@pytest.fixture(autouse=True)
async def _key(pool: Pool) -> None:
    """Let the tenant's key open the API, and give it a seat that can be locked."""
    async with pool.acquire() as conn:
        await keys.create(conn, tenant_id="shop", scopes=("holds", "read"), key=TENANT)
        await conn.execute(
            "INSERT INTO resources (tenant_id, resource_id, capacity) VALUES ('shop', 'seat', 9)"
        )


async def refused(it: Served) -> bool:
    """Say whether new connections are turned away."""
    try:
        async with it.wire():
            return False
    except OSError:
        return True


async def test_it_is_not_ready_at_once_and_answers_on(database_url: str) -> None:
    """Until its time to drain is over; meanwhile each answer ends its connection, old or new."""
    drain_s = 0.5
    settings = Settings(database_url=database_url, mode="sweep", api_port=0, api_drain_s=drain_s)
    stop = asyncio.Event()
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    it = Service(settings, GovernorSettings(), api=True, background=False, stop=stop, bound=bound)
    running = asyncio.create_task(it.run())
    server = Served(await bound, stop, running)
    async with server.wire() as old, server.wire() as new, server.wire() as idle:
        for wire in (old, idle):
            wire.send(READY)
            answer = await wire.answer()
            assert (answer.status, answer.headers.get("connection")) == (200, None)
        started_s = time.monotonic()
        stop.set()
        old.send(READY)
        answer = await old.answer()
        assert answer.refusal() == (503, "not_ready")
        assert answer.problem()["failing"] == {"draining": "is about to stop"}
        new.send(PLACE)
        answer = await new.answer()
        assert (answer.status, answer.headers["connection"]) == (201, "close")
        assert await old.ended() == await new.ended() == b""
        assert not await refused(server)
        await eventually(lambda: refused(server))
        assert await idle.ended() == b""
        async with asyncio.timeout(WITHIN_S):
            await running
        assert drain_s < time.monotonic() - started_s < drain_s + 2


async def test_a_body_under_way_is_read_to_its_end(pool: Pool) -> None:
    """Although the listener is closed: the upload is finished within the grace, and answered."""
    async with served(pool) as it, it.wire() as wire:
        wire.send(PLACE[:-10])
        assert await it.healthy()  # so it has read that, too
        it.stop.set()
        await eventually(lambda: refused(it))
        wire.send(PLACE[-10:])
        answer = await wire.answer()
        assert (answer.status, answer.headers["connection"]) == (201, "close")


async def test_idle_connections_are_closed_last(pool: Pool) -> None:
    """While a request is under way they are answered; then those that said nothing are closed."""
    async with AsyncExitStack() as stack, served(pool) as it:
        slow, asking, silent = [await stack.enter_async_context(it.wire()) for _ in range(3)]
        for wire in (slow, asking, silent):
            wire.send(HEALTH)
            assert (await wire.answer()).status == 200
        async with pool.acquire() as conn, conn.transaction():
            await conn.execute("SELECT FROM resources FOR UPDATE")
            slow.send(PLACE)
            await eventually(lambda: pool.fetchval(WAITING))
            it.stop.set()
            await eventually(lambda: refused(it))
            asking.send(HEALTH)
            answer = await asking.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await silent.quiet(0.1)
        assert (await slow.answer()).status == 201
        assert await silent.ended() == b""


async def test_who_had_connected_is_served(pool: Pool) -> None:
    """A connection that waits with the kernel when the listener closes is no broken one."""
    async with served(pool) as it:
        with socket.create_connection(
            ("127.0.0.1", it.port)
        ) as client:  # blocks the loop, which has not seen it
            client.sendall(HEALTH)
            it.stop.set()
            reader, writer = await asyncio.open_connection(sock=client)
            assert (await reader.readline()).split()[1] == b"200"
            writer.close()
            await writer.wait_closed()


async def test_what_was_on_its_way_is_answered(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes just after the listener closed, on a connection that idles or has had none yet."""
    monkeypatch.setattr(connection, "SETTLE_S", 1.0)
    async with served(pool) as it, it.wire() as idle, it.wire() as new:
        idle.send(HEALTH)
        assert (await idle.answer()).status == 200
        it.stop.set()
        await eventually(lambda: refused(it))
        for wire in (idle, new):
            wire.send(HEALTH)
            assert (await wire.answer()).status == 200


async def test_stopping_does_not_wait_for_the_silent(pool: Pool) -> None:
    """A connection on which nothing came, or half a head, is no request under way."""
    async with served(pool) as it, it.wire() as nothing, it.wire() as half:
        half.send(HEALTH[:10])
        assert await it.healthy()
        started_s = time.monotonic()
        it.stop.set()
        assert await nothing.ended() == await half.ended() == b""
        await it.serving
        assert time.monotonic() - started_s < 1
