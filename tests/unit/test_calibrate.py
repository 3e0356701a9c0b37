"""Targets are proposed from what was seen, and from nothing else."""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from governor.calibrate import calibrate, propose, register, show
from governor.probes import Probes
from tests.probing import FakeProbe


class Seconds:
    """A clock that `sleep` moves; after each sleep `then` runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.then: Callable[[], object] = dict

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        """Let the time pass at once."""
        self.now_s += duration_s
        self.then()


async def test_a_target_is_p99_times_the_margin() -> None:
    """Read once per interval for the whole time, all in the probe's own unit."""
    clock, draw = Seconds(), random.Random(1)  # noqa: S311 - a load, nothing secret
    probe = FakeProbe(clock, name="commit_latency", target=0.025)
    seen: list[float] = []

    def traffic() -> None:
        probe.value = draw.uniform(0.001, 0.01)
        seen.append(probe.value)

    clock.then = traffic
    probes = Probes([probe], interval_s=2, clock=clock)
    (proposal,) = await calibrate(probes, 3600, clock=clock, sleep=clock.sleep)
    assert clock.now_s == 3600
    assert proposal.samples == 1800
    assert proposal.missing == 0
    assert proposal.p99 == sorted(seen)[1781]
    assert proposal.most == max(seen)
    assert proposal.proposed == 0.015
    assert proposal.setting == "GOVERNOR_COMMIT_LATENCY_TARGET_S"


@pytest.mark.parametrize(
    ("values", "reads", "why"),
    [
        ([1.0] * 99, 99, "99 samples"),
        ([1.0] * 900, 1000, "100 of 1000"),
        ([0.0] * 1000, 1000, "were 0"),
        ([], 10, "0 samples"),
    ],
)
def test_nothing_is_proposed_from_what_says_nothing(values: list[float], reads: int, why: str) -> None:
    """Too few, too many missing, or nothing but zeros: the present target stays, and why is said."""
    proposal = propose(FakeProbe(float, name="lock_waiters"), values, reads=reads, margin=1.5)
    assert proposal.proposed is None
    assert why in proposal.why


def test_a_proposal_is_one_that_the_settings_take() -> None:
    """A target has a greatest value, however much is ordinary."""
    proposal = propose(FakeProbe(float, name="lock_waiters", target=5), [9000] * 200, reads=200, margin=1.5)
    assert proposal.proposed == 10_000
    assert "100.0%" in proposal.why


def test_no_target_for_connections_follows_from_those_in_use() -> None:
    """It reads the same at any rate: at 0.92 of such a target a fleet once climbed from 100 to 160/s in a minute."""
    proposal = propose(FakeProbe(float, name="connections", target=0.8), [0.06] * 200, reads=200, margin=1.5)
    assert proposal.proposed is None
    assert "a share" in proposal.why


def test_a_probe_of_the_host_program_has_no_setting() -> None:
    """Its target is proposed all the same."""
    proposal = propose(FakeProbe(float, name="mine"), [7.0] * 200, reads=200, margin=1.5)
    assert (proposal.setting, proposal.proposed) == (None, 11.0)


async def test_a_margin_that_makes_ordinary_traffic_overload_is_refused() -> None:
    """At 1 the law would throttle an ordinary day."""
    clock = Seconds()
    with pytest.raises(ValueError, match="margin"):
        await calibrate(
            Probes([FakeProbe(clock)], interval_s=2), 10, margin=1.0, clock=clock, sleep=clock.sleep
        )


def test_what_was_seen_is_shown_with_lines_for_the_environment() -> None:
    """Numbers, reasons, alerts, and a line to paste for each target that changes."""
    proposals = [
        propose(FakeProbe(float, name="lock_wait"), [0.2] * 200, reads=200, margin=1.5),
        propose(FakeProbe(float, name="lock_waiters"), [0.0] * 200, reads=200, margin=1.5),
    ]
    out = io.StringIO()
    show(proposals, {"prometheus": "Prometheus answers 502"}, Console(file=out, width=120))
    assert "GOVERNOR_LOCK_WAIT_TARGET_S=0.3\n" in out.getvalue()
    assert "GOVERNOR_LOCK_WAITERS" not in out.getvalue()
    assert "prometheus, at the end: Prometheus answers 502" in out.getvalue()


def test_the_command_says_what_is_wrong() -> None:
    """A time-out that does not fit the interval ends it with one sentence."""
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    words = ["calibrate", "--duration-s", "1", "--interval-s", "0.5"]
    result = CliRunner().invoke(
        app, words, env={"GOVERNOR_DATABASE_URL": "postgresql://u:s3cret@127.0.0.1:1/x"}
    )
    assert result.exit_code == 1
    assert "GOVERNOR_PROBE_TIMEOUT_S" in result.output
    assert "s3cret" not in result.output
