"""schema.sql is the specification: every statement of ours fits it, and it may be applied at any time."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import TypeGuard

import asyncpg
import pytest

import expiry
import governor
from expiry import doctor, errors, promises, schema
from expiry.holds import Conn
from tests import scene

STATEMENT = re.compile(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE)\b")
TEMPLATE = re.compile(r"(?<!')\{\w*\}")
# psql, an entry point, and fragments that are prepared as part of the doctor's checks
ELSEWHERE = ("expiry.local", "expiry.__main__", promises.__name__)

CATALOG = """
SELECT c.relname::text, a.attname::text, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity::text,
       pg_get_expr(d.adbin, d.adrelid)
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
 WHERE c.relnamespace = $1::regnamespace AND a.attnum > 0
UNION ALL
SELECT c.relname::text, k.conname::text, pg_get_constraintdef(k.oid), true, k.contype::text, NULL
  FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid WHERE k.connamespace = $1::regnamespace
UNION ALL
SELECT c.relname::text, o.option, NULL, true, c.relkind::text, NULL
  FROM pg_class c, unnest(c.reloptions) AS o (option) WHERE c.relnamespace = $1::regnamespace
UNION ALL
SELECT p.proname::text, pg_get_functiondef(p.oid), NULL, true, p.prokind::text, NULL
  FROM pg_proc p WHERE p.pronamespace = $1::regnamespace
 ORDER BY 1, 2, 3
"""


async def catalog(conn: Conn, name: str = "public") -> list[tuple[object, ...]]:
    """Answer all that there is in a schema: columns, constraints, storage parameters, functions."""
    return [tuple(row) for row in await conn.fetch(CATALOG, name)]


def modules(package: ModuleType) -> Iterator[ModuleType]:
    """Import every module of the package."""
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not found.name.startswith(ELSEWHERE):
            yield importlib.import_module(found.name)


def statements() -> dict[str, str]:
    """Find the SQL constants of all modules, those of classes too, and the doctor's checks."""
    checks = {c.statement for c in promises.CHECKS}
    found = {f"check {c.name}": verdict(c) for c in promises.CHECKS}
    for module in (*modules(expiry), *modules(governor)):
        owners: list[ModuleType | type] = [
            module,
            *(c for _, c in inspect.getmembers(module, inspect.isclass)),
        ]
        for owner in owners:
            for name, value in vars(owner).items():
                if name[0].isupper() and name.isupper() and is_statement(value) and value not in checks:
                    found[f"{module.__name__}:{owner.__name__}.{name}"] = value
    return {name: value for name, value in found.items() if not is_a_part(value, found)}


def is_a_part(value: str, found: dict[str, str]) -> bool:
    """Whether other statements contain this one, so that it is prepared with them."""
    return any(value in other for other in found.values() if other != value)


def is_statement(value: object) -> TypeGuard[str]:
    """Whether this is SQL that can be sent as it is."""
    return isinstance(value, str) and bool(STATEMENT.match(value)) and not TEMPLATE.search(value)


def verdict(check: promises.Check) -> str:
    """Answer the statement that the doctor sends for this check."""
    return doctor.VERDICT.format(statement=check.statement, examples=doctor.EXAMPLES_MAX)


async def test_every_statement_fits_the_schema(conn: Conn) -> None:
    """PostgreSQL can prepare each SQL constant of every module, with the types it finds."""
    found = statements()
    wrong = {}
    for name, statement in found.items():
        try:
            await conn.prepare(statement)
        except asyncpg.PostgresError as error:
            wrong[name] = str(error)
    assert wrong == {}
    for known in ("expiry.holds.PLACE", "PostgresBucket.TAKE_AT", "check counters"):
        assert any(name.endswith(known) for name in found)
    assert len(found) > 50


async def test_the_schema_may_be_applied_again(conn: Conn) -> None:
    """A second run changes nothing of what is there, rows least of all."""
    hold = await scene.place(conn, "room")
    before = await catalog(conn), await scene.everything(conn)
    await schema.apply(conn)
    assert (await catalog(conn), await scene.everything(conn)) == before
    assert await scene.state(conn, hold) == "held"
    assert len(before[0]) > 100


async def test_many_processes_may_apply_it_at_once(database_url: str) -> None:
    """Five processes that start on an empty database end with one schema and no error."""
    conns = [await asyncpg.connect(database_url) for _ in range(5)]
    try:
        await conns[0].execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        await asyncio.gather(*(schema.apply(conn) for conn in conns))
        await schema.check(conns[0])
        assert await conns[0].fetchval("SELECT count(*) FROM expiry_schema") == 1
    finally:
        for conn in conns:
            await conn.close()


