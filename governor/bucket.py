"""One token bucket shared by a fleet, in three forms that agree to the permit.

`RedisBucket` (bucket.lua), `PostgresBucket` (one row) and `LocalBucket` (one process) are the same
integer arithmetic: rates in milli-permits/s, times in µs, tokens and debt in nano-permits, which is
milli-permits/s x µs. A refill is thus a product of integers: nothing is rounded, nothing drifts.

P9: over any window, permits granted less those refunded are at most allowance x window + burst.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol

import asyncpg
from redis.exceptions import RedisError

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.asyncio import Redis

_PERMIT = 1_000_000_000  # nano-permits
_BURST_US = 250_000  # the bucket holds 0.25 s of allowance, or one permit
_DEBT_US = 1_000_000  # debt is at most 1 s of allowance, or one permit
_STEP_BACK_US = 1_000_000  # a clock further back than this has been set, not slewed
_IDLE_US = 3_600_000_000  # more idle time than this counts as this: all is full by then

# Beyond these the products above leave 2^53 (Lua) or 2^63 (SQL).
RATE_PER_S_MIN = 0.001
RATE_PER_S_MAX = 1_000_000.0
_SPAN_S_MAX = 86_400.0
_COUNT_MAX = 1_000_000_000
_EPOCH_MAX = 2**53 - 1


class BucketUnavailable(Exception):  # noqa: N818 - says what is the matter, as StoreUnavailable does
    """The bucket did not answer: start nothing, or fall back to another bucket."""

    def __init__(self) -> None:
        """Carry the docstring as the message; the driver's error is the cause."""
        super().__init__(type(self).__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """`granted` permits, 0..want; the next one is there in `wait_s`, if nobody takes it."""

    granted: int
    wait_s: float
    allowance_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Whether a publication was accepted, the bucket's epoch, and the allowance now in force."""

    accepted: bool
    epoch: int
    allowance_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Whether a cut lowered anything, and the allowance now in force."""

    applied: bool
    allowance_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketState:
    """A bucket at one instant, as stored: integers only (units in the module's docstring)."""

    tokens: int = 0  # never negative; a whole permit is 10^9
    debt: int = 0  # transitions charged and not yet repaid
    micros: int  # last refill, µs on the bucket's clock
    rate: int = 0  # published allowance; counts until `until`, then the floor does
    floor: int  # of whoever called last
    epoch: int = 0  # highest that published; 0 = nobody, or a fixed allowance
    until: int = 0  # µs; the published allowance lapses
    cut_until: int = 0  # µs; the last cut holds, and no other may follow

    @property
    def in_force(self) -> int:
        """The published allowance, or the floor once that has lapsed; milli-permits/s."""
        return self.rate if self.micros < self.until else self.floor

    @property
    def allowance_per_s(self) -> float:
        """The allowance in force, permits/s."""
        return self.in_force / 1000

    @property
    def permits(self) -> int:
        """Whole permits that a `take` would be granted now."""
        return self.tokens // _PERMIT

    @property
    def wait_us(self) -> int:
        """µs until a whole permit is there, 0 if one is; exact as long as nobody else calls.

        Tokens grow by max(t x rate - debt, t x min(rate, floor)) before the lapse, by the floor
        after.
        """
        need = _PERMIT - self.tokens
        if need <= 0:
            return 0
        left = max(0, self.until - self.micros)
        if left and self.rate:
            slow = min(self.rate, self.floor)
            wait = min(_ceil_div(need + self.debt, self.rate), _ceil_div(need, slow))
            if wait <= left:
                return wait
            need -= max(left * self.rate - self.debt, left * slow)
        return left + _ceil_div(need, self.floor)


class Bucket(Protocol):
    """Permits for a fleet.

    Counts are 0..10^9, rates 0..10^6 permits/s, spans 0..86400 s.

    Raises: ValueError beyond these; BucketUnavailable, after which start nothing.
    """

    async def take(self, want: int) -> Grant:
        """Grant min(want, whole permits there); never waits for more."""

    async def refund(self, n: int) -> None:
        """Give back n granted permits that started nothing; what exceeds the burst is lost."""

    async def charge(self, n: int) -> None:
        """Book n transitions that asked for no permit: tokens above the floor's share, then debt.

        Debt is repaid from the allowance above the floor: it slows `take` down to the floor and
        never below, however much is charged. It is kept up to 1 s of allowance; beyond that it is
        load that the database has already carried.
        """

    async def publish(self, *, allowance_per_s: float, ttl_s: float, epoch: int) -> Published:
        """Set the allowance (0 = paused) for ttl_s; after that the floor counts.

        Refused if the bucket has seen a higher epoch. Within the dead time of a cut it may lower,
        not raise: it was decided without knowing of the cut. Epoch 0 is for a fixed allowance,
        which any controller (epochs from 1) overrules.
        """

    async def cut(self, *, factor: float, dead_time_s: float) -> Cut:
        """Multiply the allowance by factor (0..1), not below the floor, once per dead time.

        Anybody may: it only lowers. It lasts until the first publication after dead_time_s.
        """

    async def read(self) -> BucketState:
        """Return the state as it is now, and change nothing."""


# The arithmetic. bucket.lua and _REFILLED repeat it step by step.


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _burst(rate: int) -> int:
    # Paused holds nothing: a resume starts empty, however long the pause was.
    return max(_PERMIT, rate * _BURST_US) if rate else 0


def _clamped(state: BucketState) -> BucketState:
    tokens = min(state.tokens, _burst(state.in_force))
    debt = min(state.debt, max(_PERMIT, state.in_force * _DEBT_US))
    return replace(state, tokens=tokens, debt=debt)


def _flowed(state: BucketState, *, elapsed_us: int, rate: int) -> BucketState:
    if elapsed_us <= 0:
        return state
    elapsed_us = min(elapsed_us, _IDLE_US)
    repaid = min(state.debt, elapsed_us * max(rate - state.floor, 0))
    tokens = min(_burst(rate), state.tokens + elapsed_us * rate - repaid)
    return replace(state, tokens=tokens, debt=state.debt - repaid)


def _refilled(state: BucketState, *, now_us: int, floor: int) -> BucketState:
    """Bring a state to now at the rates that were in force since, whatever changes next."""
    if now_us < state.micros - _STEP_BACK_US:
        # Its clock was set back. Waiting for it to catch up could starve the fleet for hours, so
        # the bucket starts afresh: empty, at the floor, until somebody publishes again.
        return BucketState(micros=now_us, floor=floor, epoch=state.epoch)
    now_us = max(now_us, state.micros)
    split = min(max(state.until, state.micros), now_us)
    state = _flowed(state, elapsed_us=split - state.micros, rate=state.rate)
    state = _flowed(state, elapsed_us=now_us - split, rate=state.floor)
    return _clamped(replace(state, micros=now_us, floor=floor))


# An operation: refilled state and integer arguments in, outcome and state (to be clamped) out.


def _take(state: BucketState, want: int) -> tuple[int, BucketState]:
    granted = min(want, state.permits)
    return granted, replace(state, tokens=state.tokens - granted * _PERMIT)


def _refund(state: BucketState, n: int) -> tuple[int, BucketState]:
    return 0, replace(state, tokens=state.tokens + n * _PERMIT)


def _charge(state: BucketState, n: int) -> tuple[int, BucketState]:
    # The floor's own share of the tokens is spared, or steady charges would starve take.
    spared = _burst(min(state.in_force, state.floor))
    paid = min(n * _PERMIT, max(0, state.tokens - spared))
    return 0, replace(state, tokens=state.tokens - paid, debt=state.debt + n * _PERMIT - paid)


def _publish(state: BucketState, rate: int, ttl_us: int, epoch: int) -> tuple[int, BucketState]:
    if epoch < state.epoch:
        return 0, state
    cap = max(state.rate, state.floor) if state.micros < state.cut_until else rate
    return 1, replace(state, rate=min(rate, cap), until=state.micros + ttl_us, epoch=epoch)


def _cut(state: BucketState, factor_ppm: int, dead_us: int) -> tuple[int, BucketState]:
    target = max(state.floor, state.in_force * factor_ppm // 1_000_000)
    if state.micros < state.cut_until or target >= state.in_force:
        return 0, state
    return 1, replace(state, rate=target, cut_until=state.micros + dead_us)


def _checked(name: str, value: float, *, low: float = 0, high: float) -> float:
    """Return value, or raise: nothing beyond a bigint column or a Lua double gets past here."""
    if not (math.isfinite(value) and low <= value <= high):
        message = f"{name} must be {low}..{high}, not {value}"
        raise ValueError(message)
    return value


def _floor_milli(floor_per_s: float) -> int:
    low, high = RATE_PER_S_MIN, RATE_PER_S_MAX
    return round(_checked("floor_per_s", floor_per_s, low=low, high=high) * 1000)


class _Form:
    """The six operations over one integer call; a form says where the state lives."""

    async def _call(self, operation: str, *args: int) -> tuple[int, BucketState]:
        raise NotImplementedError

    async def take(self, want: int) -> Grant:
        """Grant min(want, whole permits there); never waits for more."""
        wanted = int(_checked("want", want, high=_COUNT_MAX))
        granted, state = await self._call("take", wanted)
        wait_s = state.wait_us / 1_000_000
        return Grant(granted=granted, wait_s=wait_s, allowance_per_s=state.allowance_per_s)

    async def refund(self, n: int) -> None:
        """Give back n granted permits that started nothing."""
        await self._call("refund", int(_checked("n", n, high=_COUNT_MAX)))

    async def charge(self, n: int) -> None:
        """Book n transitions that asked for no permit."""
        await self._call("charge", int(_checked("n", n, high=_COUNT_MAX)))

    async def publish(self, *, allowance_per_s: float, ttl_s: float, epoch: int) -> Published:
        """Set the allowance for ttl_s, unless the bucket has seen a higher epoch."""
        accepted, state = await self._call(
            "publish",
            round(_checked("allowance_per_s", allowance_per_s, high=RATE_PER_S_MAX) * 1000),
            round(_checked("ttl_s", ttl_s, high=_SPAN_S_MAX) * 1_000_000),
            int(_checked("epoch", epoch, high=_EPOCH_MAX)),
        )
        per_s = state.allowance_per_s
        return Published(accepted=bool(accepted), epoch=state.epoch, allowance_per_s=per_s)

    async def cut(self, *, factor: float, dead_time_s: float) -> Cut:
        """Lower the allowance, once per dead time."""
        applied, state = await self._call(
            "cut",
            round(_checked("factor", factor, high=1) * 1_000_000),
            round(_checked("dead_time_s", dead_time_s, high=_SPAN_S_MAX) * 1_000_000),
        )
        return Cut(applied=bool(applied), allowance_per_s=state.allowance_per_s)

    async def read(self) -> BucketState:
        """Return the state as it is now."""
        _, state = await self._call("read")
        return state


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class LocalBucket(_Form):
    """A bucket for one event loop; lost with the process, and so empty at every start."""

    _OPERATIONS: dict[str, Callable[..., tuple[int, BucketState]]] = {  # noqa: RUF012 - constant
        "take": _take,
        "refund": _refund,
        "charge": _charge,
        "publish": _publish,
        "cut": _cut,
    }

    def __init__(self, *, floor_per_s: float, clock_us: Callable[[], int] = _monotonic_us) -> None:
        """Start empty, at the floor; `clock_us` returns µs since anything."""
        self._floor = _floor_milli(floor_per_s)
        self._clock_us = clock_us
        self._state = BucketState(micros=clock_us(), floor=self._floor)

    async def _call(self, operation: str, *args: int) -> tuple[int, BucketState]:
        now = _refilled(self._state, now_us=self._clock_us(), floor=self._floor)
        if operation == "read":
            return 0, now
        outcome, state = self._OPERATIONS[operation](now, *args)
        self._state = _clamped(state)
        return outcome, self._state


def bucket_library() -> str:
    """Return bucket.lua, for the front of a script that takes permits and does its work in one."""
    return files("governor").joinpath("bucket.lua").read_text(encoding="utf-8")


class RedisBucket(_Form):
    """A bucket in one Redis or Valkey hash, on the server's clock; one round trip per operation.

    A lost key starts empty, at the floor, and accepts any epoch.
    """

    # Numbers come back as integer replies: exact to 64 bits, and no string to parse.
    _BODY = """
local args = {}
for i = 2, #ARGV do args[i - 1] = tonumber(ARGV[i]) end
local outcome, _, s = bucket[ARGV[1]](KEYS[1], unpack(args))
return {outcome, s.tokens, s.debt, s.micros, s.rate, s.floor, s.epoch, s.lapse, s.cut_until}
"""

    def __init__(
        self,
        client: Redis,
        key: str,
        *,
        floor_per_s: float,
        timeout_s: float = 1.0,
        clock_us: Callable[[], int] | None = None,
    ) -> None:
        """Use `key` of `client`; `clock_us` replaces the server's clock (tests, simulation)."""
        self._script = client.register_script(bucket_library() + self._BODY)
        self._key = key
        self._floor = _floor_milli(floor_per_s)
        self._timeout_s = timeout_s
        self._clock_us = clock_us

    async def _call(self, operation: str, *args: int) -> tuple[int, BucketState]:
        now_us = () if self._clock_us is None else (self._clock_us(),)
        argv = [operation, *args, self._floor / 1000, *now_us]
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome, *fields = await self._script(keys=[self._key], args=argv)
        except (RedisError, OSError, TimeoutError) as error:
            raise BucketUnavailable from error
        return outcome, _state(fields)


def _state(fields: list[int]) -> BucketState:
    names = ("tokens", "debt", "micros", "rate", "floor", "epoch", "until", "cut_until")
    return BucketState(**dict(zip(names, fields, strict=True)))


GOVERNOR_BUCKET_DDL = """
-- The token bucket as a row, for a fleet without Redis. Every batch of permits rewrites the row: no
-- index but the key and a page kept nearly empty, so that each update is HOT and prunes the last.
CREATE TABLE IF NOT EXISTS governor_bucket (
    name      text   PRIMARY KEY,
    -- nano-permits
    tokens    bigint NOT NULL DEFAULT 0 CHECK (tokens >= 0),
    -- nano-permits charged and not yet repaid
    debt      bigint NOT NULL DEFAULT 0 CHECK (debt >= 0),
    -- last refill, us since 1970; null = never used
    micros    bigint,
    -- published allowance, milli-permits/s; counts until `until`, then the floor does
    rate      bigint NOT NULL DEFAULT 0 CHECK (rate >= 0),
    -- milli-permits/s, of whoever called last
    floor     bigint NOT NULL DEFAULT 0 CHECK (floor >= 0),
    -- highest that published: a lower one is refused
    epoch     bigint NOT NULL DEFAULT 0,
    -- us since 1970: the published allowance lapses
    until     bigint NOT NULL DEFAULT 0,
    -- us since 1970: the last cut holds, and no other may follow
    cut_until bigint NOT NULL DEFAULT 0,
    -- of the last statement, for its own RETURNING
    outcome   bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);
"""


class _Connection(Protocol):
    """The part of an asyncpg pool or connection that a bucket uses."""

    async def fetchrow(self, query: str, *args: object) -> Any: ...  # noqa: ANN401 - a Record


def _burst_sql(rate: str) -> str:
    return f"least({rate}, 1) * greatest(1000000000, {rate} * 250000)"


# $1 name, $2 the caller's floor, $3 now (null = the server's clock, read after the row lock). Every
# step is materialized: inlined into one another they would be computed many times over.
_REFILLED = f"""
    WITH clock AS MATERIALIZED (
        SELECT coalesce($3::bigint,
                        (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now_us
    ), known AS MATERIALIZED (
        SELECT now_us, coalesce(now_us >= b.micros - 1000000, false) AS ok FROM clock
    ), start AS MATERIALIZED (
        SELECT CASE WHEN ok THEN greatest(now_us, b.micros) ELSE now_us END AS micros,
               CASE WHEN ok THEN b.micros ELSE now_us END AS since,
               CASE WHEN ok THEN b.tokens ELSE 0 END AS tokens,
               CASE WHEN ok THEN b.debt ELSE 0 END AS debt,
               CASE WHEN ok THEN b.rate ELSE 0 END AS rate,
               CASE WHEN ok THEN b.floor ELSE $2::bigint END AS floor,
               CASE WHEN ok THEN b.until ELSE 0 END AS until,
               CASE WHEN ok THEN b.cut_until ELSE 0 END AS cut_until
          FROM known
    ), split AS MATERIALIZED (
        SELECT *, least(greatest(until, since), micros) AS split,
               CASE WHEN micros < until THEN rate ELSE $2::bigint END AS in_force
          FROM start
    ), spans AS MATERIALIZED (
        SELECT *, least(split - since, 3600000000) AS published_us,
               least(micros - split, 3600000000) AS lapsed_us
          FROM split
    ), repaid AS MATERIALIZED (
        SELECT *, least(debt, published_us * greatest(rate - floor, 0)) AS repaid FROM spans
    ), published AS MATERIALIZED (
        SELECT *, CASE WHEN published_us > 0
                       THEN least({_burst_sql("rate")}, tokens + published_us * rate - repaid)
                       ELSE tokens END AS tokens_published
          FROM repaid
    ), lapsed AS MATERIALIZED (
        SELECT *, CASE WHEN lapsed_us > 0
                       THEN least({_burst_sql("floor")}, tokens_published + lapsed_us * floor)
                       ELSE tokens_published END AS tokens_lapsed
          FROM published
    ), s AS MATERIALIZED (
        SELECT micros, rate, until, cut_until, in_force, coalesce(b.epoch, 0) AS epoch,
               least(tokens_lapsed, {_burst_sql("in_force")}) AS tokens,
               least(debt - repaid, greatest(1000000000, in_force * 1000000)) AS debt
          FROM lapsed
    )"""


def _update(operation: str) -> str:
    """Return the statement for a select of (tokens, debt, rate, epoch, until, cut_until, outcome).

    ON CONFLICT locks the newest version of the row and computes on that. A plain UPDATE computes
    first and locks then; where it must compute again it reuses what WITH held, and two workers
    spend the same permits. `outcome` is stored because RETURNING sees only what is stored.
    """
    return f"""
INSERT INTO governor_bucket AS b (name) VALUES ($1) ON CONFLICT (name) DO UPDATE
   SET (tokens, debt, rate, epoch, until, cut_until, outcome, micros, floor) = ({_REFILLED},
    changed AS MATERIALIZED (
        SELECT o.*, s.micros,
               CASE WHEN s.micros < o.until THEN o.rate ELSE $2::bigint END AS in_force
          FROM s CROSS JOIN LATERAL ({operation}
               ) AS o (tokens, debt, rate, epoch, until, cut_until, outcome)
    )
    SELECT least(tokens, {_burst_sql("in_force")}),
           least(debt, greatest(1000000000, in_force * 1000000)),
           rate, epoch, until, cut_until, outcome, micros, $2::bigint
      FROM changed)
RETURNING outcome, tokens, debt, micros, rate, floor, epoch, until, cut_until
"""


class PostgresBucket(_Form):
    """A bucket in one row of `governor_bucket` (GOVERNOR_BUCKET_DDL), on the server's clock.

    Every operation is one statement, but the first on a new name is two: one inserts the row.
    Inside a transaction it keeps the fleet waiting for the row until the commit: charge after it.
    """

    TAKE = _update("""
        SELECT s.tokens - granted * 1000000000, s.debt,
               s.rate, s.epoch, s.until, s.cut_until, granted
          FROM (SELECT least($4::bigint, s.tokens / 1000000000) AS granted) AS g""")

    REFUND = _update("""
        SELECT s.tokens + $4::bigint * 1000000000, s.debt,
               s.rate, s.epoch, s.until, s.cut_until, 0""")

    CHARGE = _update(f"""
        SELECT s.tokens - paid, s.debt + $4::bigint * 1000000000 - paid,
               s.rate, s.epoch, s.until, s.cut_until, 0
          FROM (SELECT least(s.in_force, $2) AS kept) AS k
         CROSS JOIN LATERAL (
               SELECT least($4::bigint * 1000000000,
                            greatest(0, s.tokens - {_burst_sql("kept")})) AS paid) AS p
    """)

    PUBLISH = _update("""
        SELECT s.tokens, s.debt, CASE WHEN fenced THEN s.rate ELSE least($4::bigint, cap) END,
               greatest(s.epoch, $6::bigint),
               CASE WHEN fenced THEN s.until ELSE s.micros + $5::bigint END,
               s.cut_until, (NOT fenced)::int
          FROM (SELECT $6::bigint < s.epoch AS fenced,
                       CASE WHEN s.micros < s.cut_until
                            THEN greatest(s.rate, $2) END AS cap) AS p""")

    CUT = _update("""
        SELECT s.tokens, s.debt, CASE WHEN applied THEN target ELSE s.rate END, s.epoch, s.until,
               CASE WHEN applied THEN s.micros + $5::bigint ELSE s.cut_until END, applied::int
          FROM (SELECT greatest($2, s.in_force * $4::bigint / 1000000) AS target) AS t
         CROSS JOIN LATERAL (
               SELECT s.micros >= s.cut_until AND target < s.in_force AS applied) AS a""")

    READ = f"""
SELECT 0, s.tokens, s.debt, s.micros, s.rate, $2::bigint, s.epoch, s.until, s.cut_until
  FROM (VALUES ($1::text)) AS wanted (name) LEFT JOIN governor_bucket AS b USING (name)
 CROSS JOIN LATERAL ({_REFILLED} SELECT * FROM s) AS s
"""

    def __init__(
        self,
        connection: _Connection,
        name: str,
        *,
        floor_per_s: float,
        timeout_s: float = 1.0,
        clock_us: Callable[[], int] | None = None,
    ) -> None:
        """Use row `name` through an asyncpg pool or connection; `clock_us` as for RedisBucket."""
        self._connection = connection
        self._name = name
        self._floor = _floor_milli(floor_per_s)
        self._timeout_s = timeout_s
        self._clock_us = clock_us

    async def _call(self, operation: str, *args: int) -> tuple[int, BucketState]:
        statement = getattr(self, operation.upper())
        now_us = None if self._clock_us is None else self._clock_us()
        values = (self._name, self._floor, now_us, *args)
        try:
            async with asyncio.timeout(self._timeout_s):
                row = await self._connection.fetchrow(statement, *values)
                if row["micros"] is None:  # this inserted the row, and did nothing else
                    row = await self._connection.fetchrow(statement, *values)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            raise BucketUnavailable from error
        outcome, *fields = row
        return outcome, _state(fields)
