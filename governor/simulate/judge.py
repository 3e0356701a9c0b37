"""Figures of a run beside the oracle's in the same seed, and their bands."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise

from governor.simulate.loop import OCTAVE, Run
from governor.simulate.scenarios import Band, Scenario

Figures = dict[str, float]

_STEADY_AFTER_S = 40.0  # the climb is over


def p99_s(run: Run) -> float:
    """Return the foreground's 99th percentile: a mixture of exponential response times."""
    total = sum(run.latency.values())
    means = [(2 ** (latency_class / OCTAVE), weight / total) for latency_class, weight in run.latency.items()]
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(weight * math.exp(-middle / mean) for mean, weight in means) > 0.01:
            low = middle
        else:
            high = middle
    return high


def overloaded_s(scenario: Scenario, run: Run, *, since_s: float = 0.0) -> int:
    """Count seconds whose mean true saturation was above the limit."""
    return sum(value > scenario.judge.overloaded for value in run.saturation[int(since_s) :])


def figures(scenario: Scenario, run: Run, oracle: Run) -> Figures:
    """Return every figure that the scenario's bands name, and those that the frontier shows."""
    wanted = {"drain_ratio", "p99_ratio", "overloaded_intervals", *scenario.bands}
    wanted &= set(_FIGURES)
    return {name: _FIGURES[name](scenario, run, oracle) for name in sorted(wanted)}


def _drain_s(scenario: Scenario, run: Run) -> float:
    return math.inf if run.drained_s is None else run.drained_s - scenario.backlog_at_s


def _drain_ratio(scenario: Scenario, run: Run, oracle: Run) -> float:
    return _drain_s(scenario, run) / _drain_s(scenario, oracle)


def _drain_after_ratio(scenario: Scenario, run: Run, oracle: Run) -> float:
    ends_s = _ends_s(scenario, run)
    # Equal work: what each had left, at the pace it had.
    left, oracle_left = (_at(each, ends_s, each.depth) for each in (run, oracle))
    took = math.inf if run.drained_s is None else run.drained_s - ends_s
    oracle_took = math.inf if oracle.drained_s is None else oracle.drained_s - ends_s
    return (took / left) / (oracle_took / oracle_left)


def _overloaded_intervals(scenario: Scenario, run: Run, oracle: Run) -> float:
    beyond_s = overloaded_s(scenario, run) - overloaded_s(scenario, oracle)
    return max(0.0, beyond_s / scenario.settings.interval_s)


def _overloaded_again_intervals(scenario: Scenario, run: Run, oracle: Run) -> float:
    # The backlog of the stall itself is gone a few seconds after it: what comes later is a second one.
    since_s = _ends_s(scenario, run) + 5
    beyond_s = overloaded_s(scenario, run, since_s=since_s) - overloaded_s(scenario, oracle, since_s=since_s)
    return max(0.0, beyond_s / scenario.settings.interval_s)


def _settled_intervals(scenario: Scenario, run: Run, oracle: Run) -> float:
    """Return the time from the event to the end of the first spell of overload."""
    begins_s = int(run.events[0].at_s)
    calm, last = 0, 0.0
    for offset, value in enumerate(run.saturation[begins_s : begins_s + 60]):
        if (
            value > scenario.judge.overloaded
            and oracle.saturation[begins_s + offset] <= scenario.judge.overloaded
        ):
            calm, last = 0, offset + 1.0
        else:
            calm += 1
        if calm > 10 * scenario.settings.interval_s:
            break
    return last / scenario.settings.interval_s


def _p99_ratio(_scenario: Scenario, run: Run, oracle: Run) -> float:
    return p99_s(run) / p99_s(oracle)


def _amplitude(scenario: Scenario, run: Run, _oracle: Run) -> float:
    """Return half the spread (10th to 90th percentile) of the steady allowance over its median."""
    until_s = run.drained_s if run.drained_s is not None else scenario.duration_s
    steady = [
        allowance
        for at_s, allowance in zip(run.at_s, run.allowance, strict=True)
        if scenario.backlog_at_s + _STEADY_AFTER_S <= at_s <= until_s - scenario.settings.interval_s
    ]
    if len(steady) < 10:
        return math.inf
    deciles = statistics.quantiles(steady, n=10)
    return (deciles[8] - deciles[0]) / 2 / statistics.median(steady)


