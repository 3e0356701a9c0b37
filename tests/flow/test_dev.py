"""`expiry dev`: everything in one process, whose data and promises survive however it ends."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis

from tests.commands import Running, ask, explained, left, place, run, started
from tests.faults import gate_shut
from tests.fleet import holds_true
from tests.helpers import data_parent, eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

KEY = "demo-key"
STOPS_WITHIN_S = 5.0
DESCRIBED = ["api_url", "metrics_url", "database_url", "redis_url", "api_key", "platform_key"]


@pytest.fixture(scope="module")
def kept_dir() -> Iterator[Path]:
    """Name a directory for most tests here: only the first of them creates a cluster in it."""
    with tempfile.TemporaryDirectory(prefix="expiry-", dir=data_parent()) as parent:
        yield Path(parent) / "data"


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """Name a directory that is not there yet."""
    with tempfile.TemporaryDirectory(prefix="expiry-", dir=data_parent()) as parent:
        yield Path(parent) / "data"


class Dev:
    """A running `expiry dev`, and what its dev.json says."""

    def __init__(self, running: Running, data_dir: Path, described: dict[str, str]) -> None:
        self.running = running
        self.data_dir = data_dir
        self.described = described
        self.api = described["api_url"]
        self.ready_at = datetime.now(UTC)

    async def place(self, *, ttl_s: float) -> str:
        """Place a hold with the tenant's key; return its id."""
        return str((await place(self.api, self.described["api_key"], ttl_s=ttl_s))["id"])

    async def end_of(self, hold_id: str) -> asyncpg.Record:
        """Wait until the hold's row says that it has expired, and return how it did.

        after_start_s counts from the deadline or from when all was running, whichever was later.
        """
        conn = await asyncpg.connect(self.described["database_url"])

        async def expired() -> asyncpg.Record | None:
            return await conn.fetchrow(
                "SELECT ended_by, extract(epoch FROM ended_at - expires_at)::double precision AS lag_s, "
                "extract(epoch FROM ended_at - greatest(expires_at, $2))::double precision AS after_start_s "
                "FROM holds WHERE id = $1 AND state = 'expired'",
                hold_id,
                self.ready_at,
            )

        try:
            found = await eventually(expired)
            assert found is not None
            return found
        finally:
            await conn.close()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it in good order: in time, with success, and with nothing left behind."""
        status, took_s = await self.running.stop(number)
        assert (status, left(self.data_dir)) == (0, []), self.running.said
        assert took_s < STOPS_WITHIN_S


@asynccontextmanager
async def dev(data_dir: Path, *options: str) -> AsyncIterator[Dev]:
    """Run `expiry dev` on a free port until it listens and has written dev.json."""
    words = ("dev", "--port", "0", "--data-dir", str(data_dir), *options)
    async with started(*words) as running:
        url = await running.api()

        async def described() -> dict[str, str] | None:
            found: dict[str, str] = read(data_dir)
            return found if found.get("api_url") == url else None

        found = await eventually(described)
        assert found is not None
        yield Dev(running, data_dir, found)


def read(data_dir: Path) -> dict[str, Any]:
    """Return dev.json, nothing if it is not there or no object."""
    try:
        found = json.loads((data_dir / "dev.json").read_text())
    except FileNotFoundError:
        return {}
    return found if isinstance(found, dict) else {}


def names(data_dir: Path) -> list[str]:
    """Return what is in the directory; nothing if it is not there."""
    return os.listdir(data_dir) if data_dir.exists() else []  # noqa: PTH208 - names are wanted


async def test_everything_works_and_stops(kept_dir: Path) -> None:
    """One command gives an API, a queue, a database and keys; a hold ends on time; SIGTERM leaves nothing."""
    async with dev(kept_dir, "--api-key", KEY) as it:
        described = it.described
        assert list(described) == DESCRIBED
        assert (kept_dir / "dev.json").stat().st_mode & 0o077 == 0
        assert described["api_key"] == KEY
        assert (await ask("GET", f"{it.api}/readyz"))[0] == 200
        status, metrics = await ask("GET", described["metrics_url"])
        assert status == 200
        assert "expiry_holds_placed_total 0.0" in metrics
        async with Redis.from_url(described["redis_url"]) as redis:
            assert await redis.ping()
        status, overview = await ask("GET", f"{it.api}/v1/overview", key=described["platform_key"])
        assert (status, overview["due"]) == (200, 0)
        end = await it.end_of(await it.place(ttl_s=1))
        assert end["ended_by"] == "worker"
        assert 0 <= end["lag_s"] < 1
        await it.stop()


async def test_a_restart_keeps_holds_and_keys(kept_dir: Path) -> None:
    """A hold that outlives a Ctrl-C ends at its deadline after the restart; the keys are those of before."""
    async with dev(kept_dir, "--api-key", KEY) as it:
        hold_id = await it.place(ttl_s=2.5)
        before = it.described
        await it.stop(signal.SIGINT)
    async with dev(kept_dir) as it:
        assert it.described["api_key"] == KEY
        assert it.described | {"api_url": "", "metrics_url": ""} == before | {
            "api_url": "",
            "metrics_url": "",
        }
        end = await it.end_of(hold_id)
        assert end["lag_s"] >= 0
        assert end["after_start_s"] < 1
        await it.stop()


async def test_a_killed_parent_is_recovered_from(kept_dir: Path) -> None:
    """After kill -9 the next start, even at once, finds the data and ends what came due meanwhile."""
    async with dev(kept_dir) as it:
        hold_id = await it.place(ttl_s=1)
        assert len(left(kept_dir)) >= 3
        assert (await it.running.stop(signal.SIGKILL))[0] == -signal.SIGKILL
    async with dev(kept_dir) as it:
        assert (await it.end_of(hold_id))["lag_s"] >= 0
        await it.stop()


async def test_servers_of_a_killed_parent_end_by_themselves(kept_dir: Path) -> None:
    """Nobody needs to start it again to be rid of what it ran."""
    async with dev(kept_dir) as it:
        await it.running.stop(signal.SIGKILL)
        await eventually(holds_true(lambda: not left(kept_dir)))


async def test_a_lost_queue_is_filled_again(kept_dir: Path) -> None:
    """With all of Valkey's files gone the hold still ends, on time, by the queue or the sweep."""
    async with dev(kept_dir) as it:
        hold_id = await it.place(ttl_s=2.5)
        await it.stop()
    shutil.rmtree(kept_dir / "valkey")
    async with dev(kept_dir) as it:
        end = await it.end_of(hold_id)
        assert end["lag_s"] >= 0
        assert end["after_start_s"] < 5
        await it.stop()


