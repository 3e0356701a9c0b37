"""Where everything is measured: servers started for the bench alone, a fresh database for each run."""

import asyncio
import os
import platform
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import asyncpg
from redis.asyncio import Redis

from bench import sql
from bench.proc import cpu_s
from expiry import local, schema

DATABASE = "bench_run"
POLL_S = 0.02
# What differs from the servers of `expiry dev`, and why.
SETTINGS = {
    "track_commit_timestamp": "on",  # tells when a hold's transaction committed, without asking meanwhile
    "max_wal_size": "8GB",  # no checkpoint in the midst of a run: there is one before each
    "checkpoint_timeout": "1h",
}
SHOWN = (
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "shared_buffers",
    "max_wal_size",
)
OVERDUE = timedelta(minutes=5)  # how long ago the deadlines of a drain were, at least
APART = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds of the three kinds of processes."""

    consumer: float
    redis: float
    postgres: float

    def __sub__(self, other: Self) -> "Cpu":
        """Answer what was used since."""
        return Cpu(self.consumer - other.consumer, self.redis - other.redis, self.postgres - other.postgres)


@dataclass(slots=True)
class Stage:
    """Both servers, and the database of the run at hand."""

    server_url: str
    redis_url: str
    postgres_pid: int
    redis_pid: int
    folder: Path
    facts: dict[str, str]

    @property
    def database_url(self) -> str:
        """The database of this run."""
        return on(self.server_url, DATABASE)

    @property
    def env(self) -> dict[str, str]:
        """What every consumer is told: where the stores are, and the statement for one hold."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "DATABASE_URL": self.database_url,
            "REDIS_URL": self.redis_url,
            "EXPIRY_DATABASE_URL": self.database_url,
            "EXPIRY_REDIS_URL": self.redis_url,
            "EXPIRE_SQL": sql.EXPIRE_ONE,
            "PYTHONPATH": str(Path(__file__).with_name("peers")),
        }

    async def fresh(self, template: str) -> None:
        """Make an empty Redis and a new copy of the template the run's database."""
        async with connection(self.server_url) as admin:
            await admin.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
            await admin.execute(f"CREATE DATABASE {DATABASE} TEMPLATE {template}")
            await admin.execute("CHECKPOINT")
        async with Redis.from_url(self.redis_url) as redis:
            await redis.flushall()
            await redis.config_resetstat()

    async def template(self, *, holds: int, counted: bool = False) -> str:
        """Answer a database with the schema and so many holds already due; make it at the first call."""
        name = f"bench_{holds}_{'counted' if counted else 'free'}"
        async with connection(self.server_url) as admin:
            if await admin.fetchval("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name):
                return name
            await admin.execute(f"CREATE DATABASE {name}")
        async with connection(on(self.server_url, name)) as conn:
            await schema.apply(conn)
            await conn.execute("SELECT expiry_epoch()")
            if holds:
                first = datetime.now(UTC) - OVERDUE - holds * APART
                await seed(conn, holds, first=first, counted=counted)
            await conn.execute("VACUUM (FREEZE, ANALYZE)")
        return name

    def cpu(self, consumers: list[int]) -> Cpu:
        """Answer the CPU seconds so far."""
        return Cpu(cpu_s(*consumers), cpu_s(self.redis_pid), cpu_s(self.postgres_pid))

    async def holds_file(self) -> Path:
        """Write the holds of the database: id, generation and deadline (ms, rounded up), one a line."""
        path = self.folder / "holds.tsv"
        async with connection(self.database_url) as conn:
            rows = await conn.fetch(
                "SELECT id, generation, ceil(extract(epoch FROM expires_at) * 1000)::bigint AS ms FROM holds "
                "WHERE state = 'held' ORDER BY expires_at, id"
            )
        path.write_text("".join(f"{r['id']}\t{r['generation']}\t{r['ms']}\n" for r in rows))
        return path


async def seed(
    conn: "asyncpg.Connection[Any]",
    holds: int,
    *,
    first: datetime,
    apart: timedelta = APART,
    counted: bool = False,
) -> None:
    """Insert holds whose deadlines follow one another from `first` on."""
    if counted:
        await conn.execute(sql.SEED_RESOURCES, holds)
    await conn.execute(sql.SEED, holds, counted, first, apart)


@asynccontextmanager
async def opened() -> AsyncIterator[Stage]:
    """Start both servers, durable, on an empty directory, and end them with the bench."""
    with tempfile.TemporaryDirectory(prefix="expiry-bench-") as directory:
        folder = Path(directory)
        servers = await asyncio.to_thread(local.start, folder)
        try:
            async with connection(servers.database_url) as admin:
                for name, value in SETTINGS.items():
                    await admin.execute(f"ALTER SYSTEM SET {name} = '{value}'")
            servers.stop()
            servers = await asyncio.to_thread(local.start, folder)
            yield await _stage(servers, folder)
        finally:
            servers.stop()


async def _stage(servers: local.Servers, folder: Path) -> Stage:
    async with connection(servers.database_url) as admin:
        version = await admin.fetchval("SHOW server_version")
        settings = [f"{name} {await admin.fetchval(f'SHOW {name}')}" for name in SHOWN]
    async with Redis.from_url(servers.redis_url, decode_responses=True) as redis:
        await redis.config_set("auto-aof-rewrite-percentage", 0)
        info = await redis.info("server")
        persistence = await redis.config_get("append*")
    facts = {
        "machine": f"{cpu_model()}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
        "PostgreSQL": f"{version} ({', '.join(settings)})",
        "Valkey": f"{info['valkey_version']} (appendonly {persistence['appendonly']}, "
        f"appendfsync {persistence['appendfsync']})",
    }
    pids = [
        int((folder / f).read_text().split()[0]) for f in ("postgres/postmaster.pid", "valkey/valkey.pid")
    ]
    return Stage(servers.database_url, servers.redis_url, pids[0], pids[1], folder, facts)


def cpu_model() -> str:
    """Name the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@asynccontextmanager
async def connection(url: str) -> AsyncIterator["asyncpg.Connection[Any]"]:
    """Connect for a while."""
    conn = await asyncpg.connect(url)
    try:
        yield conn
    finally:
        await conn.close()


async def until(conn: "asyncpg.Connection[Any]", question: str, within_s: float) -> bool:
    """Ask again and again; answer whether the database said yes in time."""
    deadline_s = time.monotonic() + within_s
    while not await conn.fetchval(question):
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(POLL_S)
    return True


def on(server_url: str, database: str) -> str:
    """Answer the URL of another database of the server."""
    return urlsplit(server_url)._replace(path=f"/{database}").geturl()
