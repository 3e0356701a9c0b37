"""The law, trap by trap: what others' limiters got wrong, each under its own name."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, asdict, dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from governor import Decision, Law, LawSettings, Reading

SETTINGS_HIGH = LawSettings(floor_per_s=5, ceiling_per_s=5000, start_per_s=2000, objective_s=30, interval_s=2)
SETTINGS = LawSettings(floor_per_s=5, ceiling_per_s=5000, start_per_s=100, objective_s=30, interval_s=2)


@dataclass
class Fleet:
    """A hungry fleet that uses every permit, on a database whose probe says what the test wants."""

    law: Law = field(default_factory=lambda: Law(SETTINGS))
    at_s: float = 0.0
    last: Decision | None = None

    @property
    def allowance(self) -> float:
        """What is in force, permits/s."""
        return self.last.allowance_per_s if self.last else 0.0

    def step(self, probe: float | None = 0.5, **signals: Any) -> Decision:  # noqa: ANN401 - any field of a reading
        """Let an interval pass; whatever is not named is as in a healthy, busy fleet."""
        self.at_s += 2.0
        started = signals.get("started", self.allowance * 2)
        values = {
            "at_s": self.at_s,
            "interval_s": 2.0,
            "oldest_due_age_s": 60.0,
            "due_depth": 100_000,
            "started": started,
            "completed": started,
            "blocked_ratio": 1.0,
            "allowance_per_s": self.allowance,
            "saturation": {"backends": probe},
        }
        self.last = self.law.step(Reading(**{**values, **signals}))
        return self.last

    def steps(self, n: int, probe: float | None = 0.5, **signals: Any) -> list[float]:  # noqa: ANN401
        """Let n intervals pass, and return the allowances."""
        return [self.step(probe, **signals).allowance_per_s for _ in range(n)]

    def idle(self, n: int) -> list[float]:
        """Let nobody ask for anything."""
        return self.steps(n, 0.3, started=0, blocked_ratio=0.0, due_depth=0)


@pytest.fixture
def busy() -> Fleet:
    """A fleet that has climbed to some hundreds per second and sits at its target there."""
    fleet = Fleet()
    fleet.steps(7, 0.5)
    fleet.steps(8, 0.98)
    assert fleet.allowance > 400
    return fleet


def test_a_start_above_what_is_borne_is_not_jumped_to() -> None:
    """The start is what is safe without history; a database that bore 300/s is not given 1,000/s again and again."""
    fleet = Fleet(Law(LawSettings(floor_per_s=5, ceiling_per_s=20_000, start_per_s=1000, interval_s=2)))
    fleet.steps(2)
    for _ in range(60):
        fleet.step(fleet.allowance / 300)
    settled = [fleet.step(fleet.allowance / 300).allowance_per_s for _ in range(60)]
    assert max(settled) < 1.2 * 300
    assert min(settled) > 0.5 * 300


def test_errors_that_end_are_not_answered_with_the_start(busy: Fleet) -> None:
    """Half of what was good, which may be less."""
    busy.law = Law.restore(SETTINGS_HIGH, {**busy.law.snapshot(), "settings": asdict(SETTINGS_HIGH)})
    good = busy.allowance
    for _ in range(6):
        busy.step(0.3, completed=0, failed=busy.allowance * 2)
    assert busy.allowance < good / 4
    assert max(busy.steps(3, 0.3)) <= good


# --- cuts


def test_cut_is_fast_and_deep(busy: Fleet) -> None:
    """Saturation four times the target, seen twice, leaves at most a quarter within two intervals."""
    before = busy.allowance
    busy.steps(2, 4.0)
    assert busy.last is not None
    assert busy.allowance <= before / 4 + 1
    assert busy.last.limited_by == "saturation:backends"
    assert "4.0x its target" in busy.last.reason


def test_two_probes_confirm_each_other_at_once(busy: Fleet) -> None:
    """A surge that two probes show is cut in the first interval."""
    busy.step(saturation={"backends": 0.98, "commit": 0.7})
    before = busy.allowance
    busy.step(saturation={"backends": 5.0, "commit": 3.0})
    assert busy.allowance < before / 3


def test_one_outlier_must_not_halve(busy: Fleet) -> None:
    """A single 5x value changes nothing; neither does it block for longer than an interval."""
    before = busy.allowance
    assert busy.step(5.0).allowance_per_s == before
    assert busy.step(0.98).allowance_per_s >= 0.95 * before


def test_an_agreeing_probe_vouches_for_little_more_than_itself(busy: Fleet) -> None:
    """A small real rise beside an outlier is cut as a small rise."""
    busy.step(saturation={"backends": 0.98, "commit": 0.7})
    before = busy.allowance
    busy.step(saturation={"backends": 1.5, "commit": 50.0})
    assert before / 3 < busy.allowance < before


def test_one_cut_per_dead_time(busy: Fleet) -> None:
    """What still measures the time before a cut does not cut again, and nothing compounds meanwhile."""
    before = busy.allowance
    busy.steps(2, 2.4)
    first = busy.allowance
    assert first == pytest.approx(before / 2.4, rel=0.01)
    assert busy.step(2.4).allowance_per_s == pytest.approx(first, rel=0.01)
    assert busy.step(2.4).allowance_per_s < 0.6 * first


def test_a_cut_that_shows_is_not_repeated(busy: Fleet) -> None:
    """Queues that are being worked off hold the allowance."""
    busy.steps(2, 10.0)
    first = busy.allowance
    assert [busy.step(probe).allowance_per_s for probe in (8.0, 6.0, 4.0, 2.5, 1.5)] == [first] * 5


def test_limit_from_an_allowance_nobody_used() -> None:
    """A cut counts from what was started, not from what was allowed."""
    fleet = Fleet()
    fleet.steps(8, 0.5)
    allowed = fleet.allowance
    fleet.steps(2, 2.0, started=100.0, blocked_ratio=0.0)
    assert fleet.allowance <= 25.0 < allowed / 2


def test_timeouts_cut_by_their_lower_bound_not_by_five_samples(busy: Fleet) -> None:
    """One timeout of five says nothing; a fifth of a thousand halves."""
    before = busy.allowance
    assert busy.step(0.98, completed=4, timed_out=1).allowance_per_s >= 0.95 * before
    decision = busy.step(0.98, completed=800, timed_out=200)
    assert decision.limited_by == "timeouts"
    assert 0.5 * before < decision.allowance_per_s < 0.75 * before


def test_a_workers_fast_cut_counts(busy: Fleet) -> None:
    """A bucket that some worker cut is not raised by the next decision."""
    before = busy.allowance
    decision = busy.step(0.5, allowance_per_s=before / 2, started=before)
    assert decision.allowance_per_s == pytest.approx(before / 2)
    assert decision.limited_by == "timeouts"


def test_queues_are_worked_off_at_once_and_the_rate_comes_back_to_a_quarter(busy: Fleet) -> None:
    """Forty times the target goes down to a fiftieth; healthy again, a quarter is there at once."""
    busy.steps(8, 0.5)
    before = busy.allowance
    busy.steps(2, 40.0)
    assert busy.allowance < 0.05 * before
    busy.step(20.0)
    assert max(busy.steps(3, 0.5)) >= 0.24 * before


def test_the_quarter_is_forgotten_with_the_episode(busy: Fleet) -> None:
    """After half a minute above the target the old rate says nothing: no raise by more than the start or twice."""
    busy.steps(8, 0.5)
    busy.steps(2, 40.0)
    busy.step(20.0)
    busy.steps(15, 1.1)
    before = busy.allowance
    assert max(busy.steps(2, 0.5)) <= max(SETTINGS.start_per_s, 2 * before)


def test_one_success_after_five_failures_does_not_raise() -> None:
    """At one attempt an interval the last ones count together."""
    fleet = Fleet()
    fleet.step()
    fleet.steps(5, 0.4, completed=0, failed=1)
    before = fleet.allowance
    assert fleet.step(0.4, completed=1, failed=0).allowance_per_s <= before


# --- holding and climbing


def test_hold_in_a_dead_band(busy: Fleet) -> None:
    """Small moves around the target change nothing."""
    before = busy.allowance
    assert busy.steps(4, 0.99) == [before] * 4


def test_maximum_of_noisy_probes_is_not_biased() -> None:
    """Eight probes at the target, 8 % noise each: the allowance stays within 7 % of one probe's."""
    waves = [[1 + 0.08 * math.sin(2.4 * t + p * 0.8) * math.sqrt(2) for p in range(8)] for t in range(60)]
    many, one = Fleet(), Fleet()
    for fleet in (many, one):
        fleet.steps(6, 0.5)
    for values in waves:
        many.step(saturation={f"probe{p}": value for p, value in enumerate(values)})
        one.step(saturation={"probe0": values[0]})
    assert many.allowance > 0.85 * one.allowance


