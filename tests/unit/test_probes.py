"""What of a sample is believed, and what one outlier cannot do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from governor.probes import OVERLOADED, GrantMissingError, ProbeMissingError, ProbeOverloadedError, Probes
from tests.probing import FakeProbe

INTERVAL_S = 2.0


class Seconds:
    """A clock that a test moves by intervals."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


@pytest.fixture
def seconds() -> Seconds:
    """Give the test its own time."""
    return Seconds()


@pytest.fixture
def probe(seconds: Seconds) -> FakeProbe:
    """Give the test a probe that it tells what to say."""
    return FakeProbe(seconds)


@pytest.fixture
def probes(probe: FakeProbe, seconds: Seconds) -> Probes:
    """Give the test a prober of that one probe."""
    return Probes([probe], interval_s=INTERVAL_S, clock=seconds)


async def reads(probes: Probes, probe: FakeProbe, seconds: Seconds, *values: float) -> list[float | None]:
    """Read one value after the other, an interval apart."""
    seen = []
    for value in values:
        probe.value = value
        seconds.now_s += INTERVAL_S
        seen.append((await probes.read()).get(probe.name))
    return seen


async def test_saturation_is_value_over_target(probes: Probes, probe: FakeProbe, seconds: Seconds) -> None:
    """A probe at its target reads 1, whatever its unit; the value itself is kept for explaining."""
    probe.target = 0.02
    assert await reads(probes, probe, seconds, 0.02) == [1.0]
    assert probes.values == {"fake": 0.02}
    assert probes.alerts == {}


async def test_zero_is_a_fine_value(probes: Probes, probe: FakeProbe, seconds: Seconds) -> None:
    """0 is read, not missed."""
    assert await reads(probes, probe, seconds, 0.0, 0.0) == [0.0, 0.0]


@given(st.lists(st.floats(0.1, 1.0), min_size=5, max_size=12), st.data())
async def test_a_single_outlier_changes_nothing(values: list[float], data: st.DataObject) -> None:
    """One value five times as high, anywhere but first, lifts no reading above those around it."""
    seconds = Seconds()
    probe = FakeProbe(seconds)
    probes = Probes([probe], interval_s=INTERVAL_S, clock=seconds)
    at = data.draw(st.integers(1, len(values) - 1))
    seen = await reads(probes, probe, seconds, *values[:at], 5 * values[at], *values[at + 1 :])
    assert max(each or 0.0 for each in seen) <= max(values)


async def test_a_step_shows_with_its_second_sample(
    probes: Probes, probe: FakeProbe, seconds: Seconds
) -> None:
    """What stays is not smoothed away: two intervals after a step most of it is read."""
    seen = await reads(probes, probe, seconds, 0.5, 0.5, 0.5, 2.5, 2.5, 2.5)
    assert seen[:4] == [0.5] * 4
    assert seen[4] == pytest.approx(0.5 + 0.7 * 2.0)
    assert (seen[5] or 0) > 2.2


async def test_a_value_far_above_its_target_is_forgotten_soon(
    probes: Probes, probe: FakeProbe, seconds: Seconds
) -> None:
    """A lock that was waited for all night does not count for longer than one of a minute."""
    probe.high = 1e6
    seen = await reads(probes, probe, seconds, *[40_000.0] * 3, *[0.0] * 5)
    assert seen[2] == pytest.approx(10.0)
    assert (seen[-1] or 0) < 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.001, 1000.1, True, "7", None])
async def test_an_implausible_value_is_missing(
    probes: Probes, probe: FakeProbe, seconds: Seconds, value: float
) -> None:
    """What lies outside the declared range, or is no number, is no reading and says so."""
    assert await reads(probes, probe, seconds, 1.0, value) == [1.0, None]
    assert "implausible" in probes.alerts["fake"]
    assert probes.values == {}


@pytest.mark.parametrize("age_s", [4.1, -0.1])
async def test_a_late_sample_is_missing(
    probes: Probes, probe: FakeProbe, seconds: Seconds, age_s: float
) -> None:
    """A sample older than its TTL, or from the future, is no reading."""
    probe.age_s = age_s
    assert await reads(probes, probe, seconds, 1.0) == [None]
    assert "late" in probes.alerts["fake"]


async def test_a_sample_that_does_not_advance_is_missing(
    probes: Probes, probe: FakeProbe, seconds: Seconds
) -> None:
    """The same sample twice is a sensor that stopped, even within its TTL; a newer one is believed again."""
    await reads(probes, probe, seconds, 1.0)
    probe.age_s = INTERVAL_S
    assert await reads(probes, probe, seconds, 1.0) == [None]
    assert "advance" in probes.alerts["fake"]
    probe.age_s = 0.0
    assert await reads(probes, probe, seconds, 0.5) == [0.5]
    assert probes.alerts == {}


