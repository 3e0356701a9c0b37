"""Wake-ups: the hints in Redis that say when to look at a hold. Enqueue, claim, settle.

A sorted set of our own in arq's format: member `expire:{hold_id}:{generation}`, score = deadline in ms on
the database's clock, rounded up. Every operation is one Lua call (ARQ's own cost 4 to 17 commands a job and
hide errors). Losing any of it costs punctuality, never a hold: the sweep finds what the queue forgot.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any, NamedTuple

import structlog
from arq.connections import ArqRedis
from asyncpg.pgproto import pgproto
from prometheus_client import Counter
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError

from expiry.errors import ExpiryError
from expiry.expire import Wake
from expiry.holds import Conn, Hold
from expiry.settings import Settings
from governor import Bucket, BucketUnavailable, GovernorSettings, bucket_library

JOB_NAME = "expire"
BODY = json.dumps({"f": JOB_NAME}, separators=(",", ":")).encode()  # the id alone carries all we need
BODY_OUTLIVES_MS = 86_400_000  # as in arq
REDIS_AWAY = (RedisError, OSError, TimeoutError)  # what a call to Redis raises when it cannot be made
CHARGE_S_MAX = 0.2  # a request that reclaimed waits no longer for its debt to be noted
BULK_MAX = 1000  # wake-ups in one call: a few ms of Redis's only thread

ENQUEUED = Counter("expiry_wakeups_enqueued", "Wake-ups handed to Redis.", ["result"])
CLAIMED = Counter("expiry_wakeups_claimed", "Wake-ups claimed.")
LEASES_EXPIRED = Counter(
    "expiry_leases_expired", "Wake-ups claimed again because their first claim was never settled."
)
UNKNOWN = Counter("expiry_wakeups_unknown", "Foreign or malformed jobs that were moved aside.")
for _result in ("queued", "duplicate", "later", "error"):
    ENQUEUED.labels(_result)

log = structlog.get_logger()


class Enqueued(NamedTuple):
    """How many wake-ups were queued, were there already, wait for the promoter, or got no answer."""

    queued: int = 0
    duplicate: int = 0
    later: int = 0
    error: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What one call claimed: wakes with their job ids, and when it is worth coming again.

    `now_ms` is the database's clock as Redis and the learned difference tell it; `head_ms` the next
    score in the set (None: empty).
    """

    wakes: list[Wake]
    ids: list[bytes]
    now_ms: float
    head_ms: float | None
    permit_wait_s: float
    allowance_per_s: float


class Again(NamedTuple):
    """A wake-up that is to come again at this score."""

    id: bytes
    score_ms: float