def test_climbing_needs_permits_to_be_the_limit() -> None:
    """However healthy, an allowance that nobody waits for is not raised."""
    fleet = Fleet()
    fleet.step()
    assert fleet.steps(20, 0.1, started=20.0, blocked_ratio=0.0)[-1] <= 100
    assert fleet.steps(20, 0.1, started=20.0, blocked_ratio=1.0)[-1] <= 100


def test_a_raise_at_most_doubles() -> None:
    """From the start on, one interval never more than doubles the allowance."""
    fleet = Fleet()
    fleet.steps(2, 0.01)
    rates = fleet.steps(8, 0.01)
    assert all(later <= 2 * earlier + 1e-9 for earlier, later in pairwise(rates))
    assert rates[-1] > 1000


def test_bigger_steps_far_from_the_target() -> None:
    """The climb slows down as the target comes near."""
    far, near = Fleet(), Fleet()
    for fleet, probe in ((far, 0.4), (near, 0.9)):
        fleet.steps(3, probe)
    assert far.step(0.4).allowance_per_s / 100 > 1.5
    assert near.step(0.9).allowance_per_s / 100 < 1.3


def test_small_steps_near_the_last_incident() -> None:
    """After an incident, climbing slows at the rate where it began."""
    fleet = Fleet()
    fleet.steps(7, 0.5)
    incident = fleet.allowance
    fleet.steps(3, 3.0)
    rates = []
    while fleet.allowance < incident:
        rates.append(fleet.step(0.8).allowance_per_s)
        assert len(rates) < 100
    steps = [b / a for a, b in pairwise(rates) if a > 0.9 * incident]
    assert steps
    assert max(steps) <= 1.06


