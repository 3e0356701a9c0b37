"""What the Python peers share: the holds, the work on one of them, and what an enqueueing says."""

import asyncio
import json
import os
import time
from pathlib import Path

import asyncpg

FAST = os.environ.get("SETTINGS", "fast") == "fast"
CONNECTIONS = 20  # as many transactions at once as two cores and one disk can use


def holds(path: str) -> list[tuple[str, int, int]]:
    """Read id, generation and deadline (ms since 1970) of each."""
    lines = (line.split("\t") for line in Path(path).read_text().splitlines())
    return [(hold_id, int(generation), int(due_ms)) for hold_id, generation, due_ms in lines]


def say(n: int, seconds: float) -> None:
    """Print what an enqueueing took, for the bench to read."""
    print(json.dumps({"n": n, "seconds": seconds}))


def later_s(due_ms: int) -> float:
    """Answer how far ahead a deadline is; 0 when it has passed."""
    return max(due_ms / 1000 - time.time(), 0.0)


class Work:
    """Expires one hold in one transaction of one statement, on asyncpg's pool."""

    async def connect(self) -> None:
        """Open the pool. Nothing is left in a session, so nothing is reset between two statements."""
        self._pool = await asyncpg.create_pool(
            os.environ["DATABASE_URL"], min_size=CONNECTIONS, max_size=CONNECTIONS, reset=_keep
        )
        self._statement = os.environ["EXPIRE_SQL"]

    async def expire(self, hold_id: str, generation: int) -> None:
        """Return after the commit. One that comes a moment too early is tried again, as it would have to be."""
        for _ in range(100):
            if await self._pool.execute(self._statement, hold_id, generation) != "INSERT 0 0":
                return
            print("early", flush=True)
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        """Close the pool."""
        await self._pool.close()


async def _keep(_conn: object) -> None:
    """Reset nothing."""
