"""Faults that tests put into the database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from expiry.holds import Conn

# Expiring a hold whose first resource is called poison... raises; nothing else does.
POISON = """
CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION USING ERRCODE = '23514', MESSAGE = 'poison'; END $$;
CREATE TRIGGER poison BEFORE UPDATE ON holds FOR EACH ROW
    WHEN (NEW.state = 'expired' AND NEW.resource_ids[1] LIKE 'poison%') EXECUTE FUNCTION poison();
"""
CURE = "DROP TRIGGER poison ON holds; DROP FUNCTION poison()"

# The expiring statement hangs before its commit for as long as somebody else has the lock.
GATE = 7_777_777
GATED = f"""
CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    WHILE NOT pg_try_advisory_xact_lock_shared({GATE}) LOOP PERFORM pg_sleep(0.005); END LOOP;
    RETURN NULL;
END $$;
CREATE TRIGGER gate AFTER UPDATE ON holds FOR EACH ROW
    WHEN (NEW.state = 'expired') EXECUTE FUNCTION gate();
"""
WAITING = """
SELECT pid FROM pg_stat_activity
 WHERE datname = current_database() AND state = 'active' AND query LIKE '%expiry_expire(%' AND pid <> pg_backend_pid()
"""


@asynccontextmanager
async def gate_shut(conn: Conn) -> AsyncIterator[Callable[[], Awaitable[list[int]]]]:
    """Let expiring statements hang before their commit; gives a check for `eventually`: who hangs."""
    await conn.execute(GATED)
    await conn.execute("SELECT pg_advisory_lock($1)", GATE)

    async def hanging() -> list[int]:
        return [row["pid"] for row in await conn.fetch(WAITING)]

    try:
        yield hanging
    finally:
        await conn.execute("SELECT pg_advisory_unlock($1)", GATE)
