"""The parts of the service put together in one process and supervised: API, worker, promoter, sweep, prune.

`expiry api`, `expiry worker` and `expiry dev` are this with other parts; who reads the environment is the
command line.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import asyncpg
import structlog
from redis.asyncio import Redis

from expiry import governing, loops, schema
from expiry.api import make_app, make_health_app, serve
from expiry.errors import SetupError
from expiry.observe import Observer
from expiry.permits import PUBLISH_INTERVAL_S, Permits
from expiry.promoter import Promoter
from expiry.prune import Prune
from expiry.settings import Settings
from expiry.sweep import Sweep
from expiry.telemetry import mask
from expiry.wakeups import REDIS_AWAY, Wakeups, connect_redis
from expiry.worker import GovernedWorker
from governor import GovernorSettings, PostgresBucket, RedisBucket
from governor.probes.settings import ProbeSettings

CONNECT_TIMEOUT_S = 5.0
SILENT_S_MAX = 15.0  # a worker that has not looked at its queue for so long is not ready

log = structlog.get_logger()


async def connect_database(settings: Settings, role: str) -> "asyncpg.Pool[asyncpg.Record]":
    """Answer a pool with bounded waits. Raises SetupError that says what to do."""
    url = settings.database_url.get_secret_value()
    # Our functions wait for rows and then look again: that needs READ COMMITTED, whatever the default.
    session = {"application_name": f"expiry-{role}", "default_transaction_isolation": "read committed"}
    if not settings.database_pooler:  # a pooler would hand these settings to other clients
        session["statement_timeout"] = str(round(settings.statement_timeout_s * 1000))
    try:
        return await asyncpg.create_pool(
            url,
            min_size=1,
            max_size=settings.database_pool_max,
            timeout=CONNECT_TIMEOUT_S,
            command_timeout=settings.statement_timeout_s + 1,
            server_settings=session,
            statement_cache_size=0 if settings.database_pooler else 1024,
            # Our statements leave nothing in a session, so nothing is reset between two of them (that
            # would be a round trip each), and a lone hold after a quiet hour finds a warm connection.
            reset=_keep,
            max_inactive_connection_lifetime=0,
        )
    except (OSError, TimeoutError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise SetupError(
            f"PostgreSQL cannot be used at {mask(url)}: {_sentence(error)}. "
            "Start it, or correct EXPIRY_DATABASE_URL."
        ) from error


async def check_redis(redis: Redis, settings: Settings) -> None:
    """Raise SetupError unless Redis answers."""
    try:
        await redis.ping()
    except REDIS_AWAY as error:
        raise SetupError(
            f"Redis cannot be used at {mask(settings.redis_url.get_secret_value())}: {_sentence(error)}. "
            "Start it, correct EXPIRY_REDIS_URL, or set EXPIRY_MODE=sweep to do without it."
        ) from error


def _sentence(error: BaseException) -> str:
    if isinstance(error, ValueError):  # its text may quote a piece of the password
        return "it cannot be read (in a password write %2F for / and %40 for @)"
    text = " ".join(str(error).split()) or type(error).__name__
    return mask(text).rstrip(".")


@dataclass(slots=True)
class Service:
    """One process: what it runs is said by `api` and `background`; it ends when `stop` is set."""

    settings: Settings
    governor: GovernorSettings
    api: bool
    background: bool
    stop: asyncio.Event
    bound: "asyncio.Future[int] | None" = None  # is given the port, once it listens
    role: str = "service"
    measured: ProbeSettings | None = None  # the probes' targets; None: nothing is measured
    _tasks: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _worker: GovernedWorker | None = field(default=None, init=False)
    _started_s: float = field(default_factory=time.monotonic, init=False)
    _backoffs: dict[str, loops.Backoff] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Start all parts, keep them running, and stop them within the grace period."""
        async with AsyncExitStack() as stack:
            pool = await connect_database(self.settings, self.role)
            pools = [pool]
            stack.push_async_callback(_close_pools, pools)
            loops_pool = pool
            if self.api and self.background:  # a batch must not queue behind the requests of a busy shop
                loops_pool = await connect_database(self.settings, f"{self.role}-loops")
                pools.append(loops_pool)
            async with pool.acquire() as conn:
                await schema.check(conn)
            wakeups = None
            if self.settings.queue_used:
                redis = connect_redis(self.settings)
                stack.push_async_callback(redis.aclose)
                if self.settings.redis_required_at_start:
                    await check_redis(redis, self.settings)
                wakeups = Wakeups(redis, self.settings, self.governor)
            pauses = loops.Pauses(loops_pool)
            if self.background:  # a process that starts during a pause must not work until its first look
                await pauses.look()
            changed = self.settings.model_dump(mode="json", exclude_defaults=True)
            log.info("service.started", role=self.role, mode=self.settings.mode, changed=changed)
            log.info("governor.settings", **governing.describe(self.governor, self.measured))
            for name, part in self._parts(pool, loops_pool, wakeups, pauses).items():
                self._tasks.append(asyncio.create_task(self._supervise(name, part), name=name))
            await self._until_stopped()

    def _parts(
        self,
        pool: "asyncpg.Pool[asyncpg.Record]",
        loops_pool: "asyncpg.Pool[asyncpg.Record]",
        wakeups: Wakeups | None,
        pauses: loops.Pauses,
    ) -> dict[str, Callable[[], Awaitable[None]]]:
        settings, stop = self.settings, self.stop
        floor_per_s = self.governor.floor_per_s
        row = PostgresBucket(pool, governing.bucket_row(self.governor), floor_per_s=floor_per_s)
        shared = wakeups and RedisBucket(wakeups.redis, wakeups.bucket_key, floor_per_s=floor_per_s)
        parts: dict[str, Callable[[], Awaitable[None]]] = {}
        if self.api:
            app = make_app(
                pool=pool,
                settings=settings,
                governed=self.governor,
                wakeups=wakeups,
                bucket=shared or row,
                ready=self._troubles,
            )
            parts["api"] = lambda: serve(
                app, settings, settings.api_port, stop, drain_s=settings.api_drain_s, bound=self.bound
            )
        if not self.background:
            return parts
        permits = Permits(shared or None, row, self.governor)
        parts["pauses"] = lambda: pauses.watch(stop)
        if self.governor.mode != "enforce":
            parts["allowance"] = lambda: loops.run(
                "allowance", permits.publish, interval_s=PUBLISH_INTERVAL_S, stop=stop, pauses=pauses
            )
        if self.governor.mode != "off":
            parts["governor"] = lambda: governing.run(
                loops_pool, permits, settings, stop, measured=self.measured
            )
        parts["observe"] = lambda: loops.run(
            "observe", Observer(loops_pool, wakeups).look, interval_s=2.0, stop=stop, pauses=pauses
        )
        parts |= self._loops(loops_pool, wakeups, permits, pauses)
        if not self.api and settings.metrics_port is not None:
            health = make_health_app(
                pool=loops_pool, settings=settings, wakeups=wakeups, ready=self._troubles
            )
            parts["health"] = lambda: serve(
                health, settings, settings.metrics_port or 0, stop, bound=self.bound
            )
        return parts

    def _loops(
        self,
        pool: "asyncpg.Pool[asyncpg.Record]",
        wakeups: Wakeups | None,
        permits: Permits,
        pauses: loops.Pauses,
    ) -> dict[str, Callable[[], Awaitable[None]]]:
        settings, stop = self.settings, self.stop
        parts: dict[str, Callable[[], Awaitable[None]]] = {}

        def every(name: str, interval_s: float, tick: Callable[[], Awaitable[object]]) -> None:
            backoff = self._backoffs[name] = loops.Backoff()
            parts[name] = lambda: loops.run(
                name, tick, interval_s=interval_s, stop=stop, pauses=pauses, backoff=backoff
            )

        if wakeups is not None and settings.worker_enabled:
            parts["worker"] = lambda: self._work(pool, wakeups, permits, pauses)
        if wakeups is not None and settings.promoter_enabled:
            every("promoter", settings.promoter_interval_s, Promoter(pool, wakeups, settings).tick)
        if settings.mode != "queue" and settings.sweep_enabled:
            sweep = Sweep(pool, permits, settings, stop, lambda: pauses.paused("sweep"))
            every("sweep", settings.sweep_interval_s, sweep.one_pass)
        if settings.prune_enabled:
            prune = Prune(pool, permits, settings, stop, lambda: pauses.paused("prune"))
            every("prune", settings.prune_interval_s, prune.one_pass)
        return parts

    async def _work(
        self,
        pool: "asyncpg.Pool[asyncpg.Record]",
        wakeups: Wakeups,
        permits: Permits,
        pauses: loops.Pauses,
    ) -> None:
        # Its own, for close() sets it: a worker that failed must not stop the whole service.
        stop = asyncio.Event()
        self._worker = GovernedWorker(
            pool=pool,
            redis=wakeups.redis,
            wakeups=wakeups,
            settings=self.settings,
            permits=permits,
            paused=lambda: pauses.paused("worker"),
            stop=stop,
            handle_signals=False,
        )
        told = asyncio.create_task(_pass_on(self.stop, stop))
        try:
            await self._worker.async_run()
        finally:
            told.cancel()
            await self._worker.close()

    async def _supervise(self, name: str, part: Callable[[], Awaitable[None]]) -> None:
        """Run a part until it is stopped; one that fails by a fault of ours is started again."""
        backoff = loops.Backoff()
        while not self.stop.is_set():
            try:
                await part()
            except SetupError:
                raise
            except Exception as error:  # noqa: BLE001 - the edge of the part: noted, then started again
                wait_s = backoff.failed()
                loops.note_failure(name, error, retry_in_s=wait_s)
                await loops.rest(self.stop, wait_s)

    async def _until_stopped(self) -> None:
        stopped = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait([stopped, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.stop.set()
            await stopped
            # The API's grace begins when its load balancers have had the time to turn to others.
            drain_s = self.settings.api_drain_s if self.api else 0
            _, late = await asyncio.wait(self._tasks, timeout=drain_s + self.settings.stop_grace_s)
            for task in late:
                log.warning("part.cut_off", part=task.get_name())
                task.cancel()
            results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _troubles(self) -> Mapping[str, str]:
        """Say what keeps this process from being ready, apart from the stores."""
        troubles = {}
        if self.stop.is_set():
            troubles["draining"] = "is about to stop"
        backoffs = list(self._backoffs.items())
        if self._worker is not None:
            backoffs += [("worker", backoff) for backoff in self._worker.backoffs.values()]
            silent_s = time.monotonic() - max(self._worker.last_round_s, self._started_s)
            if silent_s > SILENT_S_MAX:
                troubles["worker"] = f"has not looked at its queue for {silent_s:.0f} s"
        for name, backoff in backoffs:
            if backoff.failing_s() > SILENT_S_MAX:
                troubles[name] = f"has been failing for {backoff.failing_s():.0f} s"
        return troubles


async def _pass_on(event: asyncio.Event, to: asyncio.Event) -> None:
    await event.wait()
    to.set()


async def _keep(_conn: object) -> None:
    """Reset nothing."""


async def _close_pools(pools: "list[asyncpg.Pool[asyncpg.Record]]") -> None:
    await asyncio.gather(*map(_close_pool, pools))


async def _close_pool(pool: "asyncpg.Pool[asyncpg.Record]") -> None:
    """Close within a second; what still runs then was cut off already."""
    try:
        async with asyncio.timeout(1):
            await pool.close()
    except TimeoutError:
        pool.terminate()