class Wakeups:
    """The queue of one kind of wake-up, with the bucket whose permits a claim takes."""

    def __init__(self, redis: ArqRedis, settings: Settings, governor: GovernorSettings) -> None:
        """Use the sorted set `settings.queue`; nothing is sent yet."""
        self.redis = redis
        self.queue = settings.queue
        self.bucket_key = f"{settings.queue}:bucket"
        self.aside = f"{settings.queue}:unknown"
        self._within = timedelta(seconds=settings.enqueue_within_s)
        self._lease_ms = round(settings.lease_s * 1000)
        self._floor = repr(governor.floor_per_s)
        library = bucket_library()
        self._enqueue = redis.register_script(_lua("enqueue"))
        self._claim = redis.register_script(library + _lua("claim"))
        self._settle = redis.register_script(library + _lua("settle"))

    async def enqueue(self, holds: Iterable[Hold]) -> Enqueued:
        """Enqueue wake-ups of committed holds; never raises because of Redis: a wake-up is a hint.

        Deadlines past the horizon are left to the promoter.
        """
        mine = [h for h in holds if h.state == "held"]
        due = [
            (Wake(h.id, h.generation), h.expires_at) for h in mine if h.expires_at - h.read_at <= self._within
        ]
        later = len(mine) - len(due)
        ENQUEUED.labels("later").inc(later)
        try:
            done = await self.enqueue_due(due)
        except REDIS_AWAY as error:
            # Whether the call arrived is unknown; that is as good as lost, and enqueuing is idempotent.
            ENQUEUED.labels("error").inc(len(due))
            log.warning("wakeups.lost", count=len(due), reason=repr(error))
            return Enqueued(later=later, error=len(due))
        return done._replace(later=later)

    async def enqueue_due(self, wakes: Sequence[tuple[Wake, datetime]]) -> Enqueued:
        """Enqueue these at their deadlines, BULK_MAX a call. Raises what redis-py raises."""
        queued = 0
        sent: asyncio.Task[int] | None = None  # while Redis works on one call, the next is made ready
        try:
            for first in range(0, len(wakes), BULK_MAX):
                args: list[Any] = [BODY, BODY_OUTLIVES_MS]
                for wake, expires_at in wakes[first : first + BULK_MAX]:
                    args += (score_ms(expires_at), job_id(wake))
                before, sent = sent, asyncio.create_task(self._call(self._enqueue, [self.queue], args))
                queued += await before if before else 0
            queued += await sent if sent else 0
        finally:
            if sent is not None:
                sent.cancel()  # the one before it failed
                await asyncio.gather(sent, return_exceptions=True)
        duplicate = len(wakes) - queued
        ENQUEUED.labels("queued").inc(queued)
        ENQUEUED.labels("duplicate").inc(duplicate)
        return Enqueued(queued=queued, duplicate=duplicate)

    async def claim(self, want: int, *, skew_ms: float) -> Claim:
        """Claim up to `want` due wake-ups with their permits; they come due again after the lease.

        `skew_ms`: the database's clock minus Redis's. Raises what redis-py raises; what was claimed by
        a call whose answer was lost comes again by itself.
        """
        answer = await self._call(
            self._claim,
            [self.queue, self.bucket_key, self.aside],
            [want, self._lease_ms, f"{skew_ms:.3f}", self._floor],
        )
        now_ms, wait_us, allowance, aside, head, again = answer[:6]
        ids = answer[6:]
        CLAIMED.inc(len(ids))
        LEASES_EXPIRED.inc(again)
        if aside:
            UNKNOWN.inc(aside)
            log.warning("wakeups.set_aside", count=aside, key=self.aside)
        return Claim(
            wakes=[parse(i) for i in ids],
            ids=ids,
            now_ms=float(now_ms),
            head_ms=None if head is None else float(head),
            permit_wait_s=wait_us / 1_000_000,
            allowance_per_s=allowance / 1000,
        )

    async def settle(self, *, done: Sequence[bytes], again: Sequence[Again] = (), refund: int = 0) -> None:
        """End a claim: `done` leave, `again` come back at their score, unused permits go back."""
        args: list[Any] = [self._floor, refund, len(done), *done]
        for id_, score in again:
            args += (f"{score:.0f}", id_)
        await self._call(self._settle, [self.queue, self.bucket_key], args)

    async def _call(self, script: Any, keys: list[str], args: list[Any]) -> Any:  # noqa: ANN401 - redis-py's
        try:
            return await script(keys=keys, args=args)
        except ReadOnlyError:
            # It was the primary when we connected. The name may lead to another by now: connect anew.
            await self.redis.connection_pool.disconnect(inuse_connections=False)
            raise

    async def depth(self) -> int:
        """Answer how many wake-ups are in the set."""
        return int(await self.redis.zcard(self.queue))

    async def oldest_ms(self) -> float | None:
        """Answer the score of the head, None when the set is empty."""
        head = await self.redis.zrange(self.queue, 0, 0, withscores=True)
        return float(head[0][1]) if head else None

    async def due_ms(self, wake: Wake) -> float | None:
        """Answer when this wake-up comes due, ms since 1970; None when the queue does not have it."""
        score = await self.redis.zscore(self.queue, job_id(wake))
        return None if score is None else float(score)


def job_id(wake: Wake) -> str:
    """Name the wake-up; with the generation in it, a renewed hold has another."""
    return f"{JOB_NAME}:{wake.hold_id}:{wake.generation}"


