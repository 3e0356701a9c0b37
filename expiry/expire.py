"""The one transition that ends holds by time, whoever calls it: worker or sweep.

Given (hold, generation) pairs it runs one statement and answers an outcome per pair. The row decides: a
wake-up that is early, late, stale or doubled is a counted no-op.
"""

from collections import Counter as Tally
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple
from uuid import UUID

import asyncpg
from prometheus_client import Counter, Histogram

from expiry.deadletters import Failure, lies_in_row, record_failure
from expiry.holds import ENDED, Conn
from expiry.settings import Settings
from expiry.telemetry import BatchHistogram

OUTCOMES = ("expired", "early", "stale", "ended", "contended", "missing", "failed", "dead")
NOT_STARTED = frozenset({"early", "stale", "ended", "missing"})  # these give their permit back
ATTEMPTS = Counter("expiry_attempts", "Holds that a statement tried to expire.", ["outcome", "by"])
LAG = BatchHistogram(
    "expiry_lag_seconds",
    "End of an expired hold minus its deadline, on the database's clock.",
    by=("worker", "sweep"),
    buckets=(0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600),
)
BATCH_SECONDS = Histogram(
    "expiry_batch_seconds",
    "Duration of one expiring statement.",
    ["by"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
)
for _by in ("worker", "sweep"):
    BATCH_SECONDS.labels(_by)
    for _outcome in OUTCOMES:
        ATTEMPTS.labels(_outcome, _by)


class Wake(NamedTuple):
    """What a wake-up says: expire this hold if it still has this generation."""

    hold_id: UUID
    generation: int


class Outcome(NamedTuple):
    """What became of one wake.

    `ms`: lag of an expired hold, what is left of an early one, wait before the next attempt of a failed
    one; `at_ms`: the database's clock, ms since 1970.
    """

    kind: str
    ms: float
    at_ms: float


EXPIRE = "SELECT outcomes, ms, at_ms FROM expiry_expire($1, $2, $3)"


async def expire(conn: Conn, wakes: Sequence[Wake], *, by: str) -> list[Outcome]:
    """Expire those of the holds that are due and still have that generation: one statement, in order.

    Raises what asyncpg raises; then none of them changed.
    """
    row = await conn.fetchrow(EXPIRE, [w.hold_id for w in wakes], [w.generation for w in wakes], by)
    assert row is not None  # noqa: S101 - a function with OUT parameters answers one row
    return list(map(Outcome, row["outcomes"] or (), row["ms"] or (), repeat(row["at_ms"])))


async def expire_batch(conn: Conn, wakes: Sequence[Wake], *, by: str, settings: Settings) -> list[Outcome]:
    """Expire a batch; a row that fails by its own fault cannot keep the others from ending.

    Such a row is found by bisection, backed off, and dead-lettered after `attempts_max`. An outage is
    raised as it is and counts against nobody.
    """
    with BATCH_SECONDS.labels(by).time():
        outcomes = await _bisect(conn, wakes, by, settings)
    tally = Tally(o.kind for o in outcomes)
    for kind, count in tally.items():
        ATTEMPTS.labels(kind, by).inc(count)
    LAG.observe(by, [o.ms / 1000 for o in outcomes if o.kind == "expired"])
    ENDED.labels("expired").inc(tally["expired"])
    return outcomes


async def _bisect(conn: Conn, wakes: Sequence[Wake], by: str, settings: Settings) -> list[Outcome]:
    try:
        return await expire(conn, wakes, by=by)
    except asyncpg.QueryCanceledError:
        if len(wakes) == 1:
            raise
        return await _around_what_hangs(conn, wakes, by, settings)
    except asyncpg.PostgresError as error:
        if not lies_in_row(error):
            raise
        if len(wakes) == 1:
            failure = await record_failure(conn, *wakes[0], error=error, settings=settings)
            return [_failed(failure)]
    half = len(wakes) // 2
    first = await _bisect(conn, wakes[:half], by, settings)
    return first + await _bisect(conn, wakes[half:], by, settings)


async def _around_what_hangs(conn: Conn, wakes: Sequence[Wake], by: str, settings: Settings) -> list[Outcome]:
    """After a timeout try the halves; where both time out it is the database that hangs, not a row."""
    outcomes: list[Outcome] = []
    late: asyncpg.QueryCanceledError | None = None
    half = len(wakes) // 2
    for part in (wakes[:half], wakes[half:]):
        try:
            outcomes += await _bisect(conn, part, by, settings)
        except asyncpg.QueryCanceledError as error:
            if late is not None:
                raise
            late = error
            outcomes += [Outcome("contended", 0.0, 0.0)] * len(part)
    at_ms = max(o.at_ms for o in outcomes)
    return [o if o.at_ms else o._replace(at_ms=at_ms) for o in outcomes]


def _failed(failure: Failure) -> Outcome:
    return Outcome("dead" if failure.dead else "failed", failure.wait_s * 1000, failure.at_ms)
