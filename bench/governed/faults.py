"""What goes wrong on the database of a run; each ends by itself."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import asyncpg

from bench.stage import Stage, connection

Fault = Callable[[Stage, float], Awaitable[None]]

SLOW_SESSIONS = 4
LOCKED_S, EVERY_S = 1.0, 3.0
BUSY = "SELECT count(*) FROM generate_series(1, 300000) i WHERE sqrt(i) > 0"


async def lock_storm(stage: Stage, lasts_s: float) -> None:
    """Lock the stock for a second in every three: latency without any use of the processor."""
    ends_s = asyncio.get_running_loop().time() + lasts_s
    async with connection(stage.database_url) as conn:
        while asyncio.get_running_loop().time() < ends_s:
            async with conn.transaction():
                await conn.execute("LOCK TABLE shop_stock IN EXCLUSIVE MODE")
                await asyncio.sleep(LOCKED_S)
            await asyncio.sleep(EVERY_S - LOCKED_S)


async def slow_down(stage: Stage, lasts_s: float) -> None:
    """Let reports of somebody else use the processors: the database does the same work at a fraction of its speed."""

    async def report() -> None:
        async with connection(stage.database_url) as conn:
            while True:
                await conn.execute(BUSY)

    with suppress(TimeoutError):
        async with asyncio.timeout(lasts_s), asyncio.TaskGroup() as group:
            for _ in range(SLOW_SESSIONS):
                group.create_task(report())


async def outage(stage: Stage, lasts_s: float) -> None:
    """Stop every process of the server where it stands: nothing answers, nothing is refused either."""
    stopped: list[int] = []
    try:
        while new := [pid for pid in _tree(stage.postgres_pid) if pid not in stopped]:
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
        await asyncio.sleep(lasts_s)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _tree(root: int) -> list[int]:
    """Answer a process and its children, which is all there is of a PostgreSQL server."""
    with suppress(OSError):
        return [root, *map(int, Path(f"/proc/{root}/task/{root}/children").read_text().split())]
    return []


async def quietly(fault: Awaitable[None]) -> None:
    """Let a fault be; one whose connection is lost has ended early."""
    with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        await fault