def parse(id_: bytes) -> Wake:
    """Read a job id. Raises ValueError when it is not one of ours."""
    name, hold_id, generation = id_.decode().split(":")
    if name != JOB_NAME:
        raise ValueError(id_)
    return Wake(pgproto.UUID(hold_id), int(generation))  # a uuid.UUID, read eight times as fast


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def score_ms(expires_at: datetime) -> int:
    """Answer the deadline in ms, rounded *up*: a wake-up a fraction of a millisecond early is a no-op."""
    since = expires_at - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1000 - -since.microseconds // 1000


def serialize(job: dict[str, Any]) -> bytes:
    """Serialize an arq job as JSON; TypeError for what JSON cannot say."""
    return json.dumps(job, separators=(",", ":")).encode()


def deserialize(body: bytes) -> dict[str, Any]:
    """Read a job body for any stock arq worker or client; refuses everything but JSON, pickle above all."""
    job: dict[str, Any] = json.loads(body)
    return {"t": None, "f": JOB_NAME, "a": (), "k": {}, "et": 0} | job


def connect_redis(settings: Settings) -> ArqRedis:
    """Answer a client with bounded waits; connects at first use.

    Our own pool, not arq's: that one drops TLS and retry settings on some paths.
    """
    client = Redis.from_url(
        settings.redis_url.get_secret_value(),
        socket_timeout=settings.redis_timeout_s,
        socket_connect_timeout=settings.redis_timeout_s,
        socket_keepalive=True,
        health_check_interval=30,
        # A repeated claim would take permits twice, so nothing is repeated behind our back.
        retry=Retry(NoBackoff(), 0),
    )
    redis = ArqRedis(
        pool_or_conn=client.connection_pool,
        job_serializer=serialize,
        job_deserializer=deserialize,
        default_queue_name=settings.queue,
    )
    redis.auto_close_connection_pool = True
    return redis


@dataclass(slots=True)
class Committed:
    """Collects the holds of a transaction, for their wake-ups after its commit."""

    conn: Conn
    holds: list[Hold]

    def add(self, *holds: Hold) -> None:
        """Note holds that were placed or renewed in this transaction."""
        self.holds.extend(holds)

    @property
    def reclaimed(self) -> int:
        """Overdue holds that placing these ended: debt for the governor."""
        return sum(h.reclaimed for h in self.holds)


@asynccontextmanager
async def transaction(
    conn: Conn, wakeups: Wakeups | None, bucket: Bucket | None = None
) -> AsyncIterator[Committed]:
    """Run a transaction, then enqueue the wake-ups of the holds it was told of.

    Nothing is enqueued when it rolls back. Without `wakeups` the sweep alone ends the holds. It must be the
    outermost one: raises ExpiryError inside another, whose commit it could not wait for.
    """
    if conn.is_in_transaction():
        raise ExpiryError("expiry.transaction must be the outermost transaction of its connection")
    committed = Committed(conn, [])
    async with conn.transaction():
        yield committed
    await after_commit(committed.holds, committed.reclaimed, wakeups, bucket)


async def after_commit(
    holds: Sequence[Hold], reclaimed: int, wakeups: Wakeups | None, bucket: Bucket | None
) -> None:
    """Do what follows a commit: wake-ups, and the debt of what `place` reclaimed. Never raises for Redis."""
    if wakeups is not None and holds:
        await wakeups.enqueue(holds)
    if bucket is not None and reclaimed:
        await charge(bucket, reclaimed)


async def charge(bucket: Bucket, reclaimed: int) -> None:
    """Charge what `place` reclaimed as debt; never raises for a store, nor waits long for it."""
    try:
        async with asyncio.timeout(CHARGE_S_MAX):
            await bucket.charge(reclaimed)
    except (BucketUnavailable, TimeoutError) as error:
        log.warning("debt.lost", permits=reclaimed, reason=repr(error.__cause__ or error))


def _lua(name: str) -> str:
    return files("expiry").joinpath(f"wakeups_{name}.lua").read_text(encoding="utf-8")