async def test_a_statement_that_hangs_does_not_delay_the_end(kept_dir: Path) -> None:
    """SIGTERM is obeyed in time although a batch waits for a lock that nobody gives back."""
    async with dev(kept_dir) as it:
        conn = await asyncpg.connect(it.described["database_url"])
        with suppress(asyncpg.InterfaceError):  # the server ends before the gate can be opened
            async with gate_shut(conn) as hanging:
                hold_id = await it.place(ttl_s=1)
                await eventually(hanging)
                await it.stop()
    async with dev(kept_dir) as it:
        await it.end_of(hold_id)
        await it.stop()


async def test_ctrl_c_during_the_start_leaves_nothing(data_dir: Path) -> None:
    """Whoever changes their mind while the cluster is being created can start again at once."""
    async with started("dev", "--port", "0", "--data-dir", str(data_dir)) as running:
        await eventually(holds_true(lambda: "postgres.new" in names(data_dir)))
        status, took_s = await running.stop(signal.SIGTERM)
        assert (status, left(data_dir)) == (130, []), running.said
        assert took_s < STOPS_WITHIN_S
        assert "Traceback" not in running.said
    async with dev(data_dir) as it:
        await it.stop()


@pytest.fixture
def spoilt_dir(data_dir: Path) -> Path:
    """Give the test a directory whose dev.json is no object."""
    data_dir.mkdir()
    (data_dir / "dev.json").write_text("[]")
    return data_dir


async def test_servers_of_ones_own_are_used(
    spoilt_dir: Path, database_url: str, redis_url: str, conn: asyncpg.Connection[asyncpg.Record]
) -> None:
    """With both URLs nothing is started beside it, the schema is created, and keys are made if none are given."""
    await conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    async with dev(spoilt_dir, "--database-url", database_url, "--redis-url", redis_url) as it:
        assert (it.described["database_url"], it.described["redis_url"]) == (database_url, redis_url)
        assert names(spoilt_dir) == ["dev.json"]
        assert len(it.described["api_key"]) >= 24
        assert (await ask("GET", f"{it.api}/readyz"))[0] == 200
        end = await it.end_of(await it.place(ttl_s=1))
        assert end["ended_by"] == "worker"
        await it.stop()


async def test_a_second_one_on_the_same_data_is_refused(kept_dir: Path) -> None:
    """It says so, harms nothing, and the first one goes on."""
    async with dev(kept_dir) as it:
        ended = await run("dev", "--port", "0", "--data-dir", str(kept_dir))
        explained(ended, str(kept_dir), "in use by another process", "another --data-dir")
        assert (await ask("GET", f"{it.api}/readyz"))[0] == 200
        await it.stop()


async def test_a_port_in_use_is_named(kept_dir: Path) -> None:
    """The servers that were started for it are stopped again."""
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = str(somebody.getsockname()[1])
        ended = await run("dev", "--port", port, "--data-dir", str(kept_dir))
    explained(ended, f"127.0.0.1:{port}", "choose another port")
    assert left(kept_dir) == []


@pytest.fixture
def file(data_dir: Path) -> Iterator[Path]:
    """Give the test a file where the directory should be, which must stay as it is."""
    data_dir.write_text("mine")
    yield data_dir
    assert data_dir.read_text() == "mine"


@pytest.mark.parametrize("own_servers", [False, True])
async def test_a_file_in_the_way_is_named(
    file: Path, database_url: str, redis_url: str, *, own_servers: bool
) -> None:
    """A data directory that is a file is refused with its path."""
    urls = ("--database-url", database_url, "--redis-url", redis_url) if own_servers else ()
    ended = await run("dev", "--port", "0", "--data-dir", str(file), *urls)
    explained(ended, str(file), "another --data-dir")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_an_unwritable_directory_is_named(tmp_path: Path) -> None:
    """A directory that cannot be written is refused with its path."""
    tmp_path.chmod(0o500)
    ended = asyncio.run(run("dev", "--port", "0", "--data-dir", str(tmp_path / "data")))
    explained(ended, str(tmp_path), "another --data-dir")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"EXPIRY_MODE": "fast"},
            "expiry: EXPIRY_MODE: Input should be 'hybrid', 'queue' or 'sweep' (it is 'fast').",
        ),
        ({"GOVERNOR_FLOOR_PER_S": "9", "GOVERNOR_CEILING_PER_S": "1"}, "GOVERNOR_FLOOR_PER_S (9.0) must be"),
    ],
)
async def test_bad_settings_start_nothing(data_dir: Path, environment: dict[str, str], said: str) -> None:
    """They are told before anything is created."""
    explained(await run("dev", "--port", "0", "--data-dir", str(data_dir), **environment), said)
    assert names(data_dir.parent) == []
