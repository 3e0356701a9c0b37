"""A controller in a process of its own, for tests to stop or kill: `child_controller.py DATABASE_URL REDIS_URL`.

It writes a line when it leads, and when it does no longer.
"""

from __future__ import annotations

import asyncio
import sys

import asyncpg
from redis.asyncio import Redis

from tests.governing import Fleet, running


async def main(database_url: str, redis_url: str) -> None:
    """Run until killed."""
    async with asyncpg.create_pool(database_url, min_size=1) as pool, Redis.from_url(redis_url) as redis:
        controller = Fleet(pool, redis).controller("child")
        async with running(controller):
            led = False
            while True:
                if controller.leads is not led:
                    led = controller.leads
                    print("leads" if led else "leads no longer", flush=True)  # noqa: T201 - the parent reads it
                await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
