"""The closed loop in virtual time: database, bucket, workers, sensors, and a law that decides every interval.

The law sees readings and nothing else. Everything random that befalls the database is drawn from the
seed alone, so that every law meets the same day; the sensors' noise has a stream of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from governor.law import Decision
from governor.reading import Reading
from governor.simulate.database import Conditions, Database
from governor.simulate.scenarios import Event, Scenario

_BURST_S = 0.25  # the bucket holds so much of the allowance, as governor.bucket does
_OUTLIER_APART = 10  # intervals


class Governs(Protocol):
    """A law, ours or a peer's: a reading in, something with an allowance out."""

    def step(self, reading: Reading) -> Decision:
        """Decide the coming interval's allowance."""


@dataclass(slots=True)
class Run:
    """What happened, for the judge and the plots."""

    law: str
    seed: int
    drained_s: float | None = None  # time of the run at which the backlog was done
    saturation: list[float] = field(default_factory=list)  # true, means of 1 s
    latency: dict[int, float] = field(default_factory=dict)  # foreground requests by latency class
    allowance: list[float] = field(default_factory=list)  # decided, per interval
    depth: list[float] = field(default_factory=list)  # per interval
    age: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)  # per interval, permits
    wasted: list[float] = field(default_factory=list)  # per interval, attempts that failed
    at_s: list[float] = field(default_factory=list)  # time of each interval's decision
    events: list[Event] = field(default_factory=list)  # as they fell in this seed


class Oracle:
    """Knows the capacity and the load, and works at the target: what no law can do better than by luck.

    It decides at the same instants and through the same bucket as every law, and so cannot foresee either.
    """

    def __init__(self, scenario: Scenario) -> None:
        """Take the bounds that every law has."""
        self._settings = scenario.settings
        self._database = Database(scenario.database)
        self._now = Conditions()
        self._failing = 0.0

    def look(self, database: Database, now: Conditions, failing: float) -> None:
        """See what no probe shows."""
        self._database, self._now, self._failing = database, now, failing

    def step(self, reading: Reading) -> Decision:
        """Bisect for the rate at which the worst true saturation is the target."""
        low, high = self._settings.floor_per_s, self._settings.ceiling_per_s
        if self._failing:
            high = low
        for _ in range(20):
            middle = (low + high) / 2
            horizon_s = self._settings.interval_s
            if (
                self._database.stationary_saturation(middle, self._now, horizon_s)
                > self._settings.urgent_target
            ):
                high = middle
            else:
                low = middle
        return decided(low, f"oracle at {reading.at_s}")


def decided(allowance_per_s: float, reason: str) -> Decision:
    """Return the decision of a law that has nothing else to say."""
    return Decision(
        allowance_per_s=allowance_per_s,
        limited_by="peer",
        reason=reason,
        needs_per_s=0.0,
        safe_per_s=allowance_per_s,
        drain_s=None,
        stuck=False,
    )


