"""The controller on real servers: one leads, reads, decides, publishes and journals; the others wait."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY
from redis.asyncio import Redis

from governor import Attempts, Law, Outcomes, PostgresBucket
from governor import lease as leases
from governor.commands import export
from governor.journal import as_decision
from governor.replay import read_lines, repeat
from tests.fleet import Counted
from tests.governing import (
    FLEET,
    INTERVAL_S,
    KEY,
    SETTINGS,
    Fleet,
    Pool,
    Probes,
    decided,
    led_by,
    running,
    until,
)
from tests.helpers import eventually


@pytest.fixture
def fleet(pool: Pool, redis: Redis) -> Fleet:
    """Give a fleet with both stores."""
    return Fleet(pool, redis)


@pytest.fixture
def rows(pool: Pool) -> Fleet:
    """Give a fleet without Redis."""
    return Fleet(pool, None)


# --- one decision


async def test_a_first_leader_starts_at_the_floor_then_at_the_start(fleet: Fleet) -> None:
    """Without history: the floor flows until one reading is complete; then the start, at the bucket."""
    one = fleet.controller("one")
    decision = await decided(one)
    assert (decision.allowance_per_s, decision.limited_by) == (SETTINGS.law.start_per_s, "recovering")
    state = await fleet.primary().read()
    assert (state.allowance_per_s, state.epoch) == (100, 1)
    assert (await fleet.row().read()).epoch == 0


async def test_without_redis_the_row_is_governed(rows: Fleet) -> None:
    """Sweep mode: the row has the allowance from the first decision on."""
    await decided(rows.controller("one"))
    assert (await rows.row().read()).allowance_per_s == 100


async def test_a_published_allowance_outlives_the_lease_and_ends_at_the_floor(fleet: Fleet) -> None:
    """TTL >= 3 intervals, longer than the lease; after that the floor flows, whoever is gone."""
    await decided(fleet.controller("one"))
    lease = await leases.read(fleet.pool, FLEET)
    state = await fleet.primary().read()
    assert lease is not None
    left_s = (state.until - state.micros) / 1_000_000
    assert left_s > max(lease.left_s, 3 * INTERVAL_S)

    async def at_the_floor() -> bool:
        return (await fleet.primary().read()).allowance_per_s == SETTINGS.floor_per_s

    await eventually(at_the_floor)


async def test_a_reading_says_what_the_fleet_did(fleet: Fleet) -> None:
    """Permits spent less refunds, unmet requests, outcomes of every process, the allowance that was in force."""
    mine, others = Outcomes(), Outcomes()
    one = fleet.controller("one", outcomes=mine, settings=SETTINGS.model_copy(update={"interval_s": 1.0}))
    other = fleet.controller("other", outcomes=others)
    await decided(one)
    bucket = fleet.primary()
    await asyncio.sleep(0.05)
    granted = (await bucket.take(1000)).granted
    await bucket.refund(1)
    await bucket.charge(2)
    mine.note(completed=3, failed=1)
    others.note(timed_out=2, completed=4)
    await other.tick()
    await one.tick()
    reading = (await fleet.journal(1))[0].read
    assert reading.started == granted + 1
    assert reading.blocked_ratio is not None
    assert 0 < reading.blocked_ratio <= 1
    assert (reading.completed, reading.failed, reading.timed_out) == (7, 1, 2)
    assert reading.allowance_per_s is not None
    assert 80 < reading.allowance_per_s <= 100  # the floor until the first decision, a moment ago
    assert (reading.due_depth, reading.oldest_due_age_s) == (1000, 10)


async def test_a_fast_cut_is_seen_in_the_allowance(fleet: Fleet) -> None:
    """Time-weighted: what was in force before and after the cut, each as long as it was."""
    one = fleet.controller("one")
    await decided(one)
    before = await fleet.primary().read()
    cut = await fleet.primary().cut(factor=0.1, dead_time_s=2 * INTERVAL_S)
    assert cut.applied
    at = await fleet.primary().read()
    await one.tick()
    reading = (await fleet.journal(1))[0].read
    assert reading.allowance_per_s is not None
    assert 10 <= reading.allowance_per_s <= 100
    assert at.cut_until - before.micros > 0


async def test_outcomes_that_could_not_be_reported_are_reported_later(fleet: Fleet) -> None:
    """An outage of the bucket loses none."""
    outcomes = Outcomes()
    one = fleet.controller("one", outcomes=outcomes)
    await decided(one)
    outcomes.note(completed=5)
    async with Redis(port=1) as nobody:
        away = Fleet(fleet.pool, nobody).controller("two", outcomes=outcomes)
        await away.tick()
    await one.tick()
    assert (await fleet.journal(1))[0].read.completed == 5


# --- probes


async def test_probes_run_while_leading_only(fleet: Fleet) -> None:
    """A candidate loads nothing; the leader reads them; they end with the leadership."""
    mine, others = Probes({"cpu": 0.4, "p99": None}), Probes()
    one, other = fleet.controller("one", probes=mine), fleet.controller("other", probes=others)
    decision = await decided(one)
    await other.tick()
    assert (mine.running, others.running) == (True, False)
    assert (await fleet.journal(1))[0].read.saturation == {"cpu": 0.4, "p99": None}
    assert decision.limited_by == "stale:p99"
    await one.close()
    assert not mine.running


async def test_a_role_without_the_grant_is_governed_by_errors_and_timeouts(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """The fleet starts, and the log says what is missing."""
    probes = Probes({"cpu": 9}, error=PermissionError("GRANT pg_read_all_stats TO expiry"))
    decision = await decided(fleet.controller("one", probes=probes))
    assert decision.allowance_per_s == 100
    assert "errors and timeouts alone: GRANT pg_read_all_stats" in caplog.text


# --- one of many


async def test_two_candidates_have_one_leader(fleet: Fleet) -> None:
    """Of any number one leads, and everyone keeps to its decisions."""
    controllers = [fleet.controller(str(n)) for n in range(4)]
    async with running(*controllers):
        await eventually(until(lambda: any(each.leads for each in controllers)))
        for _ in range(20):
            assert len(await led_by(controllers)) == 1
            await asyncio.sleep(INTERVAL_S / 4)
    assert {entry.epoch for entry in await fleet.journal()} == {1}


async def test_a_leader_that_stops_hands_over_at_once(fleet: Fleet) -> None:
    """The lease is given back: the next one leads within an interval, at half the last good rate."""
    one, two = fleet.controller("one"), fleet.controller("two")
    await decided(one)
    await two.tick()
    assert not two.leads
    await one.close()
    await two.tick()
    assert (two.leads, two.epoch) == (True, 2)


@pytest.mark.parametrize("ahead_s", [0.0, -1e5, 1e5], ids=str)
async def test_a_new_leader_resumes_at_half_the_last_good_rate(fleet: Fleet, ahead_s: float) -> None:
    """State comes from the journal; what was good counts half, however long the new leader's host is up."""
    one = fleet.controller("one")
    await decided(one)
    good = await _climb(one, fleet)
    await one.close()
    two = fleet.controller("two", clock_s=lambda: time.monotonic() + ahead_s)
    decision = await decided(two)
    assert "resumed at" in decision.reason
    assert "no last good rate" not in decision.reason
    assert 5 < decision.allowance_per_s <= good / 2


