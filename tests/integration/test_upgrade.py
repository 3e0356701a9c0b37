"""A database of an older version becomes what a new one is, and its holds go on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from expiry import doctor, errors, holds, outbox, schema
from expiry.settings import Settings
from tests import scene
from tests.scene import TENANT

FIRST = Path(__file__).parents[1] / "data" / "schema_1.sql"

# What there is, without the order in which columns came.
CATALOGUE = {
    "columns": """
SELECT table_name || '.' || column_name, data_type || ' ' || is_nullable || ' ' || coalesce(column_default, '')
  FROM information_schema.columns WHERE table_schema = 'public'""",
    "indexes": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    "constraints": """
SELECT conrelid::regclass || '.' || conname, pg_get_constraintdef(oid) FROM pg_constraint
 WHERE connamespace = 'public'::regnamespace""",
    "options": "SELECT relname, reloptions::text FROM pg_class WHERE relnamespace = 'public'::regnamespace",
    "functions": """
SELECT p.oid::regprocedure::text, p.prosrc || coalesce(p.proconfig::text, '') FROM pg_proc p
 WHERE pronamespace = 'public'::regnamespace""",
}


@pytest.fixture
async def old(database_url: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """Give the test a database of version 1."""
    conn = await asyncpg.connect(database_url)
    await conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    await conn.execute(FIRST.read_text(encoding="utf-8"))
    yield conn
    await conn.close()


async def catalogue(conn: holds.Conn) -> dict[str, dict[str, str]]:
    """Answer what there is in the database."""
    return {name: dict(await conn.fetch(query)) for name, query in CATALOGUE.items()}


async def test_an_upgraded_database_is_a_new_one(old: asyncpg.Connection[asyncpg.Record]) -> None:
    """Tables, indexes, constraints and functions are the same, however one came there."""
    await schema.apply(old)
    assert await schema.version(old) == schema.VERSION
    upgraded = await catalogue(old)
    await old.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    await schema.apply(old)
    fresh = await catalogue(old)
    for name, there in fresh.items():
        assert upgraded[name] == there


async def test_holds_go_on_over_an_upgrade(
    old: asyncpg.Connection[asyncpg.Record], database_url: str
) -> None:
    """What was placed before is confirmed after, its events are read first, and every promise is kept."""
    await old.execute("SELECT expiry_declare($1, 'room', 2)", TENANT)
    some = {"ttl_us": 60_000_000, "resource_ids": ["room"], "quantities": [1]}
    for number in (1, 2):
        outcome = await old.fetchval(
            "SELECT outcome FROM expiry_place($1, $2::text::jsonb, 'x', 'place', NULL, NULL)",
            TENANT,
            json.dumps([some | {"id": f"01930000-0000-7000-8000-00000000000{number}"}]),
        )
        assert outcome == "placed"
    await schema.apply(old)
    await schema.apply(old)
    [first, second] = await old.fetch("SELECT id FROM holds ORDER BY id")
    await holds.confirm(old, first["id"], tenant_id=TENANT)
    await holds.release(old, second["id"], tenant_id=TENANT)
    placed = await scene.place(old, "room")
    page = await outbox.read(old, tenant_id=TENANT)
    assert [e.key.split(":")[0] for e in page.events] == ["place", "place", "confirm", "release", "place"]
    assert page.events[-1].hold_id == placed.id
    await scene.audit(old)
    settings = Settings(database_url=database_url, mode="sweep")
    assert doctor.healthy(await doctor.examine(old, since=None, settings=settings))


async def test_a_newer_database_is_left_alone(conn: asyncpg.Connection[asyncpg.Record]) -> None:
    """An older program refuses, and says what to do."""
    await conn.execute("INSERT INTO expiry_schema (version) VALUES ($1)", schema.VERSION + 1)
    with pytest.raises(errors.SetupError, match="upgrade this program"):
        await schema.apply(conn)
