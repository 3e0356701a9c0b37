"""What tests of the controller share: fleets of controllers on real servers, with intervals of a tenth of a second."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import asyncpg
from redis.asyncio import Redis

from governor import (
    Backlog,
    Bucket,
    BucketUnavailable,
    Controller,
    Decision,
    GovernorSettings,
    PostgresBucket,
    RedisBucket,
)
from governor.journal import Entry, tail

Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

FLEET = "fleet"
KEY = "governed"
INTERVAL_S = 0.1
SETTINGS = GovernorSettings(floor_per_s=5, ceiling_per_s=1000, start_per_s=100, interval_s=INTERVAL_S)


@dataclass
class Work:
    """What the host program says of its work."""

    due: float = 1000
    age_s: float = 10
    asked: int = 0

    async def __call__(self) -> Backlog:
        """Answer as a host does."""
        self.asked += 1
        return Backlog(oldest_due_age_s=self.age_s if self.due else 0, due_depth=self.due)


@dataclass
class Probes:
    """Probes that say what they are told to."""

    says: dict[str, float | None] = field(default_factory=dict)
    running: bool = False
    error: Exception | None = None
    alerts: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)

    async def start(self) -> None:
        """Start, or raise what a missing grant raises."""
        if self.error is not None:
            raise self.error
        self.running = True

    async def read(self) -> Mapping[str, float | None]:
        """Answer saturations."""
        return dict(self.says)

    async def close(self) -> None:
        """Stop."""
        self.running = False


@dataclass
class Fleet:
    """Controllers and workers of one fleet."""

    pool: Pool
    redis: Redis | None
    work: Work = field(default_factory=Work)

    def row(self, floor_per_s: float = SETTINGS.floor_per_s) -> Bucket:
        """Return the bucket in PostgreSQL."""
        return PostgresBucket(self.pool, KEY, floor_per_s=floor_per_s)

    def primary(self) -> Bucket:
        """Return the bucket in Redis."""
        assert self.redis is not None
        return RedisBucket(self.redis, KEY, floor_per_s=SETTINGS.floor_per_s, timeout_s=0.5)

    def controller(self, holder: str, **changes: Any) -> Controller:  # noqa: ANN401 - its keywords
        """Return one more candidate."""
        given: dict[str, Any] = {
            "name": FLEET,
            "holder": holder,
            "primary": None if self.redis is None else self.primary(),
            "row": self.row(),
            "backlog": self.work,
            "settings": SETTINGS,
        }
        return Controller(self.pool, **given | changes)

    async def journal(self, limit: int = 100) -> list[Entry]:
        """Return the last decisions, newest first."""
        return await tail(self.pool, FLEET, limit=limit)


@asynccontextmanager
async def running(*controllers: Controller) -> AsyncIterator[None]:
    """Run controllers, and stop them in good order."""
    stop = asyncio.Event()
    tasks = [asyncio.create_task(each.run(stop)) for each in controllers]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def decided(controller: Controller, *, within: int = 50) -> Decision:
    """Tick until a decision is made."""
    for _ in range(within):
        decision = await controller.tick()
        if decision is not None:
            return decision
        await asyncio.sleep(INTERVAL_S / 10)
    raise AssertionError("no decision")


async def led_by(controllers: list[Controller]) -> list[str]:
    """Name those that think they lead."""
    return [each.holder for each in controllers if each.leads]


def until(check: Callable[[], bool]) -> Callable[[], Any]:
    """Make of a check one that `eventually` can await."""

    async def checked() -> bool:
        return check()

    return checked


class Broken:
    """A candidate law that raises."""

    def __init__(self, _settings: object) -> None:
        """Take any settings."""

    def step(self, _reading: object) -> Decision:
        """Raise."""
        raise ArithmeticError


class Endless(Broken):
    """A candidate law that decides what no JSON can say."""

    def step(self, _reading: object) -> Decision:
        """Decide."""
        return Decision(
            allowance_per_s=100.0,
            limited_by="demand",
            reason="",
            needs_per_s=0.0,
            safe_per_s=100.0,
            drain_s=math.inf,
            stuck=False,
        )


@dataclass
class Takers:
    """Workers that take whatever permits there are, from the first bucket that answers, and note when."""

    primary: Bucket | None
    row: Bucket
    grants: list[tuple[float, float, int]] = field(default_factory=list)  # asked, answered, how many

    async def run(self, stop: asyncio.Event) -> None:
        """Take until told to stop."""
        while not stop.is_set():
            for bucket in (each for each in (self.primary, self.row) if each is not None):
                asked_s = time.monotonic()
                with contextlib.suppress(BucketUnavailable):
                    granted = (await bucket.take(10_000)).granted
                    if granted:
                        self.grants.append((asked_s, time.monotonic(), granted))
            await asyncio.sleep(0.002)

    def worst(self, *, rate_per_s: float, burst: float) -> float:
        """Return by how many permits the worst window of all is over rate x window + burst; below 0 = under."""
        over, begun = -burst, -math.inf  # of the window that ends here and is the worst so far
        previous_s = None
        for asked_s, answered_s, granted in self.grants:
            # Kadane's sum: permits less what the time since the last grant allows. From the moment the
            # first was asked for to the one the last was answered, so that no window is cut short.
            if previous_s is not None:
                begun -= rate_per_s * (answered_s - previous_s)
            begun = max(begun + granted, granted - rate_per_s * (answered_s - asked_s))
            previous_s = answered_s
            over = max(over, begun - burst)
        return over


@asynccontextmanager
async def taking(fleet: Fleet) -> AsyncIterator[Takers]:
    """Run workers that are never satisfied, and check P9 over every window in the end."""
    takers = Takers(None if fleet.redis is None else fleet.primary(), fleet.row())
    stop = asyncio.Event()
    task = asyncio.create_task(takers.run(stop))
    try:
        yield takers
    finally:
        stop.set()
        await task
    ceiling, floor = SETTINGS.ceiling_per_s, SETTINGS.floor_per_s
    burst = 0.25 * (ceiling + floor)  # both buckets are full at most
    assert takers.worst(rate_per_s=ceiling + floor, burst=burst) <= 0
    assert sum(granted for _, _, granted in takers.grants) > 0