async def test_a_database_without_the_schema_is_refused(conn: Conn) -> None:
    """The message is one sentence and names the command."""
    await conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    with pytest.raises(
        errors.SetupError, match=r"^The database has no expiry schema: run `expiry migrate`\.$"
    ):
        await schema.check(conn)


@pytest.mark.parametrize(("version", "remedy"), [(0, "run `expiry migrate`"), (99, "upgrade this program")])
async def test_a_database_of_another_version_is_refused(conn: Conn, version: int, remedy: str) -> None:
    """The message is one sentence with both versions and what to do."""
    await conn.execute("UPDATE expiry_schema SET version = $1", version)
    sentence = f"The database has schema version {version}, this program needs {schema.VERSION}: {remedy}."
    with pytest.raises(errors.SetupError) as refused:
        await schema.check(conn)
    assert str(refused.value) == sentence


async def test_a_newer_database_is_never_migrated_back(conn: Conn) -> None:
    """Applying an older schema to a newer database is refused before anything is written."""
    await conn.execute("UPDATE expiry_schema SET version = $1", schema.VERSION + 1)
    await conn.execute("DROP FUNCTION expiry_demand")
    before = await catalog(conn)
    with pytest.raises(errors.SetupError, match="upgrade this program"):
        await schema.apply(conn)
    assert await catalog(conn) == before


def test_every_index_is_explained() -> None:
    """The line above each index says what it serves."""
    lines = schema.read().splitlines()
    indexes = [n for n, line in enumerate(lines) if re.match(r"CREATE (UNIQUE )?INDEX", line)]
    assert len(indexes) >= 8
    assert [lines[n] for n in indexes if not lines[n - 1].startswith("-- ")] == []


def test_every_table_and_function_is_explained() -> None:
    """The line above each table and function says what it is."""
    lines = schema.read().splitlines()
    found = [n for n, line in enumerate(lines) if re.match(r"CREATE (OR REPLACE FUNCTION|TABLE)", line)]
    assert len(found) > 20
    bare = [lines[n] for n in found if not lines[n - 1].startswith("-- ")]
    assert bare == ["CREATE TABLE IF NOT EXISTS expiry_schema ("]  # the head of the file explains that one


async def test_no_further_index_makes_every_expiry_dearer(conn: Conn) -> None:
    """Beside the primary key, every index on holds is partial: a change of state adds nothing to it."""
    rows = await conn.fetch(
        "SELECT indexrelid::regclass::text AS name, indpred IS NOT NULL AS partial, indisprimary AS primary "
        "FROM pg_index WHERE indrelid = 'holds'::regclass"
    )
    assert {r["name"] for r in rows if not r["partial"]} == {"holds_pkey"}


async def test_the_limiters_table_is_the_one_it_asks_for(conn: Conn) -> None:
    """What the governor documents for its users is, column for column, what schema.sql creates."""
    await conn.execute(f"CREATE SCHEMA alone; SET search_path = alone; {governor.GOVERNOR_DDL}")
    await conn.execute("SET search_path = public")
    for name, least in (("bucket", 15), ("lease", 7), ("orders", 7), ("journal", 13)):
        alone = [row for row in await catalog(conn, "alone") if row[0] == f"governor_{name}"]
        assert alone == [row for row in await catalog(conn) if row[0] == f"governor_{name}"]
        assert len(alone) >= least


async def test_constraints_bind_end_and_state(conn: Conn) -> None:
    """Whatever writes to the table: held means not ended, expired means past the deadline, items match."""
    hold = await scene.place(conn, "room")
    ended = "ended_at = clock_timestamp(), ended_by = 'x'"
    for change in (
        "state = 'gone', " + ended,
        "state = 'confirmed'",
        ended,
        "state = 'confirmed', ended_at = clock_timestamp()",
        "state = 'expired', " + ended,
        "state = 'returned', " + ended,
        "returned_at = clock_timestamp()",
        "quantities = '{1,2}'",
        "resource_ids = '{}', quantities = '{}', counted = '{}'",
    ):
        with pytest.raises(asyncpg.CheckViolationError):
            await conn.execute(f"UPDATE holds SET {change}")
    assert await scene.state(conn, hold) == "held"