async def _climb(one: object, fleet: Fleet) -> float:
    """Use all permits until the leader knows a good rate; returns the best allowance."""
    best, bucket = 0.0, fleet.primary()
    probes = Probes({"cpu": 0.3})
    one._readings.probes, one._readings._started = probes, True  # type: ignore[attr-defined]  # noqa: SLF001
    for _ in range(12):
        for _ in range(10):
            await bucket.take(1000)
            await asyncio.sleep(INTERVAL_S / 10)
        decision = await decided(one)  # type: ignore[arg-type]
        best = max(best, decision.allowance_per_s)
    assert best > 100
    return best


@pytest.mark.parametrize("why", ["old", "other settings", "unreadable"])
async def test_history_that_does_not_count_is_not_used(fleet: Fleet, why: str) -> None:
    """Older than an hour, under other settings, of another program: the floor, then the start."""
    one = fleet.controller("one")
    await decided(one)
    await one.close()
    if why == "old":
        await fleet.pool.execute("UPDATE governor_journal SET decided_at = now() - interval '3601 s'")
    if why == "unreadable":
        await fleet.pool.execute("UPDATE governor_journal SET snapshot = '{}'")
    settings = SETTINGS.model_copy(update={"start_per_s": 70.0} if why == "other settings" else {})
    decision = await decided(fleet.controller("two", settings=settings))
    assert decision.allowance_per_s == settings.law.start_per_s
    assert "no history" in decision.reason


