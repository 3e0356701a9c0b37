"""A reaper of one statement in a loop, without queue, permits, metrics or log: the physical limit.

    python -m bench.bare array|join|counters BATCH

It waits for a line on its input before it begins.
"""

import os
import sys

import asyncpg
import uvloop

from bench.sql import REAP


async def main(statement: str, batch: int) -> None:
    """Reap until nothing is due."""
    conn = await asyncpg.connect(os.environ["DATABASE_URL"])
    await conn.execute("SELECT 1")
    print("ready", flush=True)
    sys.stdin.readline()
    while await conn.execute(statement, batch) != "INSERT 0 0":
        pass
    await conn.close()


if __name__ == "__main__":
    uvloop.run(main(REAP[sys.argv[1]], int(sys.argv[2])))
