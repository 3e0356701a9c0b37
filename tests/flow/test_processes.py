"""`expiry api` and `expiry worker` as processes of their own, operated as people operate them."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import asyncpg
import pytest
from aiohttp import ClientConnectionError
from redis.asyncio import Redis

from tests.commands import Running, ask, explained, invoke, place, prints, started
from tests.faults import gate_shut
from tests.fleet import Pool, assert_kept, expired, holds_true, lags_ms, overdue, states
from tests.helpers import eventually

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

# One process is enough to keep a batch of one hold waiting: no second loop may end it meanwhile.
ALONE = {"EXPIRY_SWEEP_ENABLED": "false", "EXPIRY_PROMOTER_ENABLED": "false"}


@pytest.fixture
def stores(database_url: str, redis_url: str) -> dict[str, str]:
    """Give the environment that names the test's own stores."""
    return {"EXPIRY_DATABASE_URL": database_url, "EXPIRY_REDIS_URL": redis_url}


@dataclass(frozen=True, slots=True)
class Fleet:
    """An API and a worker, each where it listens, and a key."""

    api: str
    health: str
    key: str
    worker: Running

    async def place(self) -> None:
        """Place a hold of a second."""
        await place(self.api, self.key, ttl_s=1)

    async def metric(self, name: str) -> float:
        """Read one of the worker's metrics."""
        _, text = await ask("GET", f"{self.health}/metrics")
        [value] = [line.split()[-1] for line in text.splitlines() if line.startswith(name + " ")]
        return float(value)


@asynccontextmanager
async def fleet(stores: dict[str, str], **worker: str) -> AsyncIterator[Fleet]:
    """Run an API and a worker until both listen."""
    async with (
        started("api", **stores, EXPIRY_API_PORT="0") as serving,
        started("worker", **stores, EXPIRY_METRICS_PORT="0", **worker) as working,
    ):
        api, health = await asyncio.gather(serving.api(), working.api())
        key = (await prints("keys", "create", "--tenant", "shop", **stores)).strip()
        yield Fleet(api, health, key, working)
        assert (await serving.stop())[0] == 0


async def test_a_hold_placed_over_http_is_ended_by_the_worker(pool: Pool, stores: dict[str, str]) -> None:
    """On time, and both processes answer their probes; the worker's port has no API."""
    async with fleet(stores) as it:
        await it.place()
        for url in (it.api, it.health):
            assert (await ask("GET", f"{url}/healthz"))[0] == 200
            assert (await ask("GET", f"{url}/readyz"))[0] == 200
        assert (await ask("GET", f"{it.health}/v1/overview", key=it.key))[0] == 404
        await eventually(expired(pool, 1))
        [lag_ms] = await lags_ms(pool)
        assert 0 <= lag_ms < 500
        assert await it.metric("expiry_wakeups_claimed_total") == 1
        assert await pool.fetchval("SELECT ended_by FROM holds") == "worker"
        status, took_s = await it.worker.stop(signal.SIGINT)
        assert status == 0
        assert took_s < 2


async def test_the_log_has_the_form_that_is_asked_for(stores: dict[str, str]) -> None:
    """An option counts more than the environment; console is for people, json for collectors."""
    forms = {"EXPIRY_LOG_FORMAT": "json", "EXPIRY_API_PORT": "0"}
    async with started("api", "--log-format", "console", **stores, **forms) as running:
        await eventually(holds_true(lambda: "http.listening" in running.said))
        assert not running.said.startswith("{")
        assert (await running.stop())[0] == 0


OVERDUE = "SELECT bool_and(expires_at < clock_timestamp() - interval '1.5 s') FROM holds"


async def test_a_pause_holds_everything_until_the_resume(pool: Pool, stores: dict[str, str]) -> None:
    """With worker and sweep paused nothing ends, not even by a process that starts then; afterwards all does."""
    await overdue(pool, 1)
    for loop in ("worker", "sweep"):
        await prints("pause", loop, "--reason", "looking", "--by", "ann", **stores)
    async with fleet(stores, EXPIRY_SWEEP_GRACE_S="0") as it:
        await it.place()

        await eventually(lambda: pool.fetchval(OVERDUE))
        assert await it.metric('expiry_loop_paused{loop="worker"}') == 1
        assert (await ask("GET", f"{it.health}/readyz"))[0] == 200
        assert await states(pool) == {"held": 2}
        for loop in ("worker", "sweep"):
            await prints("resume", loop, **stores)
        await eventually(expired(pool, 2))


async def test_a_running_worker_heeds_a_pause(pool: Pool, stores: dict[str, str]) -> None:
    """It takes note within a second, and of the resume as well."""
    async with fleet(stores, EXPIRY_SWEEP_ENABLED="false") as it:
        for command, paused in (("pause", 1), ("resume", 0)):

            async def heeded(paused: int = paused) -> bool:
                return await it.metric('expiry_loop_paused{loop="worker"}') == paused

            await prints(command, "worker", "--reason", "looking", **stores)
            await eventually(heeded, within_s=3)
        await it.place()
        await eventually(expired(pool, 1))