class _Weather:
    """What befalls the database in one seed: the scenario's events, noise and checkpoints."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        # Not the sensors' stream: the weather must be the same for every law.
        self._random = random.Random(f"weather {seed}")  # noqa: S311 - a simulation
        self._spec = scenario.disturbance
        jitter_s = self._random.uniform(0, scenario.settings.interval_s)
        self.events = [replace(event, at_s=event.at_s + jitter_s) for event in scenario.events]
        low, high = scenario.work_factor
        self.work_factor = math.exp(self._random.uniform(math.log(low), math.log(high)))
        self._foreground = 0.0
        self._checkpoint_s = self._random.uniform(0.2, 1.0) * self._spec.checkpoint_every_s
        self._second = -1

    def now(self, at_s: float) -> Conditions:
        """Return the conditions of one step; steps come in order."""
        spec = self._spec
        if int(at_s) != self._second:
            self._second = int(at_s)
            fresh = math.sqrt(1 - spec.foreground_correlation**2) * self._random.gauss(0, spec.foreground_sd)
            self._foreground = spec.foreground_correlation * self._foreground + fresh
        now = Conditions(foreground=max(0.0, 1 + self._foreground))
        for event in self.events:
            if event.at_s <= at_s < event.at_s + event.for_s:
                event.befall(now)
        if at_s >= self._checkpoint_s + spec.checkpoint_for_s:
            self._checkpoint_s = at_s + self._random.uniform(0.8, 1.2) * spec.checkpoint_every_s
        elif at_s >= self._checkpoint_s:
            now.speed *= spec.checkpoint_speed
            now.disk = spec.checkpoint_disk
        return now

    def at(self, at_s: float) -> Iterator[Event]:
        """Return the events that hold at an instant."""
        return (event for event in self.events if event.at_s <= at_s < event.at_s + event.for_s)


class _Sensors:
    """Probes with delay, AR(1) noise, outliers and failures of their own."""

    names = ("active_backends", "commit_latency", "lock_waits")

    def __init__(self, scenario: Scenario, seed: int, noise: float) -> None:
        self._random = random.Random(f"sensors {seed}")  # noqa: S311 - a simulation
        self._spec, self._noise = scenario.sensors, noise
        step_s = scenario.judge.step_s
        self._window = round(scenario.settings.interval_s / step_s)
        self._delay = round(scenario.sensors.delay_s / step_s)
        self._sums: dict[str, list[float]] = {name: [0.0] for name in self.names}
        self._deviation = dict.fromkeys(self.names, 0.0)
        self._since_outlier = dict.fromkeys(self.names, _OUTLIER_APART)

    def watch(self, database: Database) -> None:
        """Take the true values of one step in."""
        for name, value in (
            ("active_backends", database.active_backends),
            ("commit_latency", database.commit_latency),
            ("lock_waits", database.lock_waits),
        ):
            sums = self._sums[name]
            sums.append(sums[-1] + value)

    def read(self, stale: set[str]) -> dict[str, float | None]:
        """Return what the probes say now: a mean of one interval, some time ago."""
        values: dict[str, float | None] = {}
        for name, sums in self._sums.items():
            last = max(len(sums) - 1 - self._delay, 1)
            first = max(last - self._window, 0)
            value = (sums[last] - sums[first]) / (last - first) * self._distortion(name)
            values[name] = None if name in stale or "*" in stale else value
        return values

    def _distortion(self, name: str) -> float:
        spec = self._spec
        fresh = math.sqrt(1 - spec.correlation**2) * self._random.gauss(0, self._noise)
        self._deviation[name] = spec.correlation * self._deviation[name] + fresh
        self._since_outlier[name] += 1
        if self._random.random() < spec.outlier_ratio and self._since_outlier[name] >= _OUTLIER_APART:
            self._since_outlier[name] = 0
            return spec.outlier
        return max(0.1, 1 + self._deviation[name])


class _Work:
    """What is due: the backlog first, as it is older, then what falls due all the time."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.backlog = 0.0
        self.fresh = 0.0  # fell due since
        self.waiting = 0.0  # failed attempts that back off

    @property
    def depth(self) -> float:
        return self.backlog + self.fresh

    def arrive(self, at_s: float, dt_s: float) -> None:
        scenario = self._scenario
        if self.backlog == 0 and at_s <= scenario.backlog_at_s < at_s + dt_s:
            self.backlog = scenario.backlog
        self.fresh += scenario.fleet.arrivals_per_s * dt_s
        again = self.waiting * dt_s / scenario.fleet.backoff_s
        self.waiting -= again
        self.fresh += again

    def start(self, most: float) -> float:
        """Take as much as there is, at most `most`, oldest first."""
        first = min(self.backlog, most)
        self.backlog -= first
        second = min(self.fresh, most - first)
        self.fresh = max(0.0, self.fresh - second)
        return first + second

    def age_s(self, at_s: float) -> float:
        if self.backlog > 0:
            return at_s - self._scenario.backlog_at_s
        return self.fresh / self._scenario.fleet.arrivals_per_s


@dataclass(slots=True)
class _Interval:
    """Counters since the last reading."""

    started: float = 0.0
    completed: float = 0.0
    failed: float = 0.0
    timed_out: float = 0.0
    blocked_steps: int = 0
    allowance_sum: float = 0.0


