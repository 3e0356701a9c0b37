"""A worker in a process of its own, for tests to signal or kill: `child_worker.py SETTINGS [STOP_AT]`.

SETTINGS is the JSON of the fields that are not default. STOP_AT makes it hang for ever once it has got
there: `claimed` (before the statement) or `committed` (before the settle). It writes a line when it is
ready and one when it hangs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

import asyncpg

from expiry.settings import Settings
from expiry.wakeups import Again, Claim, Wakeups, connect_redis
from expiry.worker import GovernedWorker
from tests.fleet import PLENTY


async def hang(where: str) -> NoReturn:
    """Say where, and stay there."""
    print(where, flush=True)  # noqa: T201 - the parent reads it
    await asyncio.Event().wait()
    raise AssertionError


class HangsOnceClaimed(Wakeups):
    """Gets stuck with wake-ups in hand."""

    async def claim(self, want: int, *, skew_ms: float) -> Claim:
        """Claim, and never tell."""
        claim = await super().claim(want, skew_ms=skew_ms)
        if claim.wakes:
            await hang("claimed")
        return claim


class HangsOnceCommitted(Wakeups):
    """Gets stuck with holds expired and their wake-ups not settled."""

    async def settle(  # noqa: D102 - never settles
        self,
        *,
        done: Sequence[bytes],  # noqa: ARG002
        again: Sequence[Again] = (),  # noqa: ARG002
        refund: int = 0,  # noqa: ARG002
    ) -> None:
        await hang("committed")


KINDS = {"": Wakeups, "claimed": HangsOnceClaimed, "committed": HangsOnceCommitted}


@asynccontextmanager
async def worker(settings: Settings, stop_at: str) -> AsyncIterator[GovernedWorker]:
    """Give a worker that stops on SIGTERM, as one of arq does."""
    redis = connect_redis(settings)
    async with asyncpg.create_pool(settings.database_url.get_secret_value(), min_size=1) as pool:
        yield GovernedWorker(
            pool=pool, redis=redis, wakeups=KINDS[stop_at](redis, settings, PLENTY), settings=settings
        )
    await redis.aclose()


async def main(fields: str, stop_at: str = "") -> None:
    """Run until told to stop."""
    async with worker(Settings(**json.loads(fields)), stop_at) as running:
        print("ready", flush=True)  # noqa: T201
        try:
            await running.async_run()
        finally:
            await running.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