# --- SIGTERM in the middle of a batch


async def test_a_batch_in_flight_is_finished(
    conn: Connection, pool: Pool, redis: Redis, stores: dict[str, str]
) -> None:
    """SIGTERM closes the worker's port at once, and its exit awaits the commit and the settle."""
    async with fleet(stores, **ALONE) as it:
        async with gate_shut(conn) as hanging:
            await it.place()
            await eventually(hanging)
            it.worker.process.send_signal(signal.SIGTERM)

            async def closed() -> bool:
                try:
                    await ask("GET", f"{it.health}/healthz")
                except ClientConnectionError:
                    return True
                return False

            await eventually(closed)
            assert it.worker.process.returncode is None
        async with asyncio.timeout(5):
            assert await it.worker.process.wait() == 0
        assert await states(pool) == {"expired": 1}
        assert await redis.zcard("expiry:wakeups") == 0
        await assert_kept(pool)


async def test_a_batch_that_hangs_is_handed_back(
    conn: Connection, pool: Pool, redis: Redis, stores: dict[str, str]
) -> None:
    """It does not delay the exit beyond the grace; the hold ends once, by the next worker, without its lease."""
    async with fleet(stores, **ALONE, EXPIRY_STOP_GRACE_S="0.5") as it:
        async with gate_shut(conn) as hanging:
            await it.place()
            await eventually(hanging)
            status, took_s = await it.worker.stop()
            assert (status, took_s < 3) == (0, True)
            assert await states(pool) == {"held": 1}
            assert await redis.zcard("expiry:wakeups") == 1
        async with started("worker", **stores, **ALONE):
            await eventually(expired(pool, 1))
        await assert_kept(pool)


# --- a machine that is short of something


async def test_running_out_of_files_is_waited_out(stores: dict[str, str]) -> None:
    """Connections that the system has no room for wait; then the API answers as before."""
    async with started("api", **stores, EXPIRY_API_PORT="0") as running, AsyncExitStack() as stack:
        api = urlsplit(await running.api())
        pid = running.process.pid
        used, (_, hard) = len(os.listdir(f"/proc/{pid}/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)  # noqa: PTH208
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 10, hard))
        for _ in range(20):
            _, writer = await asyncio.open_connection(api.hostname, api.port)
            stack.callback(writer.close)
        assert "Too many open files" in (await running.event("http.accept_failed"))["reason"]
        await stack.aclose()
        assert (await ask("GET", f"{api.geturl()}/readyz"))[0] == 200
        assert (await running.stop())[0] == 0


# --- replay

LOG = """\
event_time,event_type,product_id,user_id,user_session
2025-11-28 18:00:00 UTC,cart,lamp,1,a
2025-11-28 18:00:01 UTC,cart,chair,2,b
2025-11-28 18:00:02 UTC,purchase,chair,2,b
2025-11-28 18:00:03 UTC,cart,desk,3,c
2025-11-28 18:00:04 UTC,remove_from_cart,desk,3,c
"""


async def test_a_log_is_replayed_and_checked(pool: Pool, stores: dict[str, str], tmp_path: Path) -> None:
    """Each event does what it did in the shop, and the report agrees with the rows; a broken line is named."""
    (tmp_path / "log.csv").write_text(LOG)
    (tmp_path / "broken.csv").write_text(LOG.replace("18:00:02 UTC", "tea time"))
    async with fleet(stores) as it:
        options = ("--api-url", it.api, "--speed", "20", "--ttl-s", "1")
        environment = stores | {"EXPIRY_API_KEY": it.key}
        report = await prints("replay", str(tmp_path / "log.csv"), *options, **environment)
        assert await states(pool) == {"expired": 1, "confirmed": 1, "released": 1}
        assert "3 placed" in report
        assert "1 expired (1 by worker)" in report
        assert "✗" not in report
        broken = str(tmp_path / "broken.csv")
        ended = await asyncio.to_thread(invoke, "replay", broken, *options, **environment)
        explained(ended, f"{broken}, line 4: event_time is '2025-11-28 tea time': write it like")


# --- demo


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_demo_can_be_interrupted(
    pool: Pool, stores: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    """In the middle of the rush it ends at once, quietly, and leaves no file."""
    urls = ("--database-url", stores["EXPIRY_DATABASE_URL"], "--redis-url", stores["EXPIRY_REDIS_URL"])
    async with started("demo", *urls, TMPDIR=str(tmp_path)) as running:
        await eventually(lambda: pool.fetchval("SELECT count(*) > 50 FROM holds"), within_s=20)
        status, took_s = await running.stop(number)
        assert (status, running.said) == (130, "")
        assert took_s < 5
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - a Path has no method that may block here
