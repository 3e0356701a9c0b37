"""What every loop of ours shares: rounds at its own pace, a pause by an operator, one edge for failures."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

import asyncpg
import structlog
from redis.exceptions import RedisError

from expiry.errors import LoopNotFoundError
from expiry.holds import Conn
from expiry.telemetry import LOOP_ERRORS, LOOP_LAST, LOOP_PAUSED
from governor import BucketUnavailable

NAMES = ("worker", "promoter", "sweep", "prune")
BACKOFF_S_MAX = 10.0  # between two rounds while a store is away
PAUSE_POLL_S = 1.0  # a pause takes effect within this

DATABASE_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)
REDIS_ERRORS = (RedisError, BucketUnavailable)

log = structlog.get_logger()


class Backoff:
    """Waits that double from 0.1 s to BACKOFF_S_MAX, with jitter, so that a fleet does not return in step."""

    def __init__(self) -> None:
        """Start without a failure."""
        self._failures = 0
        self._first_s = self._last_s = 0.0  # monotonic, of the failures in a row

    def succeeded(self) -> None:
        """Forget the failures."""
        self._failures = 0

    def failing_s(self) -> float:
        """Answer for how long it has been failing, s; 0 when the last failure is so old that it tells nothing."""
        if not self._failures or time.monotonic() - self._last_s > 2 * BACKOFF_S_MAX:
            return 0.0
        return self._last_s - self._first_s

    def failed(self) -> float:
        """Answer how long to wait now, s."""
        self._last_s = time.monotonic()
        if not self._failures:
            self._first_s = self._last_s
        self._failures = min(self._failures + 1, 10)
        jitter = random.uniform(0.5, 1)  # noqa: S311 - spreads retries
        return min(0.1 * 2.0 ** (self._failures - 1), BACKOFF_S_MAX) * jitter


def kind_of(error: BaseException) -> str:
    """Name the store that failed; everything else is a bug of ours."""
    if isinstance(error, REDIS_ERRORS):
        return "redis"
    return "database" if isinstance(error, DATABASE_ERRORS) else "bug"


def note_failure(loop: str, error: BaseException, *, retry_in_s: float) -> None:
    """Count and log one failed round."""
    kind = kind_of(error)
    LOOP_ERRORS.labels(loop, kind).inc()
    if kind == "bug":
        log.error("loop.failed", loop=loop, retry_in_s=round(retry_in_s, 2), exc_info=error)
    else:
        log.warning(
            "loop.backed_off", loop=loop, kind=kind, reason=repr(error), retry_in_s=round(retry_in_s, 2)
        )


async def rest(stop: asyncio.Event, seconds: float) -> None:
    """Wait, or less if asked to stop."""
    try:
        async with asyncio.timeout(max(seconds, 0)):
            await stop.wait()
    except TimeoutError:
        return


async def rest_any(events: Iterable[asyncio.Event], seconds: float) -> None:
    """Wait, or less if any of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def run(
    name: str,
    tick: Callable[[], Awaitable[object]],
    *,
    interval_s: float,
    stop: asyncio.Event,
    pauses: "Pauses",
    backoff: Backoff | None = None,
) -> None:
    """Run `tick` every `interval_s` until asked to stop; a failure backs off and never ends the loop."""
    backoff = backoff or Backoff()
    while not stop.is_set():
        wait_s = interval_s
        if not pauses.paused(name):
            try:
                await tick()
                backoff.succeeded()
                LOOP_LAST.labels(name).set_to_current_time()
            except Exception as error:  # noqa: BLE001 - the edge of the loop: noted, then tried again
                wait_s = max(interval_s, backoff.failed())
                note_failure(name, error, retry_in_s=wait_s)
        await rest(stop, wait_s)


PAUSED = "SELECT name, paused FROM loops"


class Pauses:
    """Which loops an operator has paused, as of the last look; the database is asked once a second."""

    def __init__(self, pool: "asyncpg.Pool[asyncpg.Record]") -> None:
        """Nothing is paused until the first look."""
        self._pool = pool
        self._paused: Mapping[str, bool] = {}

    def paused(self, name: str) -> bool:
        """Whether the loop is to stand still."""
        return self._paused.get(name, False)

    async def look(self) -> None:
        """Read the table."""
        rows = await self._pool.fetch(PAUSED)
        paused = {row["name"]: row["paused"] for row in rows}
        for name in NAMES:
            if paused.get(name, False) != self.paused(name):
                log.warning("loop.stands_still" if paused.get(name) else "loop.goes_on", loop=name)
        self._paused = paused
        for name in NAMES:
            LOOP_PAUSED.labels(name).set(self.paused(name))

    async def watch(self, stop: asyncio.Event) -> None:
        """Look again and again; while the database is away the last answer stands."""
        while not stop.is_set():
            try:
                await self.look()
            except DATABASE_ERRORS as error:
                log.debug("pauses.unknown", reason=repr(error))
            await rest(stop, PAUSE_POLL_S)


SET_PAUSED = """
INSERT INTO loops (name, paused, reason, changed_by) VALUES ($1, $2, $3, $4)
ON CONFLICT (name) DO UPDATE SET paused = EXCLUDED.paused, reason = EXCLUDED.reason,
                                 changed_by = EXCLUDED.changed_by, changed_at = clock_timestamp()
"""


async def set_paused(conn: Conn, name: str, *, paused: bool, by: str, reason: str | None) -> None:
    """Pause or resume a loop in the whole fleet; who and why is kept. Data stays as it is."""
    if name not in NAMES:
        raise LoopNotFoundError(f"there is no loop {name!r}: it is one of {', '.join(NAMES)}")
    await conn.execute(SET_PAUSED, name, paused, reason, by)
    log.warning("loop.paused" if paused else "loop.resumed", loop=name, by=by, reason=reason)