def test_memory_becoming_a_prison() -> None:
    """The rate of an incident that a healthy database left behind is passed within a minute."""
    fleet = Fleet()
    fleet.steps(7, 0.5)
    incident = fleet.allowance
    fleet.steps(3, 3.0)
    assert max(fleet.steps(12, 0.5)) > 1.5 * incident
    fleet.idle(160)
    assert fleet.law.snapshot()["state"]["bad_per_s"] is None


def test_baseline_drift(busy: Fleet) -> None:
    """A slow rise to twice the target ends at the target of an absolute scale, not at a new normal."""
    before = busy.allowance
    for step in range(120):
        busy.step(min(2.0, 1.0 + step / 60))
    assert busy.allowance < before / 10


# --- age and need


def test_age_first_positive_feedback(busy: Fleet) -> None:
    """Age that grows because a dependency is down never raises."""
    rates = [busy.allowance]
    for step in range(30):
        started = busy.allowance * 2
        busy.step(0.4, oldest_due_age_s=60.0 + 10 * step, completed=0.1 * started, failed=0.9 * started)
        rates.append(busy.allowance)
    assert all(later <= earlier for earlier, later in pairwise(rates))
    assert rates[-1] == SETTINGS.floor_per_s
    assert busy.last is not None
    assert busy.last.limited_by in ("errors", "floor")


def test_age_never_overrides_a_cut(busy: Fleet) -> None:
    """Ten hours of age and ten million due are cut like anything else."""
    before = busy.allowance
    busy.steps(2, 3.0, oldest_due_age_s=36_000.0, due_depth=1e7)
    assert busy.allowance < 0.4 * before


