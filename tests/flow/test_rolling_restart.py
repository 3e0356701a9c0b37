"""A fleet of APIs is restarted one by one behind a load balancer, while a shop goes on selling."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import aiohttp

from tests.balancer import balanced
from tests.commands import Running, ask, prints, started
from tests.fleet import Pool, states
from tests.scene import audit

CLIENTS = 8
SEATS = 4
DRAIN_S = 0.5  # ten looks of the balancer


@dataclass(slots=True)
class Load:
    """Clients of a shop: each places, looks, and confirms; half keep a connection, half make one per request."""

    url: str
    key: str
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    answers: Counter[int] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)

    async def client(self, number: int) -> None:
        """Sell until told to stop; nothing is ever sent a second time."""
        connector = aiohttp.TCPConnector(limit=1, force_close=number % 2 == 1)
        headers = {"Authorization": f"Bearer {self.key}"}
        async with aiohttp.ClientSession(self.url, connector=connector, headers=headers) as session:
            session._retry_connection = False  # noqa: SLF001 - it would hide a broken GET; there is no other way
            while not self.stop.is_set():
                await self.sell(session, f"seat-{number % SEATS}")

    async def sell(self, session: aiohttp.ClientSession, seat: str) -> None:
        """Place a hold, look at it, confirm it."""
        ref = str(uuid4())
        body = {"ttl_s": 60, "resource_id": seat, "external_ref": ref}
        hold = await self.ask(session, "POST", "/v1/holds", json=body, headers={"Idempotency-Key": ref})
        if hold is not None:
            self.placed.append(ref)
            await self.ask(session, "GET", f"/v1/holds/{hold['id']}")
            await self.ask(session, "POST", f"/v1/holds/{hold['id']}/confirm")

    async def ask(self, session: aiohttp.ClientSession, method: str, path: str, **request: Any) -> Any:  # noqa: ANN401
        """Send one request, and note how it ended."""
        try:
            async with session.request(method, path, **request) as response:
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError) as error:
            self.broken.append(f"{method} {path}: {error!r}")
            return None
        self.answers[response.status] += 1
        return answer if response.ok else None


async def leave(api: Running, *, again: bool) -> None:
    """Stop an API in good order, although whoever stops it may be impatient."""
    api.process.send_signal(signal.SIGTERM)
    if again:
        await api.event("http.draining")
        api.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        assert await api.process.wait() == 0, api.said
    assert "cut_off" not in api.said
    assert '"level": "error"' not in api.said


async def test_a_rolling_restart_breaks_no_request(pool: Pool, database_url: str, redis_url: str) -> None:
    """Each API is replaced under load: no 5xx, no broken connection, nothing placed twice, and the books balance."""
    environment = {
        "EXPIRY_DATABASE_URL": database_url,
        "EXPIRY_REDIS_URL": redis_url,
        "EXPIRY_API_PORT": "0",
        "EXPIRY_API_DRAIN_S": str(DRAIN_S),
    }
    key = (await prints("keys", "create", "--tenant", "shop", **environment)).strip()
    async with AsyncExitStack() as stack:

        async def start() -> Running:
            return await stack.enter_async_context(started("api", **environment))

        fleet = [await start(), await start()]
        urls = [await api.api() for api in fleet]
        for seat in range(SEATS):
            body = {"capacity": 1_000_000}
            assert (await ask("PUT", f"{urls[0]}/v1/resources/seat-{seat}", key=key, body=body))[0] == 200
        balancer, url = await stack.enter_async_context(balanced(*urls))
        load = Load(url, key)
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(load.client(number))
            for index, (api, old) in enumerate(zip(fleet, urls, strict=True)):
                await leave(api, again=index == 1)
                new = await (await start()).api()
                await balancer.replace(old, new)
            load.stop.set()
        assert load.broken == []
        assert set(load.answers) == {200, 201}
        assert load.answers.total() > 300
        assert balancer.turned_away == 0
        assert all(connections > 0 for connections in balancer.connections.values())
        assert len(balancer.connections) > 2
    assert await states(pool) == {"confirmed": len(load.placed)}
    refs = [row["external_ref"] for row in await pool.fetch("SELECT external_ref FROM holds")]
    assert sorted(refs) == sorted(load.placed)
    await audit(pool)
