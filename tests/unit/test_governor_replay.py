"""A journal is run again: exactly with its own law, and with candidates as a gate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from governor import Law, LawSettings, Reading
from governor.__main__ import app
from governor.journal import Entry, as_decision, as_reading
from governor.replay import read_lines, repeat, rerun

SETTINGS = LawSettings(floor_per_s=5, ceiling_per_s=5000, start_per_s=100)


def journal_of(readings: list[Reading]) -> list[Entry]:
    """Step a law, and keep all of it as the controller does."""
    law, entries = Law(SETTINGS), []
    for number, reading in enumerate(readings, start=1):
        snapshot = law.snapshot()
        decision = law.step(reading)
        entries.append(
            Entry(
                id=number,
                holder="one",
                epoch=1,
                mode="enforce",
                settings_hash="",
                reading=as_reading(reading),
                snapshot=snapshot,
                decision=as_decision(decision),
                shadow=None,
                orders=[],
                notes={},
            )
        )
    return entries


def incident() -> list[Reading]:
    """A climb, a dependency that fails, a recovery: thirty intervals."""
    allowed, readings = 5.0, []
    law = Law(SETTINGS)
    for n in range(30):
        failing = 10 <= n < 15
        reading = Reading(
            at_s=2.0 * n,
            interval_s=2,
            oldest_due_age_s=10 + n / 3,
            due_depth=5000,
            started=round(2 * allowed),
            saturation={"cpu": 0.1 + allowed / 1000, "p99": None if n == 20 else 0.3},
            allowance_per_s=allowed,
            blocked_ratio=0.9,
            completed=round(2 * allowed * (0.1 if failing else 1)),
            failed=round(2 * allowed * (0.9 if failing else 0)),
        )
        readings.append(reading)
        allowed = law.step(reading).allowance_per_s
    return readings


@pytest.fixture
def entries() -> list[Entry]:
    """Give the incident's journal."""
    return journal_of(incident())


def test_the_same_law_decides_the_same(entries: list[Entry]) -> None:
    """Through lines of JSON and back, to the last digit."""
    lines = [entry.as_line() for entry in entries]
    assert list(repeat(read_lines(lines))) == []
    assert len({entry.decided.allowance_per_s for entry in entries}) > 8


def test_a_part_of_a_journal_is_enough(entries: list[Entry]) -> None:
    """Each row has the state before it: what was deleted is not missed."""
    assert list(repeat(entries[17:])) == []
    assert list(rerun(entries[17:], changes="objective_s=30", tolerance=0.01)) == []


def test_a_changed_decision_is_found(entries: list[Entry]) -> None:
    """Whatever part of it: here its reason."""
    entries[3] = replace(entries[3], decision={**entries[3].decision, "reason": "because"})
    [difference] = repeat(entries)
    assert difference.line == 4
    assert "because" in str(difference)


def test_a_candidate_differs_where_it_would_decide_otherwise(entries: list[Entry]) -> None:
    """A lower ceiling differs once the allowance passes it, and not before."""
    found = list(rerun(entries, changes="ceiling_per_s=300"))
    assert found
    assert found[0].entry.decided.allowance_per_s > 300
    assert found[0].decided.limited_by == "ceiling"


class Fixed:
    """A law of another kind: it allows what it is told to, for ever."""

    def __init__(self, settings: LawSettings) -> None:
        self._law = Law(settings)

    def step(self, reading: Reading) -> object:
        """Decide."""
        return replace(self._law.step(reading), allowance_per_s=100.0)


# --- the command


def run(*args: str) -> tuple[int, str]:
    """Run `governor`."""
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.output


@pytest.fixture
def file(entries: list[Entry], tmp_path: Path) -> str:
    """Give the incident's journal as a file."""
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(entry.as_line() + "\n" for entry in entries))
    return str(path)


def test_the_command_is_a_gate(file: str) -> None:
    """0: nothing differs; 1: something does, and each line says what; 2: that is no journal."""
    assert run("replay", file) == (0, "30 decisions, 0 differ\n")
    code, output = run("replay", file, "--set", "ceiling_per_s=300")
    assert code == 1
    assert "300/s (ceiling:" in output
    assert run("replay", file, "--set", "ceiling_per_s=300", "--tolerance", "1")[0] == 0
    assert run("replay", file, "--law", f"{__name__}:Fixed")[0] in (1, 2)


@pytest.mark.parametrize("args", [["--set", "speed=3"], ["--set", "floor_per_s=x"], ["--law", "nowhere:Law"]])
def test_what_is_no_candidate_is_refused(file: str, args: list[str]) -> None:
    """In one sentence, with status 2."""
    code, output = run("replay", file, *args)
    assert code == 2
    assert output.startswith("governor: ")


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    """With the number of the line."""
    path = tmp_path / "journal.jsonl"
    path.write_text('\n{"a": 1}\n')
    code, output = run("replay", str(path))
    assert (code, "line 2" in output) == (2, True)
    assert run("replay", str(tmp_path / "none"))[0] == 2