def test_need_is_depth_over_what_is_left_of_the_objective() -> None:
    """Need = depth / max(objective - age, objective / 4)."""
    young = Law(SETTINGS).step(_reading(due_depth=3000, oldest_due_age_s=10.0))
    old = Law(SETTINGS).step(_reading(due_depth=3000, oldest_due_age_s=1000.0))
    assert young.needs_per_s == pytest.approx(3000 / 20)
    assert old.needs_per_s == pytest.approx(3000 / 7.5)


def test_urgency_relaxes_the_target() -> None:
    """At 0.93 of the target a backlog climbs, and a small queue comes down."""
    urgent, calm = Fleet(), Fleet()
    for fleet in (urgent, calm):
        fleet.steps(6, 0.5)
    before = urgent.allowance
    assert calm.allowance == before
    urgent.steps(6, 0.93)
    calm.steps(6, 0.93, due_depth=10, oldest_due_age_s=0.0)
    assert urgent.allowance > before
    assert calm.allowance < before


def test_infeasible_objective_is_said_not_pushed(busy: Fleet) -> None:
    """The decision names what it needs, what is safe, and what binds it."""
    decision = busy.step(1.0, due_depth=1e6)
    assert "objective infeasible: needs 133333/s, safe" in decision.reason
    assert "bound by saturation:backends" in decision.reason
    assert decision.drain_s == pytest.approx(1e6 / decision.allowance_per_s)


def test_drain_says_never_where_arrivals_exceed_the_allowance() -> None:
    """None is never; nothing due is no time at all."""
    assert Law(SETTINGS).step(_reading(arrivals_per_s=1000.0)).drain_s is None
    assert Law(SETTINGS).step(_reading(due_depth=0)).drain_s == 0.0


# --- idle


def test_idle_decays_to_the_start_and_no_lower(busy: Fleet) -> None:
    """After some quiet minutes a burst starts at the tested rate: not higher, and it does not crawl."""
    assert busy.idle(150)[-1] == SETTINGS.start_per_s


def test_idle_keeps_what_the_forecast_peak_needs(busy: Fleet) -> None:
    """PostgreSQL knows the future: the decay stops at the peak second."""
    before = busy.allowance
    busy.steps(300, 0.3, started=0, blocked_ratio=0.0, due_depth=0, arrivals_peak_per_s=250.0)
    assert busy.allowance == pytest.approx(min(before, 250.0))


def test_burst_after_a_quiet_hour_forgets_the_incident(busy: Fleet) -> None:
    """Neither half the last good rate nor the level of an old cut is taken up untested."""
    for probes in ({"completed": 0, "failed": 500}, {"probe": 5.0}):
        busy.steps(6, **probes)
        busy.idle(300)
        assert busy.step(0.3).allowance_per_s <= 2 * SETTINGS.start_per_s


# --- missing signals


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, -1.0])
def test_missing_holds_one_interval_then_falls_to_the_floor(busy: Fleet, bad: float | None) -> None:
    """None, NaN, infinite and negative are all missing, and never raise."""
    before = busy.allowance
    assert busy.step(bad).allowance_per_s == before
    decision = busy.step(bad)
    assert decision.allowance_per_s == SETTINGS.floor_per_s
    assert decision.limited_by == "stale:backends"


@pytest.mark.parametrize("name", ["due_depth", "started", "oldest_due_age_s", "completed", "blocked_ratio"])
def test_a_missing_counter_never_raises(name: str) -> None:
    """Not only probes can be missing."""
    fleet = Fleet()
    fleet.steps(4, 0.5)
    before = fleet.allowance
    assert fleet.step(0.5, **{name: None}).allowance_per_s <= before
    assert fleet.step(0.5, **{name: None}).limited_by == f"stale:{name}"


def test_never_recovering_after_a_missing_metric(busy: Fleet) -> None:
    """Two complete readings after an outage of the signals the climb begins, and it arrives."""
    before = busy.allowance
    busy.steps(60, None)
    assert busy.step(0.5).allowance_per_s == SETTINGS.floor_per_s
    assert busy.step(0.5).allowance_per_s == SETTINGS.start_per_s
    assert max(busy.steps(20, 0.5)) > before