async def test_an_optional_probe_that_is_missing_is_absent(
    probes: Probes, probe: FakeProbe, seconds: Seconds
) -> None:
    """It raises an alert and does not drop the fleet to its floor."""
    probe.required, probe.error = False, ProbeMissingError("the sensor is away")
    seconds.now_s += INTERVAL_S
    assert await probes.read() == {}
    assert probes.alerts == {"fake": "the sensor is away"}


@pytest.mark.parametrize(
    "error", [ProbeOverloadedError("too many clients"), TimeoutError(), ConnectionRefusedError()]
)
async def test_a_time_out_or_refusal_reads_above_the_target(
    probes: Probes, probe: FakeProbe, seconds: Seconds, error: Exception
) -> None:
    """What does not answer is overloaded until it says otherwise, required or not."""
    await reads(probes, probe, seconds, 0.5, 0.5)
    probe.error, probe.required = error, False
    first, second, third = await reads(probes, probe, seconds, 0, 0, 0)
    assert first == 0.5, "one lost packet is an outlier as well"
    assert 1.5 < (second or 0) < (third or 0) <= OVERLOADED
    assert probes.alerts["fake"]
    assert probes.values == {}


async def test_no_answer_is_no_better_than_the_last_one(
    probes: Probes, probe: FakeProbe, seconds: Seconds
) -> None:
    """A database at five times its target that stops to answer does not read as two."""
    await reads(probes, probe, seconds, 5.0, 5.0, 5.0)
    probe.error = TimeoutError()
    assert await reads(probes, probe, seconds, 0, 0, 0) == [pytest.approx(5.0)] * 3


async def test_a_probe_that_hangs_reads_above_the_target(seconds: Seconds) -> None:
    """A read lasts one interval at most, and the other probes are read meanwhile."""
    stuck, other = FakeProbe(seconds, name="stuck", hangs=True), FakeProbe(seconds, name="other", value=0.3)
    probes = Probes([stuck, other], interval_s=0.02, clock=seconds)
    assert await probes.read() == {"stuck": OVERLOADED, "other": 0.3}


async def test_a_probe_that_breaks_is_missing_and_tells_no_secret(
    probes: Probes, probe: FakeProbe, seconds: Seconds
) -> None:
    """Anybody's probe may raise anything: the others go on, and its message is not repeated."""
    probe.error = RuntimeError("cannot log in with password s3cret")
    assert await reads(probes, probe, seconds, 0) == [None]
    assert probes.alerts == {"fake": "failed: RuntimeError"}


async def test_what_was_before_a_gap_says_nothing(probes: Probes, probe: FakeProbe, seconds: Seconds) -> None:
    """The first sample after a gap is not smoothed with those before it."""
    await reads(probes, probe, seconds, 0.1, 0.1, 0.1, float("nan"))
    assert await reads(probes, probe, seconds, 3.0) == [3.0]


class OneSource:
    """Counts its starts and closes."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[str] = []

    async def start(self) -> None:
        """Start, or raise."""
        self.calls.append("start")
        if self.error:
            raise self.error

    async def close(self) -> None:
        """Close."""
        self.calls.append("close")


def _with(source: OneSource, seconds: Seconds, name: str) -> FakeProbe:
    probe = FakeProbe(seconds, name=name)
    probe.source = source  # type: ignore[attr-defined] # as probes of a database have one
    return probe


async def test_a_source_that_probes_share_starts_once(seconds: Seconds) -> None:
    """Two probes on one connection open and close it once."""
    source = OneSource()
    async with Probes(
        [_with(source, seconds, "a"), _with(source, seconds, "b")], interval_s=2, clock=seconds
    ):
        assert source.calls == ["start"]
    assert source.calls == ["start", "close"]


async def test_a_start_that_fails_leaves_nothing_open(seconds: Seconds) -> None:
    """If a role lacks its grant, the connections opened before are closed."""
    fine, refused = OneSource(), OneSource(GrantMissingError("GRANT pg_read_all_stats TO expiry"))
    probes = Probes([_with(fine, seconds, "a"), _with(refused, seconds, "b")], interval_s=2, clock=seconds)
    with pytest.raises(GrantMissingError, match="GRANT"):
        await probes.start()
    assert fine.calls == ["start", "close"]


@pytest.mark.parametrize(
    "wrong", [{"target": 0}, {"target": float("nan")}, {"low": 2, "high": 1}, {"ttl_s": 0}]
)
def test_a_probe_that_cannot_be_read_is_refused(wrong: dict[str, float], seconds: Seconds) -> None:
    """A target of nothing, or a range that is none, names the probe."""
    with pytest.raises(ValueError, match="fake"):
        Probes([FakeProbe(seconds, **wrong)], interval_s=2)  # type: ignore[arg-type]


def test_two_probes_of_one_name_are_refused(seconds: Seconds) -> None:
    """A name is a key: the second would replace the first unseen."""
    with pytest.raises(ValueError, match="one name"):
        Probes([FakeProbe(seconds), FakeProbe(seconds)], interval_s=2)
