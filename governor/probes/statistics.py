"""What PostgreSQL says of itself: one statement per interval, and the probes that read its row.

Lag and locks, connections and activity are those of the whole server, of all its databases.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from governor.probes.link import Conn, Link
from governor.probes.sample import GrantMissingError, ProbeMissingError, ProbeOverloadedError, Sample

APPLICATION_NAME = "governor-probes"

# $1: patterns of the application names that are ours. An advisory lock is waited for at leisure, by whoever
# wants to lead next, and a virtual transaction by CREATE INDEX CONCURRENTLY: neither says that anything is
# slow. pg_locks is costly (it stops every lock for a moment), so it is read only while somebody waits.
READ = """
WITH activity AS MATERIALIZED (
    SELECT pid, application_name,
           state IN ('active', 'fastpath function call') AND pid <> pg_backend_pid() AS active,
           greatest(extract(epoch FROM clock_timestamp() - state_change), 0)::float8 AS state_s,
           coalesce(wait_event_type = 'Lock' AND wait_event NOT IN ('advisory', 'virtualxid'), false) AS waits
      FROM pg_stat_activity WHERE backend_type = 'client backend'
), backends AS MATERIALIZED (
    SELECT count(*) AS connections,
           count(*) FILTER (WHERE waits) AS lock_waiters,
           count(*) FILTER (WHERE active AND application_name LIKE ANY ($1::text[])) AS own_active,
           count(*) FILTER (WHERE active AND NOT application_name LIKE ANY ($1::text[])) AS foreign_active,
           coalesce(sum(state_s) FILTER (WHERE active), 0) AS running_s,
           coalesce(array_agg(state_s) FILTER (WHERE active), '{}') AS active_s
      FROM activity
)
SELECT extract(epoch FROM clock_timestamp())::float8 AS at_s,
       (SELECT sum(active_time) / 1000 FROM pg_stat_database) AS ended_s,
       b.*,
       (SELECT coalesce(max(extract(epoch FROM clock_timestamp() - waitstart)), 0)::float8
          FROM pg_locks
         WHERE (SELECT lock_waiters FROM backends) > 0
           AND NOT granted AND locktype NOT IN ('advisory', 'virtualxid')
           AND pid IN (SELECT pid FROM activity)) AS lock_wait_s,
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
           - coalesce(current_setting('reserved_connections', true)::int, 0) AS connections_most,
       (SELECT coalesce(max(extract(epoch FROM replay_lag)), 0)::float8
          FROM pg_stat_replication WHERE state = 'streaming') AS replication_lag_s
  FROM backends AS b
"""

CHECK = """
SELECT pg_has_role('pg_read_all_stats', 'USAGE') AS granted, current_user AS role,
       format('GRANT pg_read_all_stats TO %I', current_user) AS remedy,
       current_setting('track_activities')::bool AS tracked
"""

# Probes asked at once share one row. Far below an interval, and above the time it takes to ask them all.
_SHARED_S = 0.05


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the last statement gave: a row with the time it was asked for, or the error."""

    at_s: float  # when it came
    sampled_at_s: float = 0.0
    row: dict[str, Any] | None = None
    error: ProbeOverloadedError | ProbeMissingError | None = None


