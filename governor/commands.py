"""What commands do on the governor's tables."""

from __future__ import annotations

from collections.abc import Callable

import asyncpg

from governor import journal
from governor.lease import Connection

PAGE = 500  # decisions read by one statement


async def export(database_url: str, *, name: str, limit: int, write: Callable[[str], object]) -> int:
    """Write the newest decisions as lines, oldest first; returns how many.

    Raises what asyncpg raises where the database does not answer.
    """
    conn = await asyncpg.connect(database_url)
    try:
        return await write_lines(conn, name=name, limit=limit, write=write)
    finally:
        await conn.close()


async def write_lines(conn: Connection, *, name: str, limit: int, write: Callable[[str], object]) -> int:
    """Write the newest decisions as lines, oldest first; returns how many."""
    after = await journal.position(conn, name, back=limit)
    written = 0
    while written < limit and (entries := await journal.page(conn, name, after=after, limit=PAGE)):
        for entry in entries[: limit - written]:
            write(entry.as_line() + "\n")
        written += len(entries)
        after = entries[-1].id
    return min(written, limit)
