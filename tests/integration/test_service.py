"""The service runs its parts, starts those again that fail, says when it is not ready, and stops in time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import asyncpg
import pytest

from expiry import service
from expiry.errors import SetupError
from expiry.service import Service, connect_database
from expiry.settings import Settings
from expiry.worker import GovernedWorker
from governor import GovernorSettings
from tests.commands import ask
from tests.faults import gate_shut
from tests.fleet import Counted, Pool, expired, placed, settings_for, states
from tests.helpers import eventually

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

NOBODY = "redis://127.0.0.1:1/0"


@asynccontextmanager
async def running(settings: Settings, *, api: bool = False) -> AsyncIterator[tuple[asyncio.Task[None], str]]:
    """Run the loops (and the API) until they listen; gives the task and the URL, and stops it in the end."""
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    settings = settings.model_copy(update={"api_port": 0, "metrics_port": 0, "api_drain_s": 0})
    it = Service(settings, GovernorSettings(), api=api, background=True, stop=stop, bound=bound, role="test")
    task = asyncio.create_task(it.run())
    try:
        async with asyncio.timeout(10):
            yield task, f"http://127.0.0.1:{await bound}"
    finally:
        stop.set()
        async with asyncio.timeout(10):
            await task


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    """Give the settings of the test's own stores."""
    return settings_for(database_url, redis_url)


# --- which parts there are


@pytest.mark.parametrize(
    ("changed", "by"),
    [
        ({}, "worker"),
        ({"mode": "queue"}, "worker"),
        ({"worker_enabled": False, "sweep_grace_s": 0}, "sweep"),
        ({"mode": "sweep", "redis": NOBODY}, "sweep"),
        ({"redis": NOBODY, "redis_required_at_start": False, "sweep_grace_s": 0}, "sweep"),
    ],
)
async def test_each_mode_ends_a_hold(
    pool: Pool, database_url: str, redis_url: str, changed: dict[str, Any], by: str
) -> None:
    """By the queue where it is in use, by the sweep where it is not or Redis is away."""
    fields = {"redis": redis_url} | changed
    await placed(pool, 1, ttl_s=1)
    async with running(settings_for(database_url, fields.pop("redis"), **fields)):
        await eventually(expired(pool, 1))
    assert await pool.fetchval("SELECT ended_by FROM holds") == by


async def test_nothing_ends_what_is_turned_off(pool: Pool, settings: Settings) -> None:
    """With every loop off the process runs, answers its probes, and leaves the holds as they are."""
    off = {f"{loop}_enabled": False for loop in ("worker", "promoter", "sweep", "prune")}
    await placed(pool, 1, ttl_s=1)
    async with running(settings.model_copy(update=off)) as (_, url):
        await eventually(lambda: pool.fetchval("SELECT expires_at < now() - interval '1.5 s' FROM holds"))
        assert (await ask("GET", f"{url}/readyz"))[0] == 200
    assert await states(pool) == {"held": 1}


CONNECTED = """
SELECT application_name AS name, count(*) AS n FROM pg_stat_activity
 WHERE datname = current_database() AND application_name LIKE 'expiry-%' GROUP BY 1
"""


async def test_requests_and_loops_do_not_share_connections(pool: Pool, settings: Settings) -> None:
    """A batch never queues behind a busy shop; and once stopped, no connection is left."""

    async def connected() -> set[str]:
        return {row["name"] for row in await pool.fetch(CONNECTED)}

    async with running(settings, api=True) as (_, url):
        assert (await ask("GET", f"{url}/readyz"))[0] == 200
        assert await connected() == {"expiry-test", "expiry-test-loops"}

    async def all_gone() -> bool:
        return not await connected()

    await eventually(all_gone)


# --- supervision


class FailsOnce(GovernedWorker):
    """Has a fault of ours, which only its first life shows."""

    lives = 0

    async def main(self) -> None:
        """Raise, then work."""
        type(self).lives += 1
        if self.lives == 1:
            raise KeyError("ours")
        await super().main()