def _diverged(scenario: Scenario, run: Run, _oracle: Run) -> float:
    """Return 1.0 for a run that did not drain, or swung by more than a factor of two."""
    return float(run.drained_s is None or _amplitude(scenario, run, run) > 0.5)


def _ends_s(scenario: Scenario, run: Run) -> float:
    return max(min(event.at_s + event.for_s, scenario.duration_s) for event in run.events)


def _at(run: Run, at_s: float, series: list[float]) -> float:
    return next(value for when_s, value in zip(run.at_s, series, strict=True) if when_s >= at_s)


def _before_event(run: Run) -> float:
    rates = [rate for at_s, rate in zip(run.at_s, run.allowance, strict=True) if at_s < run.events[0].at_s]
    return statistics.median(rates[-10:])


def _after_40_s_ratio(_scenario: Scenario, run: Run, _oracle: Run) -> float:
    return _at(run, run.events[0].at_s + 40, run.allowance) / _before_event(run)


def _lowest_per_s(_scenario: Scenario, run: Run, _oracle: Run) -> float:
    return min(run.allowance)


def _back_80_s(scenario: Scenario, run: Run, _oracle: Run) -> float:
    ends_s, enough = _ends_s(scenario, run), 0.8 * _before_event(run)
    pairs = zip(run.at_s, run.allowance, strict=True)
    return next((at_s - ends_s for at_s, rate in pairs if at_s >= ends_s and rate >= enough), math.inf)


def _rises(scenario: Scenario, run: Run, _oracle: Run) -> float:
    """Count raises from the second reading within the event to the last."""
    begins_s, ends_s = run.events[0].at_s, _ends_s(scenario, run)
    first_s = begins_s + scenario.settings.interval_s
    within = [rate for at_s, rate in zip(run.at_s, run.allowance, strict=True) if first_s <= at_s < ends_s]
    return float(sum(later > earlier for earlier, later in pairwise(within)))


def _wasted_ratio(_scenario: Scenario, run: Run, _oracle: Run) -> float:
    """Return failed attempts over those of a fleet that goes on at the rate before the event."""
    event = run.events[0]
    return sum(run.wasted) / (_before_event(run) * event.for_s * event.failing)


_FIGURES = {
    "drain_ratio": _drain_ratio,
    "drain_after_ratio": _drain_after_ratio,
    "overloaded_intervals": _overloaded_intervals,
    "overloaded_again_intervals": _overloaded_again_intervals,
    "settled_intervals": _settled_intervals,
    "p99_ratio": _p99_ratio,
    "amplitude": _amplitude,
    "diverged": _diverged,
    "after_40_s_ratio": _after_40_s_ratio,
    "lowest_per_s": _lowest_per_s,
    "back_80_s": _back_80_s,
    "rises": _rises,
    "wasted_ratio": _wasted_ratio,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One figure of one law over all seeds of a scenario."""

    figure: str
    band: Band | None
    worst: float
    worst_seed: int
    median: float

    @property
    def holds(self) -> bool:
        """Whether the worst seed is within the band; a figure without one always is."""
        return self.band is None or self.band.holds(self.worst)


def verdicts(scenario: Scenario, by_seed: dict[int, Figures]) -> list[Verdict]:
    """Return the worst and the median of every figure; a value that is no number is the worst."""
    found = []
    for figure in next(iter(by_seed.values())):
        band = scenario.bands.get(figure)
        values = {seed: each[figure] for seed, each in by_seed.items()}
        lower_is_worse = band is not None and band.at_least is not None
        seed = (min if lower_is_worse else max)(values, key=lambda each: values[each])
        found.append(
            Verdict(
                figure=figure,
                band=band,
                worst=values[seed],
                worst_seed=seed,
                median=statistics.median(values.values()),
            )
        )
    return found
