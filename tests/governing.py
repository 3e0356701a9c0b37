"""What tests of the controller share: fleets of controllers on real servers, with intervals of a tenth of a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import asyncpg
from redis.asyncio import Redis

from governor import Backlog, Bucket, Controller, Decision, GovernorSettings, PostgresBucket, RedisBucket
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
