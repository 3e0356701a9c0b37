"""The closed loop in virtual time: database, bucket, workers, sensors, and a law that decides every interval.

The law sees readings and nothing else. Everything random that befalls the database is drawn from the
seed alone, so that every law meets the same day; the sensors' noise has a stream of its own.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Protocol

from governor.law import Decision
from governor.reading import Reading
from governor.simulate.database import Conditions, Database
from governor.simulate.scenarios import Event, Scenario

_BURST_S = 0.25  # the bucket holds so much of the allowance, as governor.bucket does
_OUTLIER_APART = 10  # intervals
_CALM_S = 60.0  # after the beginning and before the backlog
OCTAVE = 20  # latency classes per factor of two


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
        self._random = random.Random(f"weather {seed}")
        self._spec = scenario.disturbance
        jitter_s = self._random.uniform(0, scenario.settings.interval_s)
        self.events = [replace(event, at_s=event.at_s + jitter_s) for event in scenario.events]
        low, high = scenario.work_factor
        self.work_factor = math.exp(self._random.uniform(math.log(low), math.log(high)))
        self._foreground = 0.0
        self._checkpoint_s = self._random.uniform(0.2, 1.0) * self._spec.checkpoint_every_s
        self._second = -1
        self.last = Conditions()

    def now(self, at_s: float) -> Conditions:
        """Return the conditions of one step; steps come in order."""
        spec = self._spec
        if int(at_s) != self._second:
            self._second = int(at_s)
            fresh = math.sqrt(1 - spec.foreground_correlation**2) * self._random.gauss(0, spec.foreground_sd)
            self._foreground = spec.foreground_correlation * self._foreground + fresh
        now = Conditions(foreground=max(0.0, 1 + self._foreground))
        for event in self.events:
            if event.holds(at_s):
                event.befall(now)
        if at_s >= self._checkpoint_s + spec.checkpoint_for_s:
            self._checkpoint_s = at_s + self._random.uniform(0.8, 1.2) * spec.checkpoint_every_s
        elif at_s >= self._checkpoint_s:
            now.speed *= spec.checkpoint_speed
            now.disk = spec.checkpoint_disk
        self.last = now
        return now

    def failing(self, at_s: float) -> float:
        """Return the share of attempts that fail."""
        return max((event.failing for event in self.events if event.holds(at_s)), default=0.0)

    def stale(self, at_s: float) -> set[str]:
        """Return the probes that say nothing."""
        return {probe for event in self.events if event.holds(at_s) for probe in event.stale}


class _Sensors:
    """Probes with delay, AR(1) noise, outliers and failures of their own."""

    names = ("active_backends", "commit_latency", "lock_waits")

    def __init__(self, scenario: Scenario, seed: int, noise: float) -> None:
        self._random = random.Random(f"sensors {seed}")
        self._spec, self._noise = scenario.sensors, noise
        step_s = scenario.judge.step_s
        self._window = round(scenario.settings.interval_s / step_s)
        self._delay = round(scenario.sensors.delay_s / step_s)
        self._sums: dict[str, list[float]] = {name: [0.0] for name in self.names}
        self._deviation = dict.fromkeys(self.names, 0.0)
        self._since_outlier = dict.fromkeys(self.names, _OUTLIER_APART)

    def watch(self, database: Database, steps: int) -> None:
        """Take the true values of so many steps in."""
        for name, value in (
            ("active_backends", database.active_backends),
            ("commit_latency", database.commit_latency),
            ("lock_waits", database.lock_waits),
        ):
            sums = self._sums[name]
            for _ in range(steps):
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

    @property
    def done(self) -> bool:
        """Whether nothing is left but what falls due all the time."""
        return self.depth + self.waiting <= 2 * self._scenario.fleet.arrivals_per_s

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
    blocked_s: float = 0.0
    allowed: float = 0.0  # permits


class _Loop:
    """One law in one seed of one scenario, interval by interval."""

    def __init__(self, scenario: Scenario, law: Governs, result: Run, noise: float) -> None:
        self._scenario, self._law, self.result = scenario, law, result
        self._weather = _Weather(scenario, result.seed)
        result.events = self._weather.events
        work_s = scenario.database.transition_work_s * self._weather.work_factor
        self._database = Database(replace(scenario.database, transition_work_s=work_s))
        self._sensors = _Sensors(scenario, result.seed, noise)
        self._work = _Work(scenario)
        self._allowance = self._decided = scenario.settings.floor_per_s
        self._tokens = 0.0
        self._counted = _Interval()

    def interval(self, begins_s: float) -> None:
        """Run one interval, then let the law read and decide."""
        settings, step_s = self._scenario.settings, self._scenario.judge.step_s
        # An hour of idling needs no fine steps.
        calm = self._scenario.backlog_at_s - begins_s > _CALM_S and begins_s > _CALM_S
        dt_s = settings.interval_s if calm else step_s
        acts_at_s = 0.0 if calm else self._scenario.sensors.actuation_s
        second: list[float] = []
        for step in range(round(settings.interval_s / dt_s)):
            if step * dt_s >= acts_at_s - step_s / 2:
                self._allowance = self._decided
            second.append(self._step(begins_s + step * dt_s, dt_s))
            if len(second) * dt_s >= 1:
                self.result.saturation += [sum(second) / len(second)] * max(1, round(dt_s))
                second.clear()
        if calm:
            self._sensors.watch(self._database, round(dt_s / step_s) - 1)
        self._decide(begins_s + settings.interval_s)

    def _step(self, at_s: float, dt_s: float) -> float:
        scenario, work, database, counted = self._scenario, self._work, self._database, self._counted
        now = self._weather.now(at_s)
        work.arrive(at_s, dt_s)
        allowance = self._allowance
        tokens = min(self._tokens + allowance * dt_s, max(1.0, allowance * max(_BURST_S, dt_s)))
        wanted = min(work.depth, max(0.0, scenario.fleet.in_flight_most - database.in_flight))
        started = work.start(min(wanted, tokens))
        self._tokens = tokens - started
        served = database.step(dt_s=dt_s, started=started, now=now)
        self._sensors.watch(database, 1)
        failed = served.completed * self._weather.failing(at_s)
        work.waiting += failed + served.timed_out
        counted.started += started
        counted.completed += served.completed - failed
        counted.failed += failed
        counted.timed_out += served.timed_out
        counted.blocked_s += dt_s if wanted > started else 0.0
        counted.allowed += allowance * dt_s
        result = self.result
        latency_class = round(OCTAVE * math.log2(database.foreground_latency_s))
        result.latency[latency_class] = result.latency.get(latency_class, 0.0) + database.foreground_completed
        if result.drained_s is None and at_s > scenario.backlog_at_s + 1 and work.done:
            result.drained_s = at_s
        return database.saturation

    def _decide(self, at_s: float) -> None:
        if isinstance(self._law, Oracle):
            self._law.look(self._database, self._weather.last, self._weather.failing(at_s))
        reading = self._reading(at_s)
        self._decided = self._law.step(reading).allowance_per_s
        result = self.result
        result.at_s.append(at_s)
        result.allowance.append(self._decided)
        result.depth.append(self._work.depth)
        result.age.append(self._work.age_s(at_s))
        result.wasted.append(self._counted.failed)
        self._counted = _Interval()

    def _reading(self, at_s: float) -> Reading:
        interval_s, arrivals_per_s = self._scenario.settings.interval_s, self._scenario.fleet.arrivals_per_s
        counted = self._counted
        return Reading(
            at_s=at_s,
            interval_s=interval_s,
            oldest_due_age_s=self._work.age_s(at_s),
            due_depth=self._work.depth,
            started=counted.started,
            saturation=self._sensors.read(self._weather.stale(at_s)),
            allowance_per_s=counted.allowed / interval_s,
            blocked_ratio=counted.blocked_s / interval_s,
            completed=counted.completed,
            failed=counted.failed,
            timed_out=counted.timed_out,
            arrivals_per_s=arrivals_per_s,
            arrivals_peak_per_s=arrivals_per_s,
            in_flight=self._database.in_flight,
        )


def run(scenario: Scenario, law: Governs, *, name: str, seed: int, noise: float) -> Run:
    """Run one law through one scenario in one seed."""
    result = Run(law=name, seed=seed)
    loop = _Loop(scenario, law, result, noise)
    for interval in range(round(scenario.duration_s / scenario.settings.interval_s)):
        loop.interval(interval * scenario.settings.interval_s)
    return result
