"""Whether this process can do its work: both stores accept a write, and what runs beside it is content."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import asyncpg
import structlog
from redis.exceptions import RedisError

from expiry.api.database import DRIVER_ERRORS
from expiry.settings import Settings
from expiry.wakeups import Wakeups

WAIT_S_MAX = 2.0  # for one store
REUSE_S = 1.0  # one result serves all probes within
REDIS_KEY_MS = 10_000

# A write that a standby or a full disk refuses, and that changes nothing; HOT, so it leaves little bloat.
WRITE = "UPDATE expiry_schema SET version = version RETURNING version"

log = structlog.get_logger()


class Readiness:
    """Answers probes; those that come together share one check, and its result lasts REUSE_S."""

    def __init__(
        self,
        *,
        pool: "asyncpg.Pool[asyncpg.Record]",
        settings: Settings,
        wakeups: Wakeups | None,
        ready: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ready` answers what else fails: name and reason; empty when all is well."""
        self._pool = pool
        self._wakeups = wakeups if settings.queue_used else None
        self._ready = ready
        self._clock = clock
        self._lock = asyncio.Lock()
        self._until = 0.0
        self._stores: dict[str, str] = {}

    async def failing(self) -> dict[str, str]:
        """Answer what fails and why; empty when this process is ready."""
        async with self._lock:
            if self._clock() >= self._until:
                self._stores = await self._check()
                self._until = self._clock() + REUSE_S
        return self._stores | dict(self._ready())

    async def _check(self) -> dict[str, str]:
        async with asyncio.TaskGroup() as group:
            checks = [group.create_task(_reason("postgresql", self._write_postgresql()))]
            if self._wakeups is not None:
                checks.append(group.create_task(_reason("redis", self._write_redis(self._wakeups))))
        return dict(found for check in checks if (found := check.result()) is not None)

    async def _write_postgresql(self) -> None:
        async with self._pool.acquire(timeout=WAIT_S_MAX) as conn:
            await conn.fetchval(WRITE)

    async def _write_redis(self, wakeups: Wakeups) -> None:
        await wakeups.redis.set(f"{wakeups.queue}:ready", b"1", px=REDIS_KEY_MS)


async def _reason(store: str, write: Awaitable[None]) -> tuple[str, str] | None:
    try:
        async with asyncio.timeout(WAIT_S_MAX):
            await write
    except (*DRIVER_ERRORS, RedisError) as error:
        log.warning("readiness.failed", store=store, reason=repr(error))
        # Probes need no key, so they learn the kind of failure only.
        return store, f"accepts no write ({type(error).__name__})"
    return None
