"""The tests notice: each broken variant of the store fails the tests that are there for it."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from expiry import errors, local, schema
from tests.broken.mutants import MUTANTS, Change, Mutant, Scene

# How a test may fail on a broken store. Anything else (a missing function, bad SQL) is a broken mutant.
FAILURES = (
    AssertionError,
    TimeoutError,
    errors.ExpiryError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.LockNotAvailableError,
    asyncpg.RaiseError,  # what the tests raise themselves
    pytest.fail.Exception,  # did not raise
)

_numbers = itertools.count(1)


def changed(text: str, changes: tuple[Change, ...]) -> str:
    """Make the changes; each must find its text exactly once."""
    for find, put in changes:
        assert text.count(find) == 1, f"the mutant's text is there {text.count(find)} times: {find}"
        text = text.replace(find, put)
    return text


@pytest.fixture(params=MUTANTS, ids=lambda m: m.name)
def mutant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mutant:
    """Give the test a mutant whose Python is in force."""
    chosen: Mutant = request.param
    for place, changes in chosen.functions.items():
        name, function = place.split(":")
        module = importlib.import_module(name)
        source = changed(inspect.getsource(getattr(module, function)), changes)
        scope: dict[str, Any] = {}
        exec(compile(source, f"<{chosen.name}>", "exec"), vars(module), scope)  # noqa: S102 - source of ours
        monkeypatch.setattr(module, function, scope[function])
    return chosen


@pytest.fixture
async def broken_url(servers: local.Servers, mutant: Mutant) -> AsyncIterator[str]:
    """Give the test a database with the mutant's schema."""
    name = f"broken_{next(_numbers)}"
    url = urlsplit(servers.database_url)._replace(path=f"/{name}").geturl()
    admin = await asyncpg.connect(servers.database_url)
    await admin.execute(f"CREATE DATABASE {name}")
    await admin.execute(f"ALTER DATABASE {name} SET deadlock_timeout = '20ms'")  # there will be many
    conn = await asyncpg.connect(url)
    await conn.execute(changed(schema.read(), mutant.schema))
    await conn.close()
    yield url
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


async def play(scene: Scene, url: str) -> None:
    """Run a test of the suite on this database, with each set of its parameters."""
    marks = [m for m in getattr(scene, "pytestmark", ()) if m.name == "parametrize"]
    assert len(marks) <= 1, "give it one set of parameters"
    names, values = (marks[0].args[0], marks[0].args[1]) if marks else ("", [()])
    wanted = inspect.signature(scene).parameters
    for value in values:
        given: dict[str, Any] = {names: value} if names else {}
        if "database_url" in wanted:
            given["database_url"] = url
        async with AsyncExitStack() as stack:
            if "pool" in wanted:
                given["pool"] = await stack.enter_async_context(
                    asyncpg.create_pool(url, min_size=1, max_size=10)
                )
            if "conn" in wanted:
                given["conn"] = await asyncpg.connect(url)
                stack.push_async_callback(given["conn"].close)
            await scene(**given)


async def fails(scene: Scene, url: str) -> bool:
    """Whether the test fails on this database as it should."""
    try:
        await play(scene, url)
    except FAILURES:
        return True
    return False


async def test_every_broken_variant_is_noticed(mutant: Mutant, broken_url: str) -> None:
    """Each test that is named for the mutant fails on it, and for a reason of the store's."""
    assert mutant.schema or mutant.functions
    assert mutant.caught_by
    for scene in mutant.caught_by:
        tables = await _emptied(broken_url)
        assert tables > 5
        assert await fails(scene, broken_url), f"{scene.__name__} did not notice: {mutant.breaks}"


async def _emptied(url: str) -> int:
    """Take back what an earlier test left in the database."""
    conn = await asyncpg.connect(url)
    try:
        tables = [
            r[0] for r in await conn.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        ]
        await conn.execute(f"TRUNCATE {', '.join(tables)}; DROP FUNCTION IF EXISTS break CASCADE")
        return len(tables)
    finally:
        await conn.close()


def test_no_two_mutants_share_a_name() -> None:
    """Names tell mutants apart in a report."""
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
