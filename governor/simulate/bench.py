"""Run laws over scenarios and seeds on every core, and search the peers' grids."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from governor.law import Law
from governor.simulate import peers
from governor.simulate.drills import DRILLS
from governor.simulate.judge import Figures, Verdict, figures, verdicts
from governor.simulate.loop import Governs, Oracle, Run, run
from governor.simulate.scenarios import Scenario, load

OURS = "governor"
LAWS = (OURS, *peers.PEERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One seed of one scenario, for one law at one point of its grid (empty = its best)."""

    scenario: Scenario
    law: str
    seed: int
    noise: float
    point: tuple[tuple[str, float], ...] = ()

    def measure(self) -> Figures:
        """Run it, beside the oracle where there is a database."""
        if self.scenario.model in DRILLS:
            return DRILLS[self.scenario.model](self.scenario, self.seed)
        return figures(self.scenario, self.run(), self.oracle())

    def run(self) -> Run:
        """Return the law's run."""
        settings = self.scenario.settings
        if self.law == OURS:
            return self._run(Law(settings))
        point = dict(self.point)
        return self._run(peers.at(self.law, settings, point) if point else peers.at_best(self.law, settings))

    def oracle(self) -> Run:
        """Return the oracle's run of the same seed."""
        return self._run(Oracle(self.scenario))

    def _run(self, law: Governs) -> Run:
        return run(self.scenario, law, name=self.law, seed=self.seed, noise=self.noise)


def measure(tasks: Iterable[Task], *, processes: int) -> list[Figures]:
    """Measure tasks in parallel; the order is theirs, and so is every figure."""
    listed = list(tasks)
    if processes <= 1:
        return [task.measure() for task in listed]
    with ProcessPoolExecutor(max_workers=processes) as pool:
        return list(pool.map(Task.measure, listed, chunksize=4))


def judge(scenario: Scenario, law: str, *, seeds: int, noise: float, processes: int = 1) -> list[Verdict]:
    """Judge a law in a scenario on the worst of its seeds."""
    numbers = range(seeds * (scenario.seeds_factor if law == OURS else 1))
    tasks = [Task(scenario=scenario, law=law, seed=seed, noise=noise) for seed in numbers]
    return verdicts(scenario, dict(zip(numbers, measure(tasks, processes=processes), strict=True)))


def applies(scenario: Scenario, law: str) -> bool:
    """Whether a law is tried in a scenario: the drills try the fleet and its bucket, which peers share."""
    return law == OURS or scenario.model not in DRILLS


def search(name: str, *, seeds: int, noise: float, processes: int) -> tuple[dict[str, float], float]:
    """Return the best point of a peer's grid, and its score.

    The score is the sum, over the first three scenarios, of worst drain ratio and worst overloaded intervals.
    """
    scenarios = [scenario for scenario in load() if scenario.number <= 3]
    points = peers.grid(name)
    tasks = [
        Task(scenario=scenario, law=name, seed=seed, noise=noise, point=tuple(point.items()))
        for point in points
        for scenario in scenarios
        for seed in range(seeds)
    ]
    # What does not drain scores as if it took ten times as long.
    found = [
        min(each["drain_ratio"], 10) + each["overloaded_intervals"]
        for each in measure(tasks, processes=processes)
    ]
    per_scenario = [max(found[at : at + seeds]) for at in range(0, len(found), seeds)]
    scores = [
        sum(per_scenario[at : at + len(scenarios)]) for at in range(0, len(per_scenario), len(scenarios))
    ]
    best = min(range(len(points)), key=lambda index: scores[index])
    return points[best], scores[best]
