"""Embedded servers for the whole run; for each test a database of its own and an empty Valkey.

Under pytest-xdist every worker is a run of its own, with its own servers.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import hypothesis
import pytest
from redis.asyncio import Redis

from expiry import local, schema
from tests.helpers import data_parent

TEMPLATE = "expiry_template"

_numbers = itertools.count(1)

# How long an example takes is no matter of what it shows, and differs on a busy machine.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def servers() -> Iterator[local.Servers]:
    """Start PostgreSQL and Valkey once; they forget everything with the run."""
    # Not pytest's own directory: for root, the next run would close it to these servers.
    with (
        tempfile.TemporaryDirectory(prefix="expiry-", dir=data_parent()) as data_dir,
        local.start(Path(data_dir), durable=False) as running,
    ):
        yield running


@pytest.fixture(scope="session")
def template(servers: local.Servers) -> str:
    """Apply the schema once, to a database that every test gets a copy of."""
    asyncio.run(_create_template(servers.database_url))
    return TEMPLATE


async def _create_template(server_url: str) -> None:
    async with _connection(server_url) as admin:
        await admin.execute(f"CREATE DATABASE {TEMPLATE}")
    async with _connection(_on(server_url, TEMPLATE)) as conn:
        await schema.apply(conn)


@pytest.fixture
async def database_url(servers: local.Servers, template: str) -> AsyncIterator[str]:
    """Give the test a database with the schema and nothing else in it."""
    name = f"test_{next(_numbers)}"
    async with _connection(servers.database_url) as admin:
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        yield _on(servers.database_url, name)
        # FORCE: what a failed test left connected must not fail this one as well.
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[asyncpg.Pool[asyncpg.Record]]:
    """Give the test a pool on its database."""
    async with asyncpg.create_pool(database_url, min_size=1, max_size=10) as pool:
        yield pool


@pytest.fixture
async def conn(database_url: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """Give the test a connection to its database."""
    async with _connection(database_url) as conn:
        yield conn


@pytest.fixture
async def redis_url(servers: local.Servers) -> str:
    """Give the test an empty Valkey."""
    async with Redis.from_url(servers.redis_url) as client:
        await client.flushall()
    return servers.redis_url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """Give the test a client of its Valkey; it answers bytes."""
    async with Redis.from_url(redis_url) as client:
        yield client


@asynccontextmanager
async def _connection(url: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    conn = await asyncpg.connect(url)
    try:
        yield conn
    finally:
        await conn.close()


def _on(server_url: str, database: str) -> str:
    return urlsplit(server_url)._replace(path=f"/{database}").geturl()