async def test_the_journal_repeats_each_decision(fleet: Fleet) -> None:
    """A row is enough: the law restored from it decides the same on its reading, to the last digit."""
    one = fleet.controller("one", probes=Probes({"cpu": 0.123456789012345}))
    async with running(one):
        for _ in range(40):
            await fleet.primary().take(20)
            await asyncio.sleep(INTERVAL_S / 4)
    entries = await fleet.journal()
    assert len(entries) > 5
    for entry in entries:
        law = Law.restore(SETTINGS.law, entry.snapshot)
        assert as_decision(law.step(entry.read)) == entry.decision
        assert replace(entry, decided_at=None) == replace(entry.of_line(entry.as_line()), decided_at=None)


async def test_the_journal_is_capped(fleet: Fleet) -> None:
    """By rows and by age, a thousand a time."""
    one = fleet.controller("one", settings=SETTINGS.model_copy(update={"journal_rows_max": 10}))
    await decided(one)
    await fleet.pool.execute(
        "INSERT INTO governor_journal"
        " (name, holder, epoch, mode, settings_hash, reading, snapshot, decision, orders, notes)"
        " SELECT name, holder, epoch, mode, settings_hash, reading, snapshot, decision, orders, notes"
        " FROM governor_journal, generate_series(1, 1500)"
    )
    for _ in range(120):
        await one.tick()
    assert await fleet.pool.fetchval("SELECT count(*) FROM governor_journal") <= 501 + 120
    for _ in range(60):
        await one.tick()
    assert await fleet.pool.fetchval("SELECT count(*) FROM governor_journal") <= 10 + 60


# --- modes


async def test_observe_decides_and_changes_nothing(fleet: Fleet) -> None:
    """Decisions are in the journal; the bucket keeps what somebody else gave it."""
    await fleet.primary().publish(allowance_per_s=700, ttl_s=60, epoch=0)
    one = fleet.controller("one", settings=SETTINGS.model_copy(update={"mode": "observe"}))
    await decided(one)
    state = await fleet.primary().read()
    assert (state.allowance_per_s, state.epoch) == (700, 0)
    assert (await fleet.journal(1))[0].mode == "observe"


async def test_a_shadow_is_journalled_and_never_enforced(fleet: Fleet) -> None:
    """The candidate sees the same readings; what it decides counts nowhere."""
    one = fleet.controller("one", settings=SETTINGS.model_copy(update={"shadow": "start_per_s=50"}))
    decision = await decided(one)
    [entry] = await fleet.journal(1)
    assert entry.shadow is not None
    assert (decision.allowance_per_s, entry.shadow["allowance_per_s"]) == (100, 50)
    assert (await fleet.primary().read()).allowance_per_s == 100


@pytest.mark.parametrize("law", ["Broken", "Endless"])
async def test_a_shadow_that_fails_harms_nothing(fleet: Fleet, law: str) -> None:
    """Its row says that there was none, also where what it decided is no JSON."""
    settings = SETTINGS.model_copy(update={"shadow": f"tests.governing:{law}"})
    assert (await decided(fleet.controller("one", settings=settings))).allowance_per_s == 100
    assert (await fleet.journal(1))[0].shadow is None


