"""The rows that are about the fleet and bad data, not about the database: the real bucket on a virtual clock.

Each drill runs one seed of a scenario and returns its figures.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from governor.bucket import LocalBucket
from governor.law import Law, LawSettings
from governor.reading import Reading
from governor.simulate.scenarios import Scenario

Figures = dict[str, float]
T = TypeVar("T")

_SECOND_US = 1_000_000
_BATCH_S = 0.2  # a worker takes at most so much of the allowance at once
_TTL_S = 6.0  # of a published allowance: three intervals


class _Clock:
    """The bucket's clock, µs of virtual time; `off_us` is what a worker's own clock would add."""

    def __init__(self) -> None:
        self.us = 0
        self.off_us = 0

    def __call__(self) -> int:
        return self.us + self.off_us


def _now(call: Coroutine[Any, Any, T]) -> T:
    """Return what a call of a LocalBucket returns: it never waits for anything."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("a local bucket waited")


class _Fleet:
    """Workers with batches of their own that poll one bucket, in the order of their clocks."""

    def __init__(self, bucket: LocalBucket, clock: _Clock, seed: str) -> None:
        self.bucket, self.clock = bucket, clock
        self.random = random.Random(seed)
        self.granted: dict[int, int] = {}
        self._polls: list[tuple[int, int]] = []

    def hire(self, worker: int) -> None:
        """Let a worker poll from some moment of the next half second on."""
        self.granted[worker] = 0
        heapq.heappush(self._polls, (self.clock.us + self.random.randrange(_SECOND_US // 2), worker))

    def until(self, us: int, *, batch: int, off_us: dict[int, int] | None = None) -> Iterator[int]:
        """Let time pass; yield what was granted, poll by poll."""
        while self._polls[0][0] < us:
            at_us, worker = heapq.heappop(self._polls)
            self.clock.us, self.clock.off_us = max(at_us, self.clock.us), (off_us or {}).get(worker, 0)
            grant = _now(self.bucket.take(batch))
            self.granted[worker] += grant.granted
            # A statement takes 20 to 50 ms; who got nothing looks again no sooner, and at least twice a second.
            busy_s = self.random.uniform(0.02, 0.05)
            wait_s = busy_s if grant.granted else min(max(grant.wait_s, busy_s), 0.5)
            heapq.heappush(self._polls, (self.clock.us + round(wait_s * _SECOND_US), worker))
            yield grant.granted
        self.clock.us, self.clock.off_us = max(us, self.clock.us), 0


class _Leader:
    """A controller: a law, an epoch, and the last decision that it may still publish late."""

    def __init__(self, law: Law, epoch: int) -> None:
        self.law, self.epoch = law, epoch
        self.resumed = epoch > 1
        self.decided_per_s = 0.0

    def decide(self, at_s: float, started: float, settings: LawSettings) -> None:
        """Decide on a database that is always healthy: nothing but the ceiling holds the rate."""
        reading = _healthy(settings, at_s=at_s, started=started, resumed=self.resumed)
        self.resumed = False
        self.decided_per_s = self.law.step(reading).allowance_per_s

    def publish(self, bucket: LocalBucket) -> None:
        """Publish whatever was decided, however long ago."""
        _now(bucket.publish(allowance_per_s=self.decided_per_s, ttl_s=_TTL_S, epoch=self.epoch))


def _healthy(settings: LawSettings, *, at_s: float, started: float, resumed: bool = False) -> Reading:
    return Reading(
        at_s=at_s,
        interval_s=settings.interval_s,
        oldest_due_age_s=60.0,
        due_depth=1e6,
        started=started,
        completed=started,
        blocked_ratio=1.0,
        saturation={"active_backends": 0.4},
        resumed=resumed,
    )


def leaders(scenario: Scenario, seed: int) -> Figures:
    """Kill leaders, run two at once, pause one, empty the bucket: count permits beyond the promise (P9)."""
    settings, clock = scenario.settings, _Clock()
    bucket = LocalBucket(floor_per_s=settings.floor_per_s, clock_us=clock)
    fleet = _Fleet(bucket, clock, f"leaders {seed}")
    for worker in range(scenario.fleet.workers):
        fleet.hire(worker)
    running, epoch = [_Leader(Law(settings), 1)], 1
    promised_per_s = settings.ceiling_per_s + settings.floor_per_s
    level = lowest = highest = 0.0  # permits granted beyond the promise since the start
    last_us = 0
    for interval in range(round(scenario.duration_s / settings.interval_s)):
        started = 0
        for granted in fleet.until(round((interval + 1) * settings.interval_s * _SECOND_US), batch=500):
            level -= promised_per_s * (clock.us - last_us) / _SECOND_US
            lowest, last_us = min(lowest, level), clock.us
            level += granted
            highest, started = max(highest, level - lowest), started + granted
        drawn = fleet.random.random()
        if drawn < 0.1:  # killed; the next one restores what was journalled
            snapshot = json.loads(json.dumps(running[-1].law.snapshot()))
            epoch += 1
            running = [_Leader(Law.restore(settings, snapshot), epoch)]
        elif drawn < 0.2:  # partitioned: goes on beside the next one
            epoch += 1
            running = [running[-1], _Leader(Law(settings), epoch)]
        elif drawn < 0.25:  # the bucket's server is emptied
            bucket = LocalBucket(floor_per_s=settings.floor_per_s, clock_us=clock)
            fleet.bucket = bucket
        for leader in running:
            if fleet.random.random() > 0.15:  # else it is paused, and publishes its old decision
                leader.decide(clock.us / _SECOND_US, started, settings)
            leader.publish(bucket)
    burst = max(1.0, settings.ceiling_per_s * 0.25)
    return {"excess_permits": max(0.0, highest - burst)}


def fairness(scenario: Scenario, seed: int) -> Figures:
    """One hot worker of many; all hungry; two tenants, one with poison."""
    used, _ = _share(scenario, seed, hungry=1)
    _, grants = _share(scenario, seed, hungry=scenario.fleet.workers)
    jain = sum(grants) ** 2 / (len(grants) * sum(each * each for each in grants))
    together = _victim_per_s(scenario, seed, poison_ratio=0.2)
    return {
        "used_ratio": used,
        "jain_index": jain,
        "victim_ratio": together / _victim_per_s(scenario, seed, poison_ratio=0.0),
    }


def _share(scenario: Scenario, seed: int, *, hungry: int) -> tuple[float, list[int]]:
    """Return the share of an allowance of 900/s that was used, and each hungry worker's part."""
    clock, rate_per_s = _Clock(), 900.0
    bucket = LocalBucket(floor_per_s=scenario.settings.floor_per_s, clock_us=clock)
    _now(bucket.publish(allowance_per_s=rate_per_s, ttl_s=scenario.duration_s + 1, epoch=1))
    fleet = _Fleet(bucket, clock, f"fairness {seed}")
    for worker in range(hungry):
        fleet.hire(worker)
    batch = round(rate_per_s * _BATCH_S)
    total = sum(fleet.until(round(scenario.duration_s * _SECOND_US), batch=batch))
    return total / (rate_per_s * scenario.duration_s), list(fleet.granted.values())


def _victim_per_s(scenario: Scenario, seed: int, *, poison_ratio: float) -> float:
    """Return what a tenant of 300/s completes beside one of 300/s, part of which fails five times each.

    The law sets the rate in a closed loop. A poisonous attempt costs a permit and is no `failed`: a law
    that heard of it would cut both tenants.
    """
    settings, law, draw = scenario.settings, Law(scenario.settings), random.Random(f"poison {seed}")
    due: list[tuple[float, int, int, bool]] = []  # due at, number, attempts, victim's
    allowance = tokens = started = 0.0
    number = completed = 0
    for step in range(round(scenario.duration_s / scenario.judge.step_s)):
        at_s = step * scenario.judge.step_s
        for victim in (True, False):
            for _ in range(round(300 * scenario.judge.step_s)):
                number += 1
                poison = not victim and draw.random() < poison_ratio
                heapq.heappush(due, (at_s, number, 0 if poison else 5, victim))
        tokens = min(tokens + allowance * scenario.judge.step_s, max(1.0, allowance * 0.25))
        while tokens >= 1 and due and due[0][0] <= at_s:
            _, which, attempts, victim = heapq.heappop(due)
            tokens, started = tokens - 1, started + 1
            completed += victim
            if attempts < 4:
                heapq.heappush(due, (at_s + 2.0 ** (attempts + 1), which, attempts + 1, victim))
        if (at_s + scenario.judge.step_s) % settings.interval_s < scenario.judge.step_s / 2:
            saturation = {"active_backends": 0.35 / 0.8 + 0.45 / 0.8 * started / settings.interval_s / 900}
            waiting = sum(each[0] <= at_s for each in due)
            reading = Reading(
                at_s=at_s,
                interval_s=settings.interval_s,
                oldest_due_age_s=at_s - due[0][0] if waiting else 0.0,
                due_depth=waiting,
                started=started,
                completed=started,
                blocked_ratio=float(waiting > 0),
                saturation=saturation,
            )
            allowance, started = law.step(reading).allowance_per_s, 0.0
    return completed / scenario.duration_s


def clocks(scenario: Scenario, seed: int, *, one_clock: bool = True) -> Figures:
    """Let every worker's clock be off by up to 5 s: the bucket's is the only one that counts."""
    clock, rate_per_s = _Clock(), 900.0
    bucket = LocalBucket(floor_per_s=scenario.settings.floor_per_s, clock_us=clock)
    _now(bucket.publish(allowance_per_s=rate_per_s, ttl_s=scenario.duration_s + 11, epoch=1))
    fleet = _Fleet(bucket, clock, f"clocks {seed}")
    off_us = {}
    for worker in range(scenario.fleet.workers):
        fleet.hire(worker)
        off_us[worker] = fleet.random.randrange(-5 * _SECOND_US, 5 * _SECOND_US)
    until_us = round(scenario.duration_s * _SECOND_US)
    total = sum(fleet.until(until_us, batch=20, off_us=None if one_clock else off_us))
    return {"rate_error": abs(total / (rate_per_s * scenario.duration_s) - 1)}


_BAD: tuple[Any, ...] = (None, math.nan, math.inf, -math.inf, -1.0, 1e308, 0.0)


def fuzz(scenario: Scenario, seed: int) -> Figures:
    """Feed readings with anything in them, restore in mid-flight, pause, override and step the clock."""
    draw = random.Random(f"fuzz {seed}")
    settings = scenario.settings
    law = Law(settings)
    at_s, outside, raised, differing = 0.0, 0, 0, 0
    for _ in range(round(scenario.duration_s / settings.interval_s)):
        at_s += draw.choice((2.0, 2.0, 2.0, 2.0, 0.0, -1e6, 7200.0))
        reading = _fuzzed(draw, at_s)
        twin = Law.restore(settings, json.loads(json.dumps(law.snapshot())))
        try:
            decision = law.step(reading)
            differing += decision != twin.step(reading)
        except Exception:  # noqa: BLE001 - any at all is what is counted
            raised += 1
            continue
        outside += not 0 <= decision.allowance_per_s <= settings.ceiling_per_s
        outside += (decision.allowance_per_s == 0) != reading.paused
    return {"outside": float(outside), "raised": float(raised), "differing": float(differing)}


def _fuzzed(draw: random.Random, at_s: float) -> Reading:
    def some(honest: float) -> Any:  # noqa: ANN401 - bad data is of any kind
        return draw.choice(_BAD) if draw.random() < 0.15 else honest

    probes = {name: some(draw.uniform(0, 3)) for name in ("a", "b", "c") if draw.random() < 0.9}
    return Reading(
        at_s=some(at_s),
        interval_s=some(2.0),
        oldest_due_age_s=some(draw.uniform(0, 1000)),
        due_depth=some(draw.choice((0, 10, 1e6))),
        started=some(draw.uniform(0, 2000)),
        saturation=probes,
        allowance_per_s=some(draw.uniform(1, 5000)),
        blocked_ratio=some(draw.random()),
        completed=some(draw.uniform(0, 1000)),
        failed=some(draw.choice((0, 0, 500))),
        timed_out=some(draw.choice((0, 0, 500))),
        arrivals_per_s=some(20.0),
        arrivals_peak_per_s=some(200.0),
        ceiling_per_s=draw.choice((None, None, None, 50.0, 1e5, math.nan, -1.0, math.inf)),
        paused=draw.random() < 0.05,
        resumed=draw.random() < 0.05,
    )


DRILLS: dict[str, Callable[[Scenario, int], Figures]] = {
    "leaders": leaders,
    "fairness": fairness,
    "clocks": clocks,
    "fuzz": fuzz,
}
