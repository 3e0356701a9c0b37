"""The worker: pulls due wake-ups through the bucket and expires their holds, punctually and in batches.

    claim (permits and lease, one call) -> expire (one statement) -> settle (one call)

The next claim overlaps the running statement; a bounded number is in flight. When nothing is due it sleeps
exactly until the next deadline, looking at the head every half second in between: a hold lasts at least a
second, so nothing can slip in unseen.
"""

import asyncio
import math
import random
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import structlog
from arq import Retry
from arq.connections import ArqRedis
from arq.worker import Worker, func
from prometheus_client import Counter, Gauge, Histogram

from expiry import loops
from expiry.expire import NOT_STARTED, Outcome, Wake, expire_batch
from expiry.permits import GATHER_S, Permits, batch_size
from expiry.settings import Settings
from expiry.telemetry import LOOP_LAST
from expiry.wakeups import REDIS_AWAY, Again, Claim, Wakeups, deserialize, parse, serialize
from governor.limiter import PERMITS

PEEK_S = 0.5  # the head is looked at this often, at least
REST_S_MIN = 0.0005  # a deadline less than this ahead is not worth a timer
CONTENDED_MS = (50, 250)  # a contended hold comes again after this, jittered
SKEW_MS_MIN = 5.0  # smaller differences between the clocks cannot be told from travel time
SKEW_SAMPLES = 64

IN_FLIGHT = Gauge("expiry_in_flight_holds", "Holds claimed and not settled in this process.")
CLAIM_AGE = Histogram(
    "expiry_claim_age_seconds",
    "From claim to settle.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30),
)
RETRIES = Counter("expiry_retries", "Wake-ups put back to come again.", ["reason"])
THROTTLED = Counter("expiry_worker_throttled", "Times that due holds had to wait for a permit.")
SKEW = Gauge("expiry_clock_skew_seconds", "Database clock minus Redis clock, as far as it is known.")
for _reason in ("early", "contended", "failed", "outage", "stopped"):
    RETRIES.labels(_reason)

log = structlog.get_logger()


class Skew:
    """Learns the database's clock minus Redis's from what statements report.

    The database's clock was read after Redis's, by at least nothing and at most what passed here from
    before the claim until after the commit: each batch says that the difference lies between two bounds,
    the last batches together that it lies between the closest of them. Only what cannot be explained by
    travel, stalls and slow commits is a difference; then the lower bound is used, which is never early.
    """

    def __init__(self) -> None:
        """Start with clocks that agree."""
        self._bounds: deque[tuple[float, float]] = deque(maxlen=SKEW_SAMPLES)
        self.ms = 0.0

    def learn(self, *, database_ms: float, redis_ms: float, elapsed_ms: float) -> None:
        """Take in one batch: both clocks as they were read, and the time from before the first to after both."""
        latest = (database_ms - redis_ms - elapsed_ms, database_ms - redis_ms)
        self._bounds.append(latest)
        low, high = max(b[0] for b in self._bounds), min(b[1] for b in self._bounds)
        if low > high:  # a clock was set: what was known before is void
            self._bounds.clear()
            self._bounds.append(latest)
            low, high = latest
        self.ms = low if low >= SKEW_MS_MIN or high <= -SKEW_MS_MIN else 0.0
        SKEW.set(self.ms / 1000)


@dataclass(slots=True)
class _Batch:
    claim: Claim
    asked_at_s: float  # monotonic, before the claim
    skew_ms: float  # assumed by the claim


