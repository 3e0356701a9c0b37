"""One reading an interval: what is due, what went through the bucket, what the probes say, what was ordered."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from governor import orders, telemetry
from governor.flow import Flow
from governor.lease import Connection
from governor.orders import Orders
from governor.reading import Reading

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What the host program knows of its work; None = it does not know."""

    oldest_due_age_s: float | None  # s since the oldest work that is due and not done fell due; 0 = none is
    due_depth: float | None  # due and not done; counting may stop at a bound
    arrivals_per_s: float | None = None  # forecast over the objective: mean
    arrivals_peak_per_s: float | None = None  # and its peak second
    in_flight: float | None = None  # started and not settled, in this process


class Signals(Protocol):
    """Probes of a database or a process, as `governor.probes` has them."""

    @property
    def alerts(self) -> Mapping[str, str]:
        """What is the matter with a probe, by name."""

    @property
    def values(self) -> Mapping[str, float]:
        """Last values as measured, by name."""

    async def start(self) -> None:
        """Open connections. Raises where the role may not see what is to be read."""

    async def read(self) -> Mapping[str, float | None]:
        """Return value / target for each probe; None = a required one is missing."""

    async def close(self) -> None:
        """Close connections; a second call does nothing."""


@dataclass(slots=True)
class Readings:
    """Puts readings together; a source that fails is a missing signal, never an error."""

    connection: Connection
    name: str
    backlog: Callable[[], Awaitable[Backlog]]
    probes: Signals | None
    timeout_s: float
    _orders: Orders = field(default_factory=Orders, init=False)
    _started: bool = field(default=False, init=False)

    async def start(self) -> None:
        """Start the probes; where the role may not read them, errors and timeouts are all there is."""
        if self.probes is None or self._started:
            return
        try:
            await self.probes.start()
        except Exception as error:  # noqa: BLE001 - a probe may be anybody's
            telemetry.FAILURES.labels("probes").inc()
            log.warning("governor runs on errors and timeouts alone: %s", error)
            return
        self._started = True

    async def close(self) -> None:
        """Close the probes."""
        if self.probes is not None and self._started:
            self._started = False
            await self.probes.close()

    async def begin(self) -> None:
        """Read what operators ordered, for one who would lead. Raises what the driver raises: a pause must be known."""
        self._orders = await orders.read(self.connection, self.name)

    async def orders(self) -> Orders:
        """Return what operators ordered; the last known where the database does not say."""
        read = orders.read(self.connection, self.name)
        self._orders = await self._tried("orders", read) or self._orders
        return self._orders

    async def read(self, flow: Flow, *, at_s: float, resumed: bool) -> tuple[Reading, dict[str, Any]]:
        """Return a reading, and notes on it for people."""
        async with asyncio.TaskGroup() as sources:
            backlog_task = sources.create_task(self._tried("backlog", self.backlog()))
            orders_task = sources.create_task(self.orders())
            probes_task = sources.create_task(self._saturation())
        backlog = backlog_task.result() or Backlog(oldest_due_age_s=None, due_depth=None)
        ordered, attempts = orders_task.result(), flow.attempts
        reading = Reading(
            at_s=at_s,
            interval_s=flow.interval_s,
            oldest_due_age_s=_finite(backlog.oldest_due_age_s),
            due_depth=_finite(backlog.due_depth),
            started=flow.started,
            saturation={name: _finite(value) for name, value in probes_task.result().items()},
            allowance_per_s=flow.allowance_per_s,
            blocked_ratio=flow.blocked_ratio,
            completed=None if attempts is None else attempts.completed,
            failed=None if attempts is None else attempts.failed,
            timed_out=None if attempts is None else attempts.timed_out,
            arrivals_per_s=_finite(backlog.arrivals_per_s),
            arrivals_peak_per_s=_finite(backlog.arrivals_peak_per_s),
            in_flight=_finite(backlog.in_flight),
            ceiling_per_s=ordered.ceiling_per_s,
            paused=ordered.paused,
            resumed=resumed,
        )
        return reading, self._notes()

    @property
    def in_force(self) -> Orders:
        """What operators ordered, as of the last reading."""
        return self._orders

    async def _saturation(self) -> Mapping[str, float | None]:
        if self.probes is None or not self._started:
            return {}
        saturation = await self._tried("probes", self.probes.read())
        return {"probes": None} if saturation is None else saturation

    async def _tried(self, step: str, source: Awaitable[T]) -> T | None:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await source
        except Exception as error:  # noqa: BLE001 - whatever it is, the signal is missing
            telemetry.FAILURES.labels(step).inc()
            log.warning("governor cannot read %s: %r", step, error)
            return None

    def _notes(self) -> dict[str, Any]:
        if self.probes is None or not self._started:
            return {}
        values = {name: _finite(value) for name, value in self.probes.values.items()}
        return {"values": values, "alerts": dict(self.probes.alerts)}


def _finite(value: float | None) -> float | None:
    """Keep out what JSON cannot say; the law takes it for missing anyway."""
    return value if value is not None and math.isfinite(value) else None