async def test_a_part_that_fails_is_started_again(
    pool: Pool, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is counted as a bug, the other parts go on, and the new worker does its work."""
    monkeypatch.setattr(service, "GovernedWorker", FailsOnce)
    monkeypatch.setattr(FailsOnce, "lives", 0)
    counted = Counted()
    await placed(pool, 1, ttl_s=1)
    async with running(settings) as (task, url):
        await eventually(expired(pool, 1))
        assert not task.done()
        assert (await ask("GET", f"{url}/readyz"))[0] == 200
    assert FailsOnce.lives == 2
    assert counted("expiry_loop_errors_total", loop="worker", kind="bug") == 1
    assert await pool.fetchval("SELECT ended_by FROM holds") == "worker"


@pytest.fixture
def taken() -> Iterator[int]:
    """Give a port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        yield somebody.getsockname()[1]


async def test_a_part_that_can_never_start_ends_the_service(
    pool: Pool, settings: Settings, taken: int
) -> None:
    """A port that is taken stops the parts that had started, and is told to the caller."""
    stop = asyncio.Event()
    it = Service(
        settings.model_copy(update={"metrics_port": taken}),
        GovernorSettings(),
        api=False,
        background=True,
        stop=stop,
    )
    with pytest.raises(SetupError, match=f"127.0.0.1:{taken}"):
        await asyncio.wait_for(it.run(), 5)
    assert stop.is_set()
    assert await pool.fetch(CONNECTED) == []


async def test_a_worker_that_gets_nowhere_is_not_ready(
    conn: Connection, pool: Pool, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its only batch hangs it does not look at its queue: the probe says so, until the batch ends."""
    monkeypatch.setattr(service, "SILENT_S_MAX", 1.0)
    one = {"batches_in_flight_max": 1, "sweep_enabled": False}
    await placed(pool, 1, ttl_s=1)
    async with running(settings.model_copy(update=one)) as (_, url):

        async def ready() -> bool:
            return (await ask("GET", f"{url}/readyz"))[0] == 200

        async def failing() -> Any:  # noqa: ANN401 - JSON
            status, answer = await ask("GET", f"{url}/readyz")
            return status == 503 and answer["failing"]

        async with gate_shut(conn) as hanging:
            await eventually(hanging)
            assert "has not looked at its queue for" in (await eventually(failing))["worker"]
        await eventually(ready)


# --- stopping


async def test_what_hangs_is_cut_off_after_the_grace(
    conn: Connection, pool: Pool, settings: Settings
) -> None:
    """A batch that waits for a lock does not keep the process, and its hold stays as it was."""
    await placed(pool, 1, ttl_s=1)
    async with gate_shut(conn) as hanging:
        async with running(settings.model_copy(update={"stop_grace_s": 0.3})):
            await eventually(hanging)
            started_s = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - started_s < 2
        assert await states(pool) == {"held": 1}


# --- connections


@pytest.mark.parametrize(("pooler", "longest"), [(False, "7s"), (True, "0")])
async def test_session_settings_stay_away_from_a_pooler(
    settings: Settings, longest: str, *, pooler: bool
) -> None:
    """They would reach other clients there; without one they bound every statement."""
    changed = {"statement_timeout_s": 7, "database_pooler": pooler}
    async with await connect_database(settings.model_copy(update=changed), "test") as pool:
        assert await pool.fetchval("SHOW statement_timeout") == longest
        assert await pool.fetchval("SHOW application_name") == "expiry-test"


async def test_it_is_not_ready_while_nothing_can_expire(
    pool: Pool, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that looks at its queue and fails each time is named, and no longer once it works again."""
    monkeypatch.setattr(service, "SILENT_S_MAX", 0.2)
    rename = "ALTER FUNCTION {}(uuid[], bigint[], text) RENAME TO {}"
    async with running(settings) as (_, url):
        await pool.execute(rename.format("expiry_expire", "gone"))
        await placed(pool, 1, ttl_s=1)

        async def failing() -> bool:
            status, body = await ask("GET", f"{url}/readyz")
            return status == 503 and "sweep" in str(body)

        await eventually(failing)
        await pool.execute(rename.format("gone", "expiry_expire"))
        await eventually(expired(pool, 1))

        async def ready() -> bool:
            return (await ask("GET", f"{url}/readyz"))[0] == 200

        await eventually(ready, within_s=20)
