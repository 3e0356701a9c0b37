"""The store's schema: find it, apply it, and refuse a database that has another version."""

from pathlib import Path

from expiry.errors import SetupError
from expiry.holds import Conn

VERSION = 3  # of schema.sql; raise both together

_APPLY_LOCK = 1163415128  # advisory lock: one migration at a time


def read() -> str:
    """Answer the text of schema.sql, from the checkout or from the installed package."""
    # A link to the top of the checkout, a file of its own in an installed package.
    return Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")


async def apply(conn: Conn) -> None:
    """Create or complete the schema in one transaction; harmless when it is there already."""
    encoding = await conn.fetchval("SHOW server_encoding")
    if encoding != "UTF8":
        raise SetupError(f"The database has the encoding {encoding}; create one with UTF8.")
    found = await version(conn)
    if found is not None and found > VERSION:
        raise _mismatch(found)
    async with conn.transaction():
        await conn.execute("SELECT pg_advisory_xact_lock($1)", _APPLY_LOCK)
        await conn.execute("SET LOCAL client_min_messages = warning")
        await conn.execute(read())


async def version(conn: Conn) -> int | None:
    """Answer the version that the database has; None where there is no schema."""
    if await conn.fetchval("SELECT to_regclass('expiry_schema')") is None:
        return None
    found: int | None = await conn.fetchval("SELECT max(version) FROM expiry_schema")
    return found


async def check(conn: Conn) -> None:
    """Raise SetupError unless the database has exactly the version of this program."""
    found = await version(conn)
    if found is None:
        raise SetupError("The database has no expiry schema: run `expiry migrate`.")
    if found != VERSION:
        raise _mismatch(found)


def _mismatch(found: int) -> SetupError:
    remedy = "run `expiry migrate`" if found < VERSION else "upgrade this program"
    return SetupError(f"The database has schema version {found}, this program needs {VERSION}: {remedy}.")
