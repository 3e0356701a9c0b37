"""The store's schema: find it, apply it, and refuse a database that has another version."""

from pathlib import Path

import asyncpg

from expiry.errors import SetupError

VERSION = 1  # of schema.sql; raise both together

_APPLY_LOCK = 1163415128  # advisory lock: one migration at a time


def read() -> str:
    """Answer the text of schema.sql, from the checkout or from the installed package."""
    here = Path(__file__).parent
    for path in (here.parent / "schema.sql", here / "schema.sql"):
        if path.exists():
            return path.read_text(encoding="utf-8")
    msg = "schema.sql is missing from this installation: install the package again."
    raise SetupError(msg)


async def apply(conn: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Create or complete the schema in one transaction; harmless when it is there already."""
    found = await version(conn)
    if found is not None and found > VERSION:
        raise _mismatch(found)
    async with conn.transaction():
        await conn.execute("SELECT pg_advisory_xact_lock($1)", _APPLY_LOCK)
        await conn.execute("SET LOCAL client_min_messages = warning")
        await conn.execute(read())


async def version(conn: "asyncpg.Connection[asyncpg.Record]") -> int | None:
    """Answer the version that the database has; None where there is no schema."""
    if await conn.fetchval("SELECT to_regclass('expiry_schema')") is None:
        return None
    found: int | None = await conn.fetchval("SELECT max(version) FROM expiry_schema")
    return found


async def check(conn: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Raise SetupError unless the database has exactly the version of this program."""
    found = await version(conn)
    if found is None:
        msg = "The database has no expiry schema: run `expiry migrate`."
        raise SetupError(msg)
    if found != VERSION:
        raise _mismatch(found)


def _mismatch(found: int) -> SetupError:
    remedy = "run `expiry migrate`" if found < VERSION else "upgrade this program"
    return SetupError(f"The database has schema version {found}, this program needs {VERSION}: {remedy}.")