def test_no_start_above_the_target(busy: Fleet) -> None:
    """Back from an outage of the signals onto a sick database: the floor, however long anyone waits."""
    busy.steps(5, None)
    assert busy.steps(10, 1.1) == [SETTINGS.floor_per_s] * 10


def test_a_flapping_metric_never_raises(busy: Fleet) -> None:
    """Every other reading complete is not enough."""
    before = busy.allowance
    for _ in range(10):
        busy.step(0.3)
        busy.step(None)
    assert busy.allowance <= before * 1.5


def test_an_optional_probe_that_vanishes_does_not_raise(busy: Fleet) -> None:
    """The probe that bound the rate is gone: the others do not take over at once."""
    busy.steps(4, saturation={"backends": 0.5, "prometheus": 1.0})
    before = busy.allowance
    rates = busy.steps(3, saturation={"backends": 0.5})
    assert max(rates) <= before
    assert max(busy.steps(10, saturation={"backends": 0.5})) > before


def test_one_dead_optional_probe_does_not_drop_the_fleet(busy: Fleet) -> None:
    """Absent is no outage: the allowance stays."""
    busy.steps(4, saturation={"backends": 0.98, "prometheus": 0.4})
    before = busy.allowance
    assert min(busy.steps(10, saturation={"backends": 0.98})) > 0.9 * before


def test_deadlock_of_no_traffic() -> None:
    """No traffic gives no outcomes and no probes; the floor flows, and traffic brings the rate back."""
    fleet = Fleet()
    fleet.steps(100, started=0, completed=0, blocked_ratio=0.0, due_depth=0, saturation={})
    assert fleet.allowance >= SETTINGS.floor_per_s
    assert fleet.steps(60, saturation={})[-1] > 500


def test_zero_is_a_fine_value() -> None:
    """A probe of 0 is health, not silence (a floor is no probe value)."""
    fleet = Fleet()
    assert fleet.steps(5, 0.0)[-1] > SETTINGS.start_per_s


# --- begin, resume, pause


def test_unlimited_first_minute_after_restart() -> None:
    """A new law allows the floor, then the start, then climbs: never the ceiling at once."""
    fleet = Fleet()
    assert fleet.step(None).allowance_per_s == SETTINGS.floor_per_s
    assert fleet.step(0.1).allowance_per_s == SETTINGS.start_per_s
    assert fleet.step(0.1).allowance_per_s <= 2 * SETTINGS.start_per_s


def test_a_sick_database_is_not_started_on() -> None:
    """Without history and above the target: the floor."""
    assert Fleet().step(3.0).allowance_per_s == SETTINGS.floor_per_s


def test_resume_at_half_the_last_good_rate(busy: Fleet) -> None:
    """After a change of leader: at most half, then a climb."""
    before = busy.allowance
    busy.law = Law.restore(SETTINGS, json.loads(json.dumps(busy.law.snapshot())))
    busy.at_s = -1e5  # another machine's clock
    first = busy.step(0.5, resumed=True, allowance_per_s=SETTINGS.floor_per_s).allowance_per_s
    assert 0.4 * before < first <= 0.51 * before
    assert busy.step(0.5).allowance_per_s >= first


def test_a_resumption_is_no_workers_cut(busy: Fleet) -> None:
    """Before it nothing was published: a low rate in force then is not taken for a cut."""
    first = busy.step(0.5, resumed=True, allowance_per_s=5.0).allowance_per_s
    assert busy.step(0.5, allowance_per_s=0.6 * first, started=first).allowance_per_s >= first


def test_safe_is_not_what_was_good_an_hour_ago(busy: Fleet) -> None:
    """The last good rate ages."""
    busy.idle(100)
    assert busy.last is not None
    assert busy.last.safe_per_s > 2 * SETTINGS.start_per_s
    busy.idle(1900)
    assert busy.last.safe_per_s == SETTINGS.start_per_s


def test_a_leader_that_slept_resumes(busy: Fleet) -> None:
    """A gap in the readings counts like a restart, whatever the leader thinks of itself."""
    before = busy.allowance
    busy.at_s += 60
    assert busy.step(0.98).allowance_per_s <= 0.51 * before


