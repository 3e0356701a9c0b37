"""The embedded servers keep their data, and leave nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from redis.asyncio import Redis

from expiry import local
from tests.helpers import data_parent, eventually

# A parent of the servers that can be killed.
PARENT = """
import signal, sys
from pathlib import Path
from expiry import local
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests in the background ignores it
servers = local.start(Path(sys.argv[1]))
print(servers.database_url, servers.redis_url, flush=True)
sys.stdin.read()
servers.stop()
"""


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """Name a directory that is not there yet, with a space and longer than a socket's path."""
    with tempfile.TemporaryDirectory(prefix="expiry-", dir=data_parent()) as parent:
        yield Path(parent) / ("long " * 30) / "data"


def pids(data_dir: Path) -> list[int]:
    """Return the pids of both servers."""
    files = (data_dir / "postgres" / "postmaster.pid", data_dir / "valkey" / "valkey.pid")
    return [int(file.read_text().split()[0]) for file in files]


def is_running(pid: int) -> bool:
    """Tell whether there is such a process, other than one that awaits its parent's notice."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/status")
        return not status.parent.exists() or "\nState:\tZ" not in status.read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


async def write(servers: local.Servers, value: str) -> None:
    """Put a value into both servers."""
    conn = await asyncpg.connect(servers.database_url)
    await conn.execute("CREATE TABLE kept AS SELECT $1::text AS value", value)
    await conn.close()
    async with Redis.from_url(servers.redis_url) as client:
        await client.set("kept", value)


async def read(servers: local.Servers) -> tuple[str, str]:
    """Return the value from both servers."""
    conn = await asyncpg.connect(servers.database_url)
    value = await conn.fetchval("SELECT value FROM kept")
    await conn.close()
    async with Redis.from_url(servers.redis_url, decode_responses=True) as client:
        return value, await client.get("kept")


async def test_restart_keeps_data_and_urls(data_dir: Path) -> None:
    """What was written is there after a restart, at the same URLs."""
    with local.start(data_dir) as first:
        await write(first, "a")
    with local.start(data_dir) as second:
        assert await read(second) == ("a", "a")
        assert second.database_url == first.database_url
        assert second.redis_url == first.redis_url


def test_stop_is_bounded_and_complete(data_dir: Path) -> None:
    """Both servers are gone 4 s after the call at the latest, even one that does not react."""
    servers = local.start(data_dir, durable=False)
    running = pids(data_dir)
    for pid in running:
        os.kill(pid, signal.SIGSTOP)
    started_s = time.monotonic()
    servers.stop()
    assert time.monotonic() - started_s < 4.2
    assert not any(is_running(pid) for pid in running)
    servers.stop()


def test_only_the_owner_can_look_into_the_data(data_dir: Path) -> None:
    """Others may pass through the data directory at most; the files are closed to them."""
    with local.start(data_dir, durable=False):
        assert data_dir.stat().st_mode & 0o066 == 0
        for path in data_dir.iterdir():
            assert path.stat().st_mode & 0o077 == 0, path


@pytest.fixture
def parent(data_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Run another process that holds servers on data_dir."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(data_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("postgresql://")
        yield process
        process.kill()


async def none_left(running: list[int]) -> None:
    """Return once none of the processes is there."""

    async def all_gone() -> bool:
        return not any(is_running(pid) for pid in running)

    await eventually(all_gone)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of a parent's death")
async def test_killed_parent_takes_its_servers_along(parent: subprocess.Popen[str], data_dir: Path) -> None:
    """Servers whose parent is killed end by themselves."""
    running = pids(data_dir)
    parent.kill()
    await none_left(running)


async def test_start_stops_servers_left_over(parent: subprocess.Popen[str], data_dir: Path) -> None:
    """A start right after the parent was killed finds its servers, and the data intact."""
    assert parent.stdout is not None
    running = pids(data_dir)
    # Stopped, they cannot follow the parent: as if the system told them nothing of its death.
    for pid in running:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    with local.start(data_dir) as servers:
        assert not set(running) & set(pids(data_dir))
        await write(servers, "b")
    await none_left(running)
    with local.start(data_dir) as servers:
        assert await read(servers) == ("b", "b")


@pytest.mark.usefixtures("parent")
def test_second_start_is_refused(data_dir: Path) -> None:
    """One data directory serves one parent; the other one is told so and harms nothing."""
    running = pids(data_dir)
    with pytest.raises(local.DataDirInUseError, match="in use by another process"):
        local.start(data_dir)
    assert all(is_running(pid) for pid in running)


async def test_interrupt_reaches_the_parent_only(parent: subprocess.Popen[str], data_dir: Path) -> None:
    """Ctrl-C, a signal to the whole process group, leaves the servers to their parent."""
    running = pids(data_dir)
    groups = {os.getpgid(pid) for pid in running}
    assert os.getpgid(parent.pid) not in groups
    os.killpg(parent.pid, signal.SIGINT)
    await none_left(running)


def test_foreign_process_with_a_stale_pid_is_spared(data_dir: Path) -> None:
    """Pid files that name somebody else's process by now neither end it nor hinder a start."""
    with local.start(data_dir, durable=False):
        pass
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as somebody:
        for name in ("postgres/postmaster.pid", "valkey/valkey.pid"):
            (data_dir / name).write_text(f"{somebody.pid}\n")
        with local.start(data_dir, durable=False):
            assert somebody.pid not in pids(data_dir)
        assert somebody.poll() is None
        somebody.kill()


def test_taken_port_is_replaced(data_dir: Path) -> None:
    """A port that somebody else took meanwhile is left to them."""
    data_dir.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        taken = somebody.getsockname()[1]
        endpoints = {"postgres_port": taken, "valkey_port": taken, "password": "known"}
        (data_dir / "endpoints.json").write_text(json.dumps(endpoints))
        with local.start(data_dir, durable=False) as servers:
            ports = {urlsplit(url).port for url in (servers.database_url, servers.redis_url)}
    assert len(ports - {taken}) == 2


def test_file_in_the_way_is_named(data_dir: Path) -> None:
    """A file where the data directory should be is an error with the path in it."""
    data_dir.parent.mkdir()
    data_dir.write_text("mine")
    with pytest.raises(local.DataDirUnusableError, match="data"):
        local.start(data_dir)
    assert data_dir.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_unwritable_directory_is_named(data_dir: Path) -> None:
    """A directory that cannot be written is an error with the path in it."""
    data_dir.parent.mkdir(mode=0o500)
    with pytest.raises(local.DataDirUnusableError, match="Permission denied"):
        local.start(data_dir)


def test_failed_server_shows_its_log(data_dir: Path) -> None:
    """A server that refuses its data says why, and the other one is stopped."""
    with local.start(data_dir, durable=False):
        pass
    (data_dir / "postgres" / "PG_VERSION").write_text("9\n")
    with pytest.raises(local.ServerFailedError, match="not compatible"):
        local.start(data_dir)
    with pytest.raises(FileNotFoundError):
        pids(data_dir)
