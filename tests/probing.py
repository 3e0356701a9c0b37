"""What tests of probes share: a probe that says what it is told to, and a loop that reads as the leader does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from governor.probes import Probes, Sample


@dataclass
class FakeProbe:
    """Gives `value` as sampled `age_s` ago, or raises `error`."""

    clock: Callable[[], float]
    name: str = "fake"
    target: float = 1.0
    low: float = 0.0
    high: float = 1000.0
    ttl_s: float = 4.0
    required: bool = True
    value: float = 0.0
    age_s: float = 0.0
    error: BaseException | None = None
    hangs: bool = False

    async def sample(self) -> Sample:
        """Do as told."""
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return Sample(value=self.value, sampled_at_s=self.clock() - self.age_s)


async def paced(probes: Probes, *, within_s: float = 20) -> AsyncIterator[Mapping[str, float | None]]:
    """Read once per interval, as the leader does, until the test breaks off; fail after within_s."""
    for _ in range(round(within_s / probes.interval_s)):
        await asyncio.sleep(probes.interval_s)
        yield await probes.read()
    raise AssertionError(f"still {probes.values} {probes.alerts} after {within_s} s")