def test_a_sick_database_is_not_resumed_on(busy: Fleet) -> None:
    """Half the last good rate is too much for a database above its target."""
    assert busy.step(3.0, resumed=True).allowance_per_s == SETTINGS.floor_per_s


def test_history_older_than_an_hour_is_none(busy: Fleet) -> None:
    """After two hours the law begins as a new one does."""
    busy.at_s += 7200
    assert busy.step(0.5, resumed=True).allowance_per_s == SETTINGS.start_per_s


def test_history_under_other_settings_is_none(busy: Fleet) -> None:
    """A rate that was good for another target is not taken over."""
    other = LawSettings(floor_per_s=5, ceiling_per_s=5000, start_per_s=50, interval_s=2)
    assert Law.restore(other, busy.law.snapshot()).step(_reading()).allowance_per_s == 50


def test_pause_is_zero_and_the_only_zero(busy: Fleet) -> None:
    """Paused means 0; afterwards at most half of what was, and never at once what was."""
    before = busy.allowance
    decision = busy.step(0.5, paused=True)
    assert (decision.allowance_per_s, decision.limited_by) == (0.0, "paused")
    after = busy.step(0.5, started=0, allowance_per_s=None).allowance_per_s
    assert 0 < after <= 0.51 * before


def test_override_only_lowers_and_ends_by_itself(busy: Fleet) -> None:
    """An override below the ceiling binds at once; one above it changes nothing; without one it climbs back."""
    decision = busy.step(0.9, ceiling_per_s=50.0)
    assert (decision.allowance_per_s, decision.limited_by) == (50.0, "override")
    assert busy.step(0.9, ceiling_per_s=math.nan).allowance_per_s == 50.0
    assert max(busy.steps(20, 0.01, ceiling_per_s=1e9)) == SETTINGS.ceiling_per_s


# --- stuck


def test_throttled_mistaken_for_stuck(busy: Fleet) -> None:
    """No permit there is a throttle; a permit taken and nothing completed is stuck."""
    throttled = [busy.step(0.5, started=0, completed=0) for _ in range(20)]
    assert not any(each.stuck for each in throttled)
    fleet = Fleet()
    fleet.steps(3, 0.5)
    assert [fleet.step(0.5, completed=0).stuck for _ in range(6)][-1]
    assert "stuck" in fleet.step(0.5, completed=0).reason
    assert not fleet.step(0.5).stuck


def test_nothing_due_is_not_stuck() -> None:
    """An idle fleet completes nothing, rightly."""
    fleet = Fleet()
    fleet.idle(20)
    assert fleet.last is not None
    assert not fleet.last.stuck


def test_a_failing_dependency_teaches_nothing_about_the_rate(busy: Fleet) -> None:
    """When it is back, half the last good rate is taken up in one step: the database was never the limit."""
    before = busy.allowance
    busy.steps(20, 0.4, completed=10, failed=90)
    assert busy.allowance == SETTINGS.floor_per_s
    assert max(busy.steps(4, 0.4)) >= 0.45 * before
    assert busy.law.snapshot()["state"]["bad_per_s"] is None


# --- bad data, snapshots, settings

NUMBERS = st.none() | st.floats() | st.integers(-(10**30), 10**30)
READINGS = st.builds(
    Reading,
    at_s=NUMBERS,
    interval_s=NUMBERS,
    oldest_due_age_s=NUMBERS,
    due_depth=NUMBERS,
    started=NUMBERS,
    saturation=st.dictionaries(st.sampled_from(["a", "b", "c"]), NUMBERS, max_size=3),
    allowance_per_s=NUMBERS,
    blocked_ratio=NUMBERS,
    completed=NUMBERS,
    failed=NUMBERS,
    timed_out=NUMBERS,
    arrivals_per_s=NUMBERS,
    arrivals_peak_per_s=NUMBERS,
    in_flight=NUMBERS,
    ceiling_per_s=st.none() | NUMBERS,
    paused=st.booleans(),
    resumed=st.booleans(),
)