class GovernedWorker(Worker):
    """An arq Worker with a main loop of its own: batches, leases and permits instead of jobs.

    Constructed, run (`run`, `async_run`), stopped (signals, `close`) and hooked (`on_startup`,
    `on_shutdown`, `ctx`) like arq's; arq's own polling, results, retries and health key are not used.
    """

    def __init__(
        self,
        *,
        pool: "asyncpg.Pool[asyncpg.Record]",
        redis: ArqRedis,
        wakeups: Wakeups,
        settings: Settings,
        permits: Permits | None = None,
        paused: Callable[[], bool] = lambda: False,
        stop: asyncio.Event | None = None,
        **arq: Any,  # noqa: ANN401 - arq's own keywords
    ) -> None:
        """`arq` takes arq.Worker's keywords (on_startup, on_shutdown, ctx, handle_signals...).

        `permits` are told how attempts end, for the governor; their own come with the claim.
        """
        arq.setdefault("functions", [func(expire, name="expire")])
        super().__init__(
            redis_pool=redis,
            queue_name=settings.queue,
            keep_result=0,
            job_serializer=serialize,
            job_deserializer=deserialize,
            **arq,
        )
        self._database = pool
        self._wakeups = wakeups
        self._settings = settings
        self._permits = permits
        self._is_paused = paused
        self._stop = stop or asyncio.Event()
        self._nudge = asyncio.Event()  # a settle put something back: a wake-up, or a permit
        self._slots = asyncio.Semaphore(settings.batches_in_flight_max)
        self._in_flight: dict[int, Claim] = {}
        self.backoffs = {"redis": loops.Backoff(), "database": loops.Backoff(), "bug": loops.Backoff()}
        self._away_until_s = 0.0
        self._skew = Skew()
        self._allowance_per_s = 1e9  # until the first claim says
        self.last_round_s = time.monotonic()

    async def main(self) -> None:
        """Claim, expire, settle until asked to stop; survives both stores."""
        self.ctx["redis"] = self.pool
        if self.on_startup:
            await self.on_startup(self.ctx)
        async with asyncio.TaskGroup() as batches:
            while not self._stop.is_set():
                await self._round(batches)

    def handle_sig(self, signum: Any) -> None:  # noqa: ANN401 - arq's signature
        """Stop claiming; what is in flight finishes, and no attempt is lost."""
        log.info("worker.stopping", signal=str(signum), in_flight=len(self._in_flight))
        self._stop.set()
        if self.main_task is not None:
            self.loop.call_later(self._settings.stop_grace_s, self.main_task.cancel)

    handle_sig_wait_for_completion = handle_sig

    async def close(self) -> None:
        """Finish or hand back what is in flight, within the grace period, and run `on_shutdown`."""
        self._stop.set()
        if self.main_task is not None and not self.main_task.done():
            try:
                async with asyncio.timeout(self._settings.stop_grace_s):
                    await asyncio.shield(self.main_task)
            except TimeoutError:
                self.main_task.cancel()
                await asyncio.gather(self.main_task, return_exceptions=True)
        await self._hand_back()
        if self.on_shutdown:
            await self.on_shutdown(self.ctx)

    # --- a round, in the order it happens

    async def _round(self, batches: asyncio.TaskGroup) -> None:
        self.last_round_s = time.monotonic()
        if self._is_paused():
            await loops.rest(self._stop, PEEK_S)
            return
        await self._slots.acquire()
        handed_on = False
        try:
            # After the slot: the batch that gave it back may have failed.
            await loops.rest(self._stop, self._away_until_s - time.monotonic())
            if self._stop.is_set():
                return
            self._nudge.clear()  # what was put back before the claim is seen by it
            asked_at_s, skew_ms = time.monotonic(), self._skew.ms
            claim = await self._wakeups.claim(
                batch_size(self._settings.batch_max, self._allowance_per_s), skew_ms=skew_ms
            )
            self.backoffs["redis"].succeeded()
            self._allowance_per_s = claim.allowance_per_s
            LOOP_LAST.labels("worker").set_to_current_time()
            PERMITS.labels("expire", "granted").inc(len(claim.wakes))
            if claim.wakes:
                batches.create_task(self._finish(_Batch(claim, asked_at_s, skew_ms)))
                handed_on = True
        except Exception as error:  # noqa: BLE001 - the edge of the loop
            self._back_off(error)
            return
        finally:
            if not handed_on:
                self._slots.release()
        await self._rest(claim)

    async def _rest(self, claim: Claim) -> None:
        """Sleep until something can be claimed: a deadline, a permit, or the next look."""
        if claim.head_ms is None:
            wait_s = PEEK_S
        elif claim.head_ms <= claim.now_ms:  # due already: only permits can have been short
            wait_s = claim.permit_wait_s
            if wait_s:
                THROTTLED.inc()
                # Let a batch of permits gather, or each statement would be for the one that just came.
                wait_s = max(wait_s, GATHER_S)
        else:
            wait_s = (claim.head_ms - claim.now_ms) / 1000
        wait_s = min(wait_s, PEEK_S)
        if wait_s > REST_S_MIN:
            await loops.rest_any((self._stop, self._nudge), wait_s)

    async def _finish(self, batch: _Batch) -> None:
        claim = batch.claim
        self._in_flight[id(claim)] = claim
        IN_FLIGHT.inc(len(claim.wakes))
        try:
            outcomes = await self._expire(claim)
            self.backoffs["database"].succeeded()
            await self._settle(batch, outcomes)
        except Exception as error:  # noqa: BLE001 - the edge of the loop
            wait_s = self._back_off(error)
            await self._come_again(claim, wait_s * 1000, "outage")
        finally:
            IN_FLIGHT.dec(len(claim.wakes))
            self._slots.release()
        del self._in_flight[id(claim)]  # a cancelled batch stays, for close() to hand back

    async def _expire(self, claim: Claim) -> list[Outcome]:
        pool, permits = self._database, self._permits
        try:
            async with pool.acquire() if permits is None else permits.connection(pool) as conn:
                outcomes = await expire_batch(conn, claim.wakes, by="worker", settings=self._settings)
        except Exception as error:
            if self._permits is not None:
                await self._permits.note_failure(error, len(claim.wakes))
            raise
        if self._permits is not None:
            self._permits.note(outcomes)
        return outcomes

    async def _settle(self, batch: _Batch, outcomes: list[Outcome]) -> None:
        claim = batch.claim
        elapsed_s = time.monotonic() - batch.asked_at_s
        if outcomes[0].kind not in ("failed", "dead"):  # those tell another statement's time
            self._skew.learn(
                database_ms=outcomes[0].at_ms,
                redis_ms=claim.now_ms - batch.skew_ms,
                elapsed_ms=elapsed_s * 1000,
            )
        tally = Tally(o.kind for o in outcomes)
        done: Sequence[bytes] = claim.ids
        again: list[Again] = []
        if tally["expired"] < len(outcomes):
            done = []
            for id_, outcome in zip(claim.ids, outcomes, strict=True):
                wait_ms = _wait_ms(outcome)
                if wait_ms is None:
                    done.append(id_)
                else:
                    again.append(Again(id_, math.ceil(outcome.at_ms + wait_ms)))
                    RETRIES.labels(outcome.kind).inc()
        refund = sum(tally[kind] for kind in NOT_STARTED)
        PERMITS.labels("expire", "refunded").inc(refund)
        # Acknowledged after the commit: a settle that is lost means a second, empty look.
        await self._wakeups.settle(done=done, again=again, refund=refund)
        if again or refund:
            self._nudge.set()
        if tally["missing"]:
            log.warning(
                "wakeups.of_nothing", count=tally["missing"], hint="does another database use this queue?"
            )
        CLAIM_AGE.observe(time.monotonic() - batch.asked_at_s)
        log.info(
            "batch.settled",
            holds=len(outcomes),
            ms=round(elapsed_s * 1000, 1),
            lag_ms_max=round(max((o.ms for o in outcomes if o.kind == "expired"), default=0), 1),
            **tally,
        )

    async def _come_again(self, claim: Claim, wait_ms: float, reason: str) -> None:
        """Put the whole claim back; should that fail too, the lease does it."""
        RETRIES.labels(reason).inc(len(claim.ids))
        at_ms = claim.now_ms + wait_ms
        try:
            await self._wakeups.settle(done=(), again=[Again(i, at_ms) for i in claim.ids])
        except REDIS_AWAY as error:
            log.warning("lease.left", count=len(claim.ids), reason=repr(error))

    async def _hand_back(self) -> None:
        for claim in list(self._in_flight.values()):
            await self._come_again(claim, 0, "stopped")
        self._in_flight.clear()

    def _back_off(self, error: Exception) -> float:
        wait_s = self.backoffs[loops.kind_of(error)].failed()
        self._away_until_s = time.monotonic() + wait_s
        loops.note_failure("worker", error, retry_in_s=wait_s)
        return wait_s


def _wait_ms(outcome: Outcome) -> float | None:
    """How long until the wake-up is worth another look; None when it has said all."""
    if outcome.kind in ("early", "failed"):
        return outcome.ms
    if outcome.kind == "contended":
        return random.uniform(*CONTENDED_MS)  # noqa: S311 - spreads retries
    return None


async def expire(ctx: dict[Any, Any]) -> str:
    """Expire the hold that the job id names: the function that a stock arq.Worker runs.

    `ctx` must hold `pool` (asyncpg) and `settings`. Early and contended ones raise arq's Retry.
    """
    wake: Wake = parse(ctx["job_id"].encode())
    async with ctx["pool"].acquire() as conn:
        [outcome] = await expire_batch(conn, [wake], by="worker", settings=ctx["settings"])
    wait_ms = _wait_ms(outcome)
    if wait_ms is not None:
        raise Retry(defer=math.ceil(wait_ms) / 1000)
    return outcome.kind