def run(scenario: Scenario, law: Governs, *, name: str, seed: int, noise: float) -> Run:
    """Run one law through one scenario in one seed."""
    weather = _Weather(scenario, seed)
    spec = replace(
        scenario.database, transition_work_s=scenario.database.transition_work_s * weather.work_factor
    )
    database, sensors, work = Database(spec), _Sensors(scenario, seed, noise), _Work(scenario)
    result = Run(law=name, seed=seed, events=weather.events)
    dt_s, every = scenario.judge.step_s, round(scenario.settings.interval_s / scenario.judge.step_s)
    per_second = round(1 / dt_s)
    acts_after = max(1, round(scenario.sensors.actuation_s / dt_s))
    allowance, decided_per_s, tokens, counted = scenario.settings.floor_per_s, None, 0.0, _Interval()
    second = 0.0
    for step in range(round(scenario.duration_s / dt_s)):
        at_s = step * dt_s
        now = weather.now(at_s)
        failing = max((event.failing for event in weather.at(at_s)), default=0.0)
        if step % every == acts_after % every and decided_per_s is not None:
            allowance = decided_per_s
        work.arrive(at_s, dt_s)
        tokens = min(tokens + allowance * dt_s, max(1.0, allowance * _BURST_S))
        wanted = min(work.depth, max(0.0, scenario.fleet.in_flight_most - database.in_flight))
        started = work.start(min(wanted, tokens))
        tokens -= started
        served = database.step(dt_s=dt_s, started=started, now=now)
        sensors.watch(database)
        _count(counted, work, served.completed, served.timed_out, failing)
        counted.started += started
        counted.blocked_steps += wanted > started
        counted.allowance_sum += allowance
        second += database.saturation
        latency_class = round(20 * math.log2(database.foreground_latency_s))
        result.latency[latency_class] = result.latency.get(latency_class, 0.0) + database.foreground_completed
        if step % per_second == per_second - 1:
            result.saturation.append(second / per_second)
            second = 0.0
        if result.drained_s is None and at_s > scenario.backlog_at_s + 1 and _drained(scenario, work):
            result.drained_s = at_s
        if step % every == every - 1:
            if isinstance(law, Oracle):
                law.look(database, now, failing)
            stale = {probe for event in weather.at(at_s) for probe in event.stale}
            reading = _reading(scenario, at_s, counted, work, database, sensors.read(stale))
            decided_per_s = law.step(reading).allowance_per_s
            _record(result, at_s, decided_per_s, reading, counted)
            counted = _Interval()
    return result


def _drained(scenario: Scenario, work: _Work) -> bool:
    return work.depth + work.waiting <= 2 * scenario.fleet.arrivals_per_s


def _count(counted: _Interval, work: _Work, completed: float, timed_out: float, failing: float) -> None:
    failed = completed * failing
    counted.completed += completed - failed
    counted.failed += failed
    counted.timed_out += timed_out
    work.waiting += failed + timed_out


def _reading(
    scenario: Scenario,
    at_s: float,
    counted: _Interval,
    work: _Work,
    database: Database,
    saturation: dict[str, float | None],
) -> Reading:
    every = round(scenario.settings.interval_s / scenario.judge.step_s)
    return Reading(
        at_s=at_s,
        interval_s=scenario.settings.interval_s,
        oldest_due_age_s=work.age_s(at_s),
        due_depth=work.depth,
        started=counted.started,
        saturation=saturation,
        allowance_per_s=counted.allowance_sum / every,
        blocked_ratio=counted.blocked_steps / every,
        completed=counted.completed,
        failed=counted.failed,
        timed_out=counted.timed_out,
        arrivals_per_s=scenario.fleet.arrivals_per_s,
        arrivals_peak_per_s=scenario.fleet.arrivals_per_s,
        in_flight=database.in_flight,
    )


def _record(result: Run, at_s: float, allowance_per_s: float, reading: Reading, counted: _Interval) -> None:
    result.at_s.append(at_s)
    result.allowance.append(allowance_per_s)
    result.depth.append(reading.due_depth or 0.0)
    result.age.append(reading.oldest_due_age_s or 0.0)
    result.started.append(counted.started)
    result.wasted.append(counted.failed)