@given(readings=st.lists(READINGS, max_size=30), cut=st.integers(0, 29))
def test_any_reading_keeps_the_bounds_and_any_snapshot_is_exact(readings: list[Reading], cut: int) -> None:
    """0 <= allowance <= ceiling, a reason, no exception; a law restored anywhere decides the same from there."""
    law = twin = Law(SETTINGS)
    for index, reading in enumerate(readings):
        if index == cut:
            twin = Law.restore(SETTINGS, json.loads(json.dumps(law.snapshot(), allow_nan=False)))
        decision = law.step(reading)
        assert 0 <= decision.allowance_per_s <= SETTINGS.ceiling_per_s
        assert decision.reason
        assert all(math.isfinite(each) for each in (decision.needs_per_s, decision.safe_per_s))
        if reading.paused:
            assert decision.allowance_per_s == 0
        if index >= cut:
            assert twin.step(reading) == decision


@given(probe=st.floats(0, 5), missing=st.lists(st.sampled_from([None, math.nan, math.inf, -1.0]), min_size=2))
def test_bad_values_never_raise_whatever_went_before(probe: float, missing: list[float | None]) -> None:
    """From any state, unreadable probes only lower."""
    fleet = Fleet()
    fleet.steps(5, 0.5)
    fleet.steps(3, probe)
    before = fleet.allowance
    for bad in missing:
        after = fleet.step(bad).allowance_per_s
        assert after <= before
        before = after
    assert before == SETTINGS.floor_per_s


def test_same_readings_same_decisions(busy: Fleet) -> None:
    """Replay is exact: no clock, no randomness."""
    snapshot = busy.law.snapshot()
    readings = [_reading(at_s=busy.at_s + 2 * n, saturation={"backends": 0.8 + 0.05 * n}) for n in range(10)]
    first, second = (
        [law.step(reading) for reading in readings]
        for law in (Law.restore(SETTINGS, snapshot), Law.restore(SETTINGS, snapshot))
    )
    assert first == second


def test_a_snapshot_is_no_window_into_the_law(busy: Fleet) -> None:
    """What is done to a snapshot afterwards does not reach the law, nor the law a snapshot."""
    snapshot = busy.law.snapshot()
    kept = json.dumps(snapshot)
    busy.steps(5, 3.0)
    assert json.dumps(snapshot) == kept


@pytest.mark.parametrize("snapshot", [{}, {"settings": None}, {"state": {}}, []])
def test_what_is_no_snapshot_is_refused(snapshot: Any) -> None:  # noqa: ANN401 - whatever a file may hold
    """A journal of something else is an error, not a law without history."""
    with pytest.raises(ValueError, match="not the snapshot of a law"):
        Law.restore(SETTINGS, snapshot)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"floor_per_s": 0}, "floor_per_s must be 0.001..20000 .ceiling_per_s., not 0"),
        ({"floor_per_s": 200.0}, "start_per_s must be 200"),
        ({"ceiling_per_s": 50.0}, "start_per_s must be 5..50"),
        ({"ceiling_per_s": math.inf}, "ceiling_per_s must be a finite number, not inf"),
        ({"objective_s": -1}, "objective_s must be 0.1"),
        ({"interval_s": True}, "interval_s must be a finite number, not True"),
        ({"target": 1.1}, "target must be 0.1..1"),
        ({"urgent_target": "1"}, "urgent_target must be a finite number, not '1'"),
    ],
)
def test_settings_name_what_is_wrong(wrong: dict[str, Any], message: str) -> None:
    """Each field by itself, then the order floor <= start <= ceiling and target <= urgent_target."""
    with pytest.raises(ValueError, match=message):
        LawSettings(**wrong)


def test_decisions_are_frozen() -> None:
    """A journalled decision stays what it was."""
    decision = Law(SETTINGS).step(_reading())
    with pytest.raises(FrozenInstanceError):
        decision.allowance_per_s = 1.0  # type: ignore[misc]


def _reading(**signals: Any) -> Reading:  # noqa: ANN401
    values = {
        "at_s": 0.0,
        "interval_s": 2.0,
        "oldest_due_age_s": 60.0,
        "due_depth": 1000,
        "started": 0,
        "saturation": {"backends": 0.5},
    }
    return Reading(**{**values, **signals})
