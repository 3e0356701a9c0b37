"""Scenario files: what happens to the database, and the bands that a law must keep to."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Self

from governor.law import LawSettings
from governor.simulate.database import Conditions, DatabaseSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """The workers and the work that falls due."""

    workers: int
    in_flight_most: float
    arrivals_per_s: float
    backoff_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorSpec:
    """What lies between the database's state and a reading, and between a decision and its effect."""

    delay_s: float
    actuation_s: float
    correlation: float
    outlier_ratio: float
    outlier: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DisturbanceSpec:
    """What an ordinary database does by itself."""

    foreground_sd: float
    foreground_correlation: float
    checkpoint_every_s: float
    checkpoint_for_s: float
    checkpoint_speed: float
    checkpoint_disk: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSpec:
    """How a run is cut into steps and seconds."""

    overloaded: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that holds for a while; what it does not name stays as it is."""

    at_s: float
    for_s: float
    speed: float = 1.0
    foreground: float = 1.0
    lock_wait_s: float = 0.0
    failing: float = 0.0  # share of attempts that fail
    stale: tuple[str, ...] = ()  # probes that say nothing; "*" = all

    def holds(self, at_s: float) -> bool:
        """Whether it is on at an instant."""
        return self.at_s <= at_s < self.at_s + self.for_s

    def befall(self, now: Conditions) -> None:
        """Apply to the conditions of one step."""
        now.speed *= self.speed
        now.foreground *= self.foreground
        now.lock_wait_s += self.lock_wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A limit on one figure."""

    at_most: float | None = None
    at_least: float | None = None

    def holds(self, value: float) -> bool:
        """Tell whether a figure is within; a figure that is no number is not."""
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most)

    def worse(self, values: list[float]) -> float:
        """Return the worst of several values."""
        return max(values) if self.at_most is not None else min(values)

    def __str__(self) -> str:
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One row of the table."""

    name: str
    number: int
    title: str
    model: str  # loop, or a drill of governor.simulate.drills
    bands: dict[str, Band]
    duration_s: float
    backlog: float
    backlog_at_s: float
    events: tuple[Event, ...]
    work_factor: tuple[float, float]  # cost per transition, drawn per seed between these
    delay_factor: float
    seeds_factor: int  # x the seeds asked for
    settings: LawSettings
    database: DatabaseSpec
    fleet: FleetSpec
    sensors: SensorSpec
    disturbance: DisturbanceSpec
    judge: JudgeSpec

    @classmethod
    def of(cls, name: str, values: dict[str, Any], common: dict[str, Any]) -> Self:
        """Return a scenario from its file and the common one; its own sections overlay the common ones."""
        merged = {**common, **values}
        for section, defaults in common.items():
            merged[section] = {**defaults, **values.get(section, {})}
        delay = float(values.get("delay_factor", 1.0))
        sensors = SensorSpec(**merged["sensors"])
        low, high = values.get("work_factor", (1.0, 1.0))
        return cls(
            name=name,
            number=values["number"],
            title=values["title"],
            model=values.get("model", "loop"),
            bands={key: Band(**band) for key, band in values["bands"].items()},
            duration_s=values.get("duration_s", 0.0),
            backlog=values.get("backlog", 0.0),
            backlog_at_s=values.get("backlog_at_s", 0.0),
            events=tuple(
                Event(**{**event, "stale": tuple(event.get("stale", ()))})
                for event in values.get("event", ())
            ),
            work_factor=(low, high),
            delay_factor=delay,
            seeds_factor=values.get("seeds_factor", 1),
            settings=LawSettings(**merged["settings"]),
            database=DatabaseSpec(**merged["database"]),
            fleet=FleetSpec(**merged["fleet"]),
            sensors=replace(
                sensors, delay_s=sensors.delay_s * delay, actuation_s=sensors.actuation_s * delay
            ),
            disturbance=DisturbanceSpec(**merged["disturbance"]),
            judge=JudgeSpec(**merged["judge"]),
        )


def load() -> list[Scenario]:
    """Return all scenarios by number."""
    folder = resources.files("governor.simulate") / "scenarios"
    files = {
        path.name.removesuffix(".toml"): tomllib.loads(path.read_text(encoding="utf-8"))
        for path in folder.iterdir()
        if path.name.endswith(".toml")
    }
    common = files.pop("common")
    found = [Scenario.of(name, values, common) for name, values in files.items()]
    return sorted(found, key=lambda scenario: scenario.number)