class Statistics:
    """The statistics views of one server over one connection, read-only."""

    def __init__(
        self,
        database_url: str,
        *,
        timeout_s: float,
        own_applications: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """own_applications are LIKE patterns; the probes' own connections are always ours."""
        self._link = Link(
            database_url,
            application_name=APPLICATION_NAME,
            timeout_s=timeout_s,
            settings={"default_transaction_read_only": "on"},
            on_open=_check_grant,
            clock=clock,
        )
        self._own = [*own_applications, "governor-%"]
        self._clock = clock
        self._turn = asyncio.Lock()
        self._answer: _Answer | None = None

    async def start(self) -> None:
        """Connect, and take the row that the first change is counted from.

        Raises: GrantMissingError. Other failures are for the first reading to tell.
        """
        answer = await self._ask()
        if isinstance(answer.error, GrantMissingError):
            raise answer.error
        self._answer = replace(answer, at_s=float("-inf"))  # to count from, not to read

    async def close(self) -> None:
        """Disconnect."""
        await self._link.close()

    async def sample(self, value: Callable[[dict[str, Any]], float]) -> Sample:
        """Return a value of the row that all probes of this interval share."""
        async with self._turn:
            answer = self._answer
            if answer is None or self._clock() - answer.at_s > _SHARED_S:
                answer = await self._ask()
        if answer.row is None:
            raise answer.error or ProbeMissingError("no row")
        return Sample(value=value(answer.row), sampled_at_s=answer.sampled_at_s)

    async def _ask(self) -> _Answer:
        asked_at_s, last = self._clock(), self._answer
        try:
            row = await self._link.fetchrow(READ, self._own)
        except (ProbeOverloadedError, ProbeMissingError) as error:
            # Shared as well: one timeout an interval, not one for each probe.
            self._answer = _Answer(self._clock(), error=error)
        else:
            values = dict(row or {})
            values["mean_active"] = _mean_active(last.row if last else None, values)
            self._answer = _Answer(self._clock(), asked_at_s, values)
        return self._answer


def _mean_active(before: dict[str, Any] | None, now: dict[str, Any]) -> float | None:
    """Return the mean number of active backends between two rows; None if there is no first one.

    active_time has a statement only once the next one of its session has ended (and touched a table), so what
    still runs is added: change of (ended + running) / time. A session that idles after a long statement hides
    that one, and shows it all at once later: outliers, which the median drops. The mean is never less than the
    backends that were active all the time.
    """
    elapsed_s = now["at_s"] - before["at_s"] if before else 0.0
    if before is None or elapsed_s <= 0:  # its clock was set back
        return None
    change_s = now["ended_s"] + now["running_s"] - before["ended_s"] - before["running_s"]
    throughout = sum(each >= elapsed_s for each in now["active_s"])
    return float(max(change_s / elapsed_s, throughout))


async def _check_grant(conn: Conn) -> None:
    found = await conn.fetchrow(CHECK)
    if found is None or not found["granted"]:
        role, remedy = (found["role"], found["remedy"]) if found else ("?", "?")
        raise GrantMissingError(
            f"the role {role} may not see what others do, whose activity would read as none: "
            f"as a superuser, {remedy};"
        )
    if not found["tracked"]:
        raise GrantMissingError("track_activities is off: every backend would read as idle; set it to on")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticProbe:
    """A probe of one value of the shared row; made by the functions below."""

    name: str
    target: float
    low: float = 0.0
    high: float
    ttl_s: float
    required: bool = True
    source: Statistics
    value: Callable[[dict[str, Any]], float]

    async def sample(self) -> Sample:
        """Return the value of this interval's row; raises as Link.fetchrow does."""
        return await self.source.sample(self.value)


def _column(name: str) -> Callable[[dict[str, Any]], float]:
    return lambda row: float(row[name])


def _mean(row: dict[str, Any]) -> float:
    if row["mean_active"] is None:
        raise ProbeMissingError("a mean needs a second row")
    return float(row["mean_active"])


# Mean backends at work or waiting within a statement, over the interval. Target: the server's cores.
active_backends = partial(StatisticProbe, name="active_backends", high=1e5, value=_mean)

# Backends that wait for a lock, now.
lock_waiters = partial(StatisticProbe, name="lock_waiters", high=1e5, value=_column("lock_waiters"))

# How long the one that waits longest has waited for its lock, s.
lock_wait = partial(StatisticProbe, name="lock_wait", high=1e7, value=_column("lock_wait_s"))

# Backends at work, now, that are not ours by application_name: one look, so noisy.
foreign_active = partial(StatisticProbe, name="foreign_active", high=1e5, value=_column("foreign_active"))

# Share of ours in the backends at work, now: 1 = nobody else works. 0 if nobody does.
own_share = partial(
    StatisticProbe,
    name="own_share",
    high=1.0,
    value=lambda row: row["own_active"] / max(1, row["own_active"] + row["foreign_active"]),
)

# Client connections / those that an ordinary role may have. Superusers may go above 1.
connections = partial(
    StatisticProbe,
    name="connections",
    high=10.0,
    value=lambda row: row["connections"] / max(1, row["connections_most"]),
)

# Replay lag of the replica that is furthest behind, s; 0 without replicas and with those that only catch up.
replication_lag = partial(
    StatisticProbe, name="replication_lag", high=1e7, value=_column("replication_lag_s")
)
