"""A commit of fixed size, several times a second: how long the server takes to make one durable."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from governor.probes.link import Conn, Link
from governor.probes.sample import ProbeMissingError, ProbeOverloadedError, Sample

APPLICATION_NAME = "governor-canary"

# A transactional message in the log of changes, and nothing else: the commit writes, flushes and (where
# commits wait for a standby) replicates it as it would a row's. A row of a logged table would measure the
# same and more: its index, its page image after a checkpoint, its dead versions under an old snapshot. An
# unlogged table would measure nothing, as its commit need not flush. Logical replication may filter the
# messages out by their prefix; pgoutput sends none unless asked to.
COMMIT = "SELECT pg_logical_emit_message(true, 'governor.canary', repeat('x', 256))"

# Where commits do not wait for the disk (off) the canary's still must; stricter settings stay.
WAIT_FOR_FLUSH = """
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""

_KEPT = 10_000  # latencies between two samples, at most


class Canary:
    """A task that commits per_s times a second on a connection of its own, one at a time."""

    def __init__(
        self,
        database_url: str,
        *,
        per_s: float = 8.0,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take per_s 5..10: fewer say little about an interval, more are load.

        A commit that takes timeout_s is cancelled; until then its age is the reading, so there is no hurry.
        """
        self._link = Link(
            database_url,
            application_name=APPLICATION_NAME,
            timeout_s=timeout_s,
            on_open=_wait_for_flush,
            clock=clock,
        )
        self._period_s = 1 / per_s
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._latencies_s: deque[float] = deque(maxlen=_KEPT)
        self._ended_at_s = float("-inf")
        self._began_at_s: float | None = None  # of the commit in flight
        self._trouble: ProbeOverloadedError | ProbeMissingError | None = None

    async def start(self) -> None:
        """Begin to commit."""
        self._task = asyncio.create_task(self._run(), name=APPLICATION_NAME)

    async def close(self) -> None:
        """Stop, and disconnect."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._link.close()

    def sample(self) -> Sample:
        """Return the mean latency of a commit since the last sample, s, the one in flight included."""
        if self._task is None or self._task.done():
            raise ProbeMissingError("the canary does not run")
        now_s = self._clock()
        seen_s, sampled_at_s = list(self._latencies_s), self._ended_at_s
        waited_s = now_s - self._began_at_s if self._began_at_s is not None else 0.0
        if waited_s > self._period_s:
            seen_s += _waits(waited_s, self._period_s)
            sampled_at_s = now_s
        self._latencies_s.clear()
        if not seen_s:
            raise self._trouble or ProbeMissingError("no commit since the last sample")
        return Sample(value=sum(seen_s) / len(seen_s), sampled_at_s=sampled_at_s)

    async def _run(self) -> None:
        due_s = self._clock()
        while True:
            await self._commit()
            missed = math.floor((self._clock() - due_s) / self._period_s)
            due_s += (missed + 1) * self._period_s
            await asyncio.sleep(due_s - self._clock())

    async def _commit(self) -> None:
        self._began_at_s = self._clock()  # a connect that hangs is a wait as well ...
        try:
            await self._link.open()
            self._began_at_s = self._clock()  # ... but one that succeeds is no commit
            await self._link.fetchrow(COMMIT)
        except (ProbeOverloadedError, ProbeMissingError) as error:
            self._trouble = error
        except Exception as error:  # noqa: BLE001 - a canary that died would hold the fleet at its floor for good
            self._trouble = ProbeMissingError(f"the canary failed: {error!r}")
            await self._link.close()
        else:
            self._trouble, self._ended_at_s = None, self._clock()
            self._latencies_s.extend(_waits(self._ended_at_s - self._began_at_s, self._period_s))
        finally:
            self._began_at_s = None


def _waits(latency_s: float, period_s: float) -> Iterator[float]:
    """Give the latency, and those of the commits that would have begun meanwhile.

    Without them one stall of a second would count as one slow commit among many fast ones, when in truth
    nobody could commit for all that time ("coordinated omission").
    """
    while latency_s > 0:
        yield latency_s
        latency_s -= period_s


async def _wait_for_flush(conn: Conn) -> None:
    await conn.fetchrow(WAIT_FOR_FLUSH)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLatency:
    """Mean latency of the canary's commits over the interval, s."""

    name: str = "commit_latency"
    target: float
    low: float = 0.0
    high: float = 3600.0
    ttl_s: float
    required: bool = True
    source: Canary

    async def sample(self) -> Sample:
        """Ask the canary; never waits."""
        return self.source.sample()