async def test_looks_at_two_buckets_make_no_interval(fleet: Fleet, rows: Fleet) -> None:
    """The allowance is still in PostgreSQL when a process starts that looks for it in Redis."""
    one = rows.controller("one")
    await decided(one)
    await rows.row().charge(5000)
    await one.close()
    two = fleet.controller("two")
    for _ in range(4):
        await decided(two)
    assert [entry.read.started for entry in await fleet.journal(4)] == [0, 0, 0, 0]


async def test_totals_are_the_fleets(fleet: Fleet) -> None:
    """Both shared forms keep them beside the bucket, from whoever reports."""
    for bucket in (fleet.primary(), PostgresBucket(fleet.pool, KEY, floor_per_s=5)):
        await bucket.report(Attempts(completed=2, failed=1))
        assert await bucket.report(Attempts(completed=1, timed_out=4)) == Attempts(
            completed=3, failed=1, timed_out=4
        )
        assert (await bucket.take(1)).granted == 0


# --- metrics


async def test_a_leader_shows_what_it_decides_and_another_does_not(fleet: Fleet) -> None:
    """Item by item while it leads; once it does not, only what every process sees."""
    one = fleet.controller("one", probes=Probes({"cpu": 0.5, "p99": None}))
    counted = Counted()
    await decided(one)
    shown = samples()
    assert shown["governor_leader"] == shown["governor_epoch"] == 1
    assert (shown["governor_allowance_permits_per_second"], shown["governor_floor_permits_per_second"]) == (
        5,
        5,
    )
    assert shown["governor_ceiling_permits_per_second"] == 1000
    assert shown["governor_needs_permits_per_second"] == pytest.approx(50)
    assert shown['governor_signal_saturation_ratio{signal="cpu"}'] == 0.5
    assert math.isnan(shown['governor_signal_saturation_ratio{signal="p99"}'])
    causes = {name: value for name, value in shown.items() if name.startswith("governor_limited_by{")}
    assert [name for name, value in causes.items() if value] == ['governor_limited_by{cause="stale"}']
    assert len(causes) == 10
    assert counted("governor_decisions_total", direction="hold", reason="stale") == 1
    assert time.time() - shown["governor_last_decision_timestamp_seconds"] < 10
    assert shown[f'governor_settings_info{{hash="{SETTINGS.hash}"}}'] == 1
    await one.close()
    shown = samples()
    assert shown["governor_leader"] == 0
    assert math.isnan(shown["governor_allowance_permits_per_second"])
    assert not [name for name in shown if name.startswith(("governor_limited_by{", "governor_signal"))]


async def test_a_process_with_other_settings_says_so(fleet: Fleet) -> None:
    """The leader writes down the hash of its settings; whoever has others raises a metric."""
    one = fleet.controller("one", settings=SETTINGS.model_copy(update={"interval_s": 5.0}))
    await decided(one)
    await fleet.controller("two").tick()
    assert samples()["governor_settings_differ"] == 1
    await fleet.controller("three", settings=SETTINGS.model_copy(update={"interval_s": 5.0})).tick()
    assert samples()["governor_settings_differ"] == 0


def samples() -> dict[str, float]:
    """Return what a scrape would show."""
    found = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


async def test_an_exported_journal_is_run_again(fleet: Fleet, database_url: str) -> None:
    """From the table through a file to `governor replay`: nothing differs, whoever led."""
    for holder in ("one", "two"):
        one = fleet.controller(holder, probes=Probes({"cpu": 0.3}))
        for _ in range(4):
            await fleet.primary().take(50)
            await decided(one)
        await one.close()
    lines: list[str] = []
    assert await export(database_url, name=FLEET, limit=5, write=lines.append) == 5
    assert await export(database_url, name=FLEET, limit=100, write=lines.append) == 8
    entries = list(read_lines(lines))
    assert [entry.holder for entry in entries[5:]] == ["one"] * 4 + ["two"] * 4
    assert list(repeat(entries)) == []
