"""The control law: one reading in, one allowance out, for the whole fleet.

Each probe p keeps, smoothed in log space, the rate at which it would be at its target:

    bears_p = u exp(e + 2 max(0, e - 0.15)),   e = 1 - value / target, at least -0.5

u (permits/s) is what was started while the value was measured, so that steps do not compound over the dead
time. The least of these is the aim, lowered by what separates today's target from 1.0: the target is 0.85,
and rises to 1.0 as the need approaches the allowance (permits/s):

    need = depth / max(objective - age, objective / 4) + arrivals

    cut    a probe > 1.25 target:     base x max(0.02, target / value), once per dead time
           timeouts:                  base x max(0.25, 1 - twice their share)
           errors:                    base x max(0.05, 1 - their share); base = min(allowance, started)
    hold   within 3 % of the aim
    ease   aim below the allowance:   to the aim
    climb  aim above it, and permits were the limit:  to the aim, at most twice the allowance;
           at once to the start, or to half the last good rate if that is less

docs/governor.md has the reason of every rule, and tests/unit/test_law.py a test.

Source: an integral step in log space towards an absolute target, gated as others learnt to: Vitess'
max-rate module (a raise at most doubles, ends at the midpoint of good and bad, needs a used rate, learns
nothing in an emergency), CockroachDB's elastic CPU (waiters gate the raise, idle decays), freno (stale = no).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from governor.evidence import RATE_GAIN, Outcomes, Probe, Probes
from governor.reading import Reading, Signals

__all__ = ["Decision", "Law", "LawSettings", "Reading"]

_CUT_AT = 1.25  # cut when S exceeds the target by this factor; up to there the allowance is eased
_CUT_LEAST = 0.25  # one cut ends at this share of the rate at least ...
_CUT_DEEP = 0.02  # ... but goes down to this while what has queued up is worked off
_FAILED_LEAST = 0.05  # one cut for errors leaves at least this share: failing attempts are only waste
_TIMED_OUT = 0.05  # share of attempts that cuts, lower confidence bound
_FAILED = 0.10
_DEAD_TIME = 2  # intervals until a reading lies wholly after a change
_DEAD_BAND = 0.03  # of the allowance
_LARGE = 0.1  # an easing by more than this is waited for, as a cut is
_NEAR = 0.05  # saturation below the target from which on the allowance may be eased
_USED = 0.8  # share of the allowance that must have been started before it is raised
_BLOCKED = 0.1  # share of the interval with an unmet request: permits were the limit
_FRESH = 2  # complete readings before the allowance is raised
_IDLE_S = 40.0  # time constant of the decay towards demand
_SPARE = 1.25  # an idle allowance stays this much above demand
_STEP_NEAR = 1.05  # largest raise near the rate of the last incident, or without any probe
_UNBOUND = 0.7  # saturation at which the last incident's rate does not bind
_BAD_S = 300.0  # how long the rate of the last incident counts
_GOOD_S = 3600.0  # how long a last good rate counts
_STUCK = 5  # intervals without a completion
_GAP = 5  # intervals between readings; a leader away for longer resumes


@dataclass(frozen=True, slots=True, kw_only=True)
class LawSettings:
    """What an operator decides. A law's history counts under equal settings only.

    Raises: ValueError, naming the field, its range and what was given.
    """

    floor_per_s: float = 5.0  # always flows, permits/s; above 0
    ceiling_per_s: float = 20_000.0  # never exceeded, permits/s; at least the floor
    start_per_s: float = 100.0  # safe without any history, permits/s; floor..ceiling
    objective_s: float = 30.0  # a transition should be done so long after it fell due, s; 0.1..86400
    interval_s: float = 2.0  # between readings, s; 0.05..60
    target: float = 0.85  # saturation aimed at while nothing is urgent; 0.1..urgent_target
    urgent_target: float = 1.0  # and when the objective is at risk; 0.1..1

    def __post_init__(self) -> None:
        """Check each field, and those that depend on another."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{each.name} must be a finite number, not {value!r}")
        self._check("ceiling_per_s", 0.001, 1e9)
        self._check("floor_per_s", 0.001, self.ceiling_per_s, most_is="ceiling_per_s")
        self._check("start_per_s", self.floor_per_s, self.ceiling_per_s, most_is="floor_per_s..ceiling_per_s")
        self._check("objective_s", 0.1, 86_400)
        self._check("interval_s", 0.05, 60)
        self._check("urgent_target", 0.1, 1)
        self._check("target", 0.1, self.urgent_target, most_is="urgent_target")

    def _check(self, name: str, least: float, most: float, *, most_is: str = "") -> None:
        value = getattr(self, name)
        if not least <= value <= most:
            why = f" ({most_is})" if most_is else ""
            raise ValueError(f"{name} must be {least:g}..{most:g}{why}, not {value:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many permits a second from now on, and why.

    limited_by: demand, ceiling, override, floor, saturation:<probe>, timeouts, errors, stale:<signal>,
    recovering, paused.
    """

    allowance_per_s: float  # 0..ceiling; 0 only while paused
    limited_by: str
    reason: str  # one sentence with its numbers, for a person at 3 a.m.
    needs_per_s: float  # to meet the objective: depth / max(objective - age, objective / 4) + arrivals
    safe_per_s: float  # what the database is known to bear
    drain_s: float | None  # until nothing is due, at this allowance; None = never
    stuck: bool  # permits were granted, work is due, and nothing completes


@dataclass(slots=True)
class _State:
    """All that a law remembers: plain values, so that a snapshot is exact."""

    allowance_per_s: float
    previous_per_s: float = 0.0  # the decision before
    at_s: float | None = None
    override_per_s: float | None = None
    started_per_s: float = 0.0  # in the interval before
    used: bool = False  # permits were the limit in the interval before
    history: bool = False  # there was a complete reading
    resumes: bool = False  # the next reading that is no pause resumes
    fresh: int = 0  # complete readings in a row
    stale: int = 0  # incomplete ones
    unsettled: int = 0  # intervals that completed nothing though permits were there
    probes: Probes = field(default_factory=Probes)
    outcomes: Outcomes = field(default_factory=Outcomes)
    moved_age_s: float | None = None  # since the last large step
    cut_from_per_s: float = 0.0  # what a cut is counted from
    level_per_s: float = 0.0  # where it ends once the queues are gone; it went deeper
    moved_by: str = ""
    good_per_s: float | None = None  # last rate that the database bore while permits were the limit
    good_age_s: float = 0.0
    bad_per_s: float | None = None  # rate at which the last incident began
    bad_age_s: float = 0.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the state that `asdict` gave."""
        probes = {name: Probe(**probe) for name, probe in values["probes"]["by_name"].items()}
        return cls(**{**values, "probes": Probes(by_name=probes), "outcomes": Outcomes(**values["outcomes"])})


@dataclass(frozen=True, slots=True)
class _Verdict:
    """An allowance before floor and ceiling, the rule that gave it, and its sentence."""

    allowance_per_s: float
    limited_by: str
    why: str


class Law:
    """Decide the allowance from readings alone: no clock, no I/O, no randomness.

    >>> law = Law(LawSettings(floor_per_s=5, ceiling_per_s=5000, start_per_s=100))
    >>> reading = Reading(at_s=0, interval_s=2, oldest_due_age_s=0, due_depth=0, started=0, saturation={})
    >>> law.step(reading).allowance_per_s
    100.0
    """

    def __init__(self, settings: LawSettings) -> None:
        """Begin without history: the floor, until one complete reading."""
        self.settings = settings
        self._state = _State(allowance_per_s=settings.floor_per_s)

    def snapshot(self) -> dict[str, Any]:
        """Return everything the law remembers, as JSON carries it."""
        return {"settings": asdict(self.settings), "state": asdict(self._state)}

    @classmethod
    def restore(cls, settings: LawSettings, snapshot: Mapping[str, Any]) -> Self:
        """Return the law that gave the snapshot, exactly; under other settings one without history.

        Its first reading should say `resumed`. How long ago it was taken cannot be seen on another
        leader's clock: who stored it more than an hour ago starts a new law.
        Raises: ValueError for what is no snapshot.
        """
        law = cls(settings)
        try:
            state = _State.of(snapshot["state"])
            if snapshot["settings"] == asdict(settings):
                law._state = state
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the snapshot of a law: {error!r}") from error
        return law

    def step(self, reading: Reading) -> Decision:
        """Decide the allowance of the coming interval. Never raises on bad data."""
        seen = Signals.of(reading, interval_s=self.settings.interval_s)
        resumed = self._advance(seen)
        if seen.paused:
            self._state.resumes = True
            verdict = _Verdict(0.0, "paused", f"paused by an operator, {seen.depth:.0f} due")
            return self._explain(seen, verdict)
        if resumed:
            self._forget_signals()
        self._watch(seen)
        verdict = self._resume(seen) if resumed and self._state.history else self._decide(seen)
        verdict = self._clamp(verdict)
        self._learn(seen, verdict, resumed=resumed)
        return self._explain(seen, verdict)

    # --- time and signals

    def _advance(self, seen: Signals) -> bool:
        """Let memories age; tell whether this reading is the first after a time of not looking."""
        state, elapsed_s, gap = self._state, seen.interval_s, False
        if seen.at_s is not None and state.at_s is not None:
            forward_s = seen.at_s - state.at_s
            gap = not 0 <= forward_s <= _GAP * max(self.settings.interval_s, seen.interval_s)
            elapsed_s = min(forward_s, 2 * _GOOD_S) if forward_s > 0 else elapsed_s
        state.at_s = state.at_s if seen.at_s is None else seen.at_s
        if not seen.ceiling_unreadable:
            state.override_per_s = seen.ceiling_per_s
        state.good_age_s += elapsed_s
        state.bad_age_s += elapsed_s
        if state.moved_age_s is not None:
            state.moved_age_s += elapsed_s
        if state.bad_age_s > _BAD_S:
            state.bad_per_s = None
        if state.good_age_s > _GOOD_S:
            state.good_per_s = None
        return seen.resumed or gap or state.resumes

    def _forget_signals(self) -> None:
        state = self._state
        state.resumes = False
        state.probes, state.outcomes = Probes(), Outcomes()
        state.fresh = state.stale = state.unsettled = 0
        state.moved_age_s, state.moved_by, state.level_per_s = None, "", 0.0
        state.used, state.previous_per_s = False, 0.0

    def _watch(self, seen: Signals) -> None:
        state = self._state
        state.outcomes.update(completed=seen.completed, failed=seen.failed, timed_out=seen.timed_out)
        troubled = state.outcomes.timed_out_ratio > _TIMED_OUT
        state.probes.update(seen.probes, silent=seen.silent, troubled=troubled)
        state.fresh = 0 if seen.missing else state.fresh + 1
        state.stale = state.stale + 1 if seen.missing else 0
        # No permit taken because none was there is a throttle; none taken though some were is a stop.
        granted = seen.started_per_s > 0 or seen.blocked_ratio < _BLOCKED
        if seen.completed or not seen.depth:
            state.unsettled = 0
        elif granted and seen.missing is None:
            state.unsettled += 1
        expected = min(state.allowance_per_s, state.previous_per_s)
        if seen.in_force_per_s is not None and seen.in_force_per_s < 0.95 * expected:
            # Some worker cut the bucket: that cut counts as ours.
            state.allowance_per_s = seen.in_force_per_s
            self._begin_settling("timeouts", seen.in_force_per_s, base_per_s=seen.in_force_per_s)
        self._estimate(seen)

    def _estimate(self, seen: Signals) -> None:
        """Ask each probe at which rate it would be at its target; only a rate that was used can tell."""
        probes, rate = self._state.probes, self._measured_at(seen)
        if not self._used(seen):
            probes.assume_rate(None)
        elif seen.missing is None and rate > 0 and not self._settling:
            for name, value in seen.probes.items():
                probes.by_name[name].estimate(rate, value)

    # --- the rules; the first that applies decides

    def _decide(self, seen: Signals) -> _Verdict:
        for rule in (self._start, self._stale, self._cut, self._wait, self._ease, self._idle):
            verdict = rule(seen)
            if verdict is not None:
                return verdict
        return self._climb(seen)

    def _start(self, seen: Signals) -> _Verdict | None:
        """Without history: the floor until one complete reading, then the start, if that is healthy."""
        state, settings = self._state, self.settings
        if state.history:
            return None
        if seen.missing:
            return _Verdict(
                settings.floor_per_s, f"stale:{seen.missing}", f"no history, and no {seen.missing} yet"
            )
        state.history = True
        name, worst = state.probes.worst
        if worst > self._target(seen):
            return _Verdict(
                settings.floor_per_s,
                f"saturation:{name}",
                f"no history, and {name} at {worst:.2f}x its target",
            )
        return _Verdict(
            settings.start_per_s, "recovering", f"no history: start at {settings.start_per_s:.0f}/s"
        )

    def _resume(self, seen: Signals) -> _Verdict:
        """Resume at half the last good rate at most, and below what was allowed before."""
        state, settings = self._state, self.settings
        if seen.missing:
            return _Verdict(
                settings.floor_per_s, f"stale:{seen.missing}", f"resumed without {seen.missing}: floor"
            )
        name, worst = state.probes.worst
        if worst > self._target(seen):
            why = f"resumed at the floor: {name} {worst:.2f}x its target"
            return _Verdict(settings.floor_per_s, f"saturation:{name}", why)
        base = settings.start_per_s if state.good_per_s is None else state.good_per_s / 2
        allowed = min(base, state.allowance_per_s)
        good = "no last good rate" if state.good_per_s is None else f"last good rate {state.good_per_s:.0f}/s"
        return _Verdict(allowed, "recovering", f"resumed at {allowed:.0f}/s: {good}")

    def _stale(self, seen: Signals) -> _Verdict | None:
        """Missing signals: hold one interval (or cut, if the others say so), then the floor."""
        if not seen.missing:
            return None
        cause, held = f"stale:{seen.missing}", self._state.allowance_per_s
        if self._state.stale > 1:
            return _Verdict(
                self.settings.floor_per_s,
                cause,
                f"{seen.missing} missing for {self._state.stale} intervals: floor",
            )
        return self._cut(seen) or _Verdict(held, cause, f"{seen.missing} missing: holding {held:.0f}/s")

    def _cut(self, seen: Signals) -> _Verdict | None:
        """Cut deep, once per dead time; within it a cut may deepen, counted from where it began."""
        state = self._state
        factor, cause, why = self._worst_evidence(seen)
        if factor >= 1.0:
            return None
        before = state.allowance_per_s
        if before <= self.settings.floor_per_s:
            return _Verdict(before, cause, f"at the floor {before:g}/s: {why}")
        if self._settling:
            allowed = min(before, state.cut_from_per_s * factor)
        elif state.probes.falling and cause.startswith("saturation"):
            return _Verdict(before, cause, f"holding {before:.0f}/s: {why}, and falling")
        else:
            base = min(before, max(seen.started_per_s, self.settings.floor_per_s))
            if state.bad_per_s is None or self._calm:
                self._learn_bad(base, cause)
            if before > state.level_per_s or self._calm:
                state.level_per_s = _CUT_LEAST * base if cause.startswith("saturation") else 0.0
            allowed = base * factor
            self._begin_settling(cause, allowed, base_per_s=base)
        verb = f"cut {before:.0f} -> {allowed:.0f}/s" if allowed < before else f"holding {before:.0f}/s"
        return _Verdict(allowed, cause, f"{verb}: {why}")

    def _worst_evidence(self, seen: Signals) -> tuple[float, str, str]:
        """Return what to multiply by (1 = nothing), the cause and its numbers."""
        timed_out, failed = self._state.outcomes.timed_out_ratio, self._state.outcomes.failed_ratio
        name, worst = self._state.probes.worst
        target = self._target(seen)
        found = [(1.0, "", "")]
        if timed_out > _TIMED_OUT:
            why = f"at least {timed_out:.0%} of attempts time out"
            found.append((max(_CUT_LEAST, 1 - 2 * timed_out), "timeouts", why))
        if failed > _FAILED:
            why = f"at least {failed:.0%} of attempts fail"
            found.append((max(_FAILED_LEAST, 1 - failed), "errors", why))
        if worst > _CUT_AT * target:
            why = f"{name} {worst:.1f}x its target"
            found.append((max(_CUT_DEEP, target / worst), f"saturation:{name}", why))
        return min(found)

    def _wait(self, _seen: Signals) -> _Verdict | None:
        """Change nothing until a cut can be seen, or a jump is confirmed."""
        state, held = self._state, self._state.allowance_per_s
        if self._settling:
            return _Verdict(held, state.moved_by, f"holding {held:.0f}/s until the last step shows")
        if state.probes.unconfirmed:
            name = state.probes.unconfirmed
            return _Verdict(held, f"saturation:{name}", f"holding {held:.0f}/s: {name} jumped, once")
        return None

    def _ease(self, seen: Signals) -> _Verdict | None:
        """Come down to the aim; hold near it."""
        before = self._state.allowance_per_s
        name, aim = self._aim(seen)
        if not name or aim > before * (1 + _DEAD_BAND):
            return None
        said = f"{name} {self._state.probes.by_name[name].smoothed:.2f}x its target"
        if aim >= before * (1 - _DEAD_BAND):
            return _Verdict(before, f"saturation:{name}", f"holding {before:.0f}/s: {said}")
        why = f"easing {before:.0f} -> {aim:.0f}/s: {said}, aim {self._target(seen):.2f}x"
        if self._state.probes.by_name[name].smoothed < self._target(seen) - _NEAR:
            return None  # the estimate is of another time
        if aim < before * (1 - _LARGE):
            self._begin_settling(f"saturation:{name}", aim, base_per_s=before)
        return _Verdict(aim, f"saturation:{name}", why)

    def _idle(self, seen: Signals) -> _Verdict | None:
        """Nobody waits for permits: decay towards demand, not below the start or the forecast's peak."""
        state, before = self._state, self._state.allowance_per_s
        if self._used(seen):
            return None
        if seen.blocked_ratio >= _BLOCKED:
            return _Verdict(
                before, "recovering", f"holding {before:.0f}/s: only {seen.started_per_s:.0f}/s started"
            )
        state.moved_by, state.level_per_s = "", 0.0  # what is known of the last incident ends with the demand
        demand = max(seen.started_per_s, state.started_per_s)
        kept = max(self.settings.start_per_s, _SPARE * demand, seen.arrivals_peak_per_s)
        decayed = before * math.exp(-seen.interval_s / _IDLE_S)
        allowed = min(before, max(kept, decayed))
        return _Verdict(allowed, "demand", f"{demand:.0f}/s asked for, {before:.0f}/s allowed")

    def _climb(self, seen: Signals) -> _Verdict:
        """Raise: far from the target in bigger steps, near the last incident's rate in small ones."""
        state, before = self._state, self._state.allowance_per_s
        name, worst = state.probes.worst
        if state.fresh < _FRESH:
            return _Verdict(before, "recovering", f"holding {before:.0f}/s until a second complete reading")
        if state.outcomes.failed_ratio > _FAILED / 2 or state.outcomes.timed_out_ratio > _TIMED_OUT / 2:
            cause = "errors" if state.outcomes.failed_ratio > _FAILED / 2 else "timeouts"
            return _Verdict(before, cause, f"holding {before:.0f}/s: attempts still fail")
        if worst > self._target(seen):
            return _Verdict(
                before, f"saturation:{name}", f"holding {before:.0f}/s: {name} {worst:.2f}x its target"
            )
        allowed = max(before, self._goal(seen))
        if allowed > 2 * before:
            self._begin_settling("recovering", allowed, base_per_s=allowed)
        why = f"raising {before:.0f} -> {allowed:.0f}/s: {name or 'no probe'} {worst:.2f}x its target"
        return _Verdict(allowed, "recovering", why)

    def _goal(self, seen: Signals) -> float:
        """Return where to climb to: known rates at once, else the aim, as far as one raise may go."""
        state, before = self._state, self._state.allowance_per_s
        _, aim = self._aim(seen)
        most = self._step_most(before)
        if most > 2 * before:  # the start, or half the last good rate
            return most
        level = 0.0 if self._calm else state.level_per_s
        if not state.probes.by_name:
            aim = _STEP_NEAR * before
        return max(level, min(aim, most))

    # --- quantities

    @property
    def _settling(self) -> bool:
        age_s = self._state.moved_age_s
        return age_s is not None and age_s < (_DEAD_TIME - 0.25) * self.settings.interval_s

    @property
    def _calm(self) -> bool:
        """Whether the last episode is over: its memory is frozen until then."""
        age_s = self._state.moved_age_s
        return age_s is None or age_s > 5 * _DEAD_TIME * self.settings.interval_s

    def _needs_per_s(self, seen: Signals) -> float:
        objective_s = self.settings.objective_s
        return seen.depth / max(objective_s - seen.age_s, objective_s / 4) + seen.arrivals_per_s

    def _target(self, seen: Signals) -> float:
        settings, allowance = self.settings, max(self._state.allowance_per_s, self.settings.floor_per_s)
        urgency = min(1.0, self._needs_per_s(seen) / allowance)
        return settings.target + urgency * (settings.urgent_target - settings.target)

    def _aim(self, seen: Signals) -> tuple[str, float]:
        """Return the probe that bears least and the rate to aim at; ("", 0.0) where none can tell yet."""
        name, least = self._state.probes.least
        return name, least * math.exp(-RATE_GAIN * (1 - self._target(seen)))

    def _used(self, seen: Signals) -> bool:
        """Whether permits were the limit: requests waited, and most of the allowance was started."""
        return seen.blocked_ratio >= _BLOCKED and seen.started_per_s >= _USED * self._in_force(seen)

    def _measured_at(self, seen: Signals) -> float:
        """Return the rate that this reading's saturation belongs to: probes lag by part of an interval."""
        before = self._state.started_per_s if self._state.used else seen.started_per_s
        return (seen.started_per_s + before) / 2

    def _in_force(self, seen: Signals) -> float:
        decided = self._state.allowance_per_s
        return decided if seen.in_force_per_s is None else min(decided, seen.in_force_per_s)

    def _step_most(self, before: float) -> float:
        """Return how far one raise may go: twice, the midpoint to the last incident's rate, or a small step."""
        good, bad = self._state.good_per_s, self._state.bad_per_s
        if self._state.moved_by == "errors" and good is not None and before < good / 2:
            return good / 2  # a dependency was down, the database was not: resume
        # The start is safe without history; with one, half of what was borne is known better.
        known = self.settings.start_per_s if good is None else min(self.settings.start_per_s, good / 2)
        if before < known:
            return known
        _, worst = self._state.probes.worst
        if bad is None or before > _STEP_NEAR * bad or 0 < worst < _UNBOUND:
            return 2 * before
        return max(_STEP_NEAR * before, min(2 * before, (before + bad) / 2))

    # --- memory

    def _begin_settling(self, cause: str, allowed_per_s: float, *, base_per_s: float) -> None:
        """Wait for a large step to show: estimates from before it, and the next reading, are of the past.

        A cut until then is counted from `base_per_s`, so that cuts do not compound.
        """
        state = self._state
        state.probes.assume_rate(max(allowed_per_s, self.settings.floor_per_s))
        state.moved_age_s, state.moved_by, state.cut_from_per_s = 0.0, cause, base_per_s

    def _learn_bad(self, rate_per_s: float, cause: str) -> None:
        # A dependency that fails says nothing about the rate.
        if cause != "errors":
            self._state.bad_per_s, self._state.bad_age_s = rate_per_s, 0.0

    def _clamp(self, verdict: _Verdict) -> _Verdict:
        ceiling, limit = self.settings.ceiling_per_s, "ceiling"
        if self._state.override_per_s is not None and self._state.override_per_s < ceiling:
            ceiling, limit = self._state.override_per_s, "override"
        floor = min(self.settings.floor_per_s, ceiling)
        if verdict.allowance_per_s >= ceiling:
            return _Verdict(ceiling, limit, f"{limit} {ceiling:.0f}/s reached; {verdict.why}")
        if verdict.allowance_per_s < floor:
            return _Verdict(floor, "floor", f"floor {floor:g}/s; {verdict.why}")
        return verdict

    def _learn(self, seen: Signals, verdict: _Verdict, *, resumed: bool) -> None:
        state = self._state
        healthy = seen.missing is None and verdict.limited_by not in ("timeouts", "errors", "floor")
        if (
            healthy
            and self._used(seen)
            and state.probes.worst[1] <= self.settings.urgent_target
            and not self._settling
        ):
            last = seen.started_per_s if state.good_per_s is None else state.good_per_s
            state.good_per_s = last + 0.3 * (seen.started_per_s - last)
            state.good_age_s = 0.0
        # Before a resumption nothing of ours was in force, so that no cut can be seen in it.
        state.previous_per_s = 0.0 if resumed else state.allowance_per_s
        state.allowance_per_s = verdict.allowance_per_s
        state.started_per_s, state.used = seen.started_per_s, self._used(seen)

    # --- words

    def _explain(self, seen: Signals, verdict: _Verdict) -> Decision:
        state, allowed, cause = self._state, verdict.allowance_per_s, verdict.limited_by
        needs = self._needs_per_s(seen)
        bound = cause.startswith(("saturation", "stale")) or cause in ("timeouts", "errors", "floor")
        safe = allowed if bound else max(allowed, min(state.good_per_s or 0.0, self.settings.ceiling_per_s))
        left = allowed - seen.arrivals_per_s
        drain_s = 0.0 if not seen.depth else seen.depth / left if left > 0 else None
        stuck = state.unsettled >= _STUCK and not seen.paused
        reason = verdict.why
        if seen.depth and needs > safe and cause not in ("paused", "recovering", "demand"):
            reason += f"; objective infeasible: needs {needs:.0f}/s, safe {safe:.0f}/s, bound by {cause}"
        if stuck:
            reason += f"; stuck: {seen.depth:.0f} due, permits there, {state.unsettled} intervals without a completion"
        return Decision(
            allowance_per_s=allowed,
            limited_by=cause,
            reason=reason,
            needs_per_s=needs,
            safe_per_s=safe,
            drain_s=drain_s,
            stuck=stuck,
        )
