"""What is measured comes from the environment, and is checked as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from governor.probes.build import TARGETS, build
from governor.probes.settings import ProbeSettings

URL = "postgresql://localhost/shop"
DOCS = Path(__file__).parents[2] / "docs" / "probes.md"


def names(settings: ProbeSettings, **given: object) -> list[str]:
    """Return the probes that settings ask for."""
    probes = build(settings, database_url=URL, interval_s=2, **given)  # type: ignore[arg-type]
    return sorted(probe.name for probe in probes.probes)


def test_the_defaults_measure_the_database() -> None:
    """Without any setting everything that needs nothing else is read."""
    assert names(ProbeSettings()) == [
        "active_backends", "commit_latency", "connections", "lock_wait", "lock_waiters", "replication_lag",
    ]  # fmt: skip


def test_the_environment_turns_probes_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is a target, `off` is no probe."""
    monkeypatch.setenv("GOVERNOR_FOREIGN_ACTIVE_TARGET", "7")
    monkeypatch.setenv("GOVERNOR_COMMIT_LATENCY_TARGET_S", "off")
    monkeypatch.setenv("GOVERNOR_LOCK_WAIT_TARGET_S", "off")
    settings = ProbeSettings()
    assert names(settings) == [
        "active_backends", "connections", "foreign_active", "lock_waiters", "replication_lag",
    ]  # fmt: skip
    probes = build(settings, database_url=URL, interval_s=2)
    assert next(each.target for each in probes.probes if each.name == "foreign_active") == 7


def test_a_program_that_tells_its_pool_wait_is_asked() -> None:
    """Nobody else knows it."""
    assert "pool_wait" in names(ProbeSettings(), pool_wait_s=lambda: 0.0)


def test_custom_probes_are_optional_unless_said_otherwise() -> None:
    """One dead Prometheus must not drop the fleet to its floor."""
    given = {"prometheus_url": SecretStr("http://p"), "prometheus_query": "up", "prometheus_target": 1.0}
    settings = ProbeSettings(custom_sql="SELECT 1", custom_sql_target=1, **given)  # type: ignore[arg-type]
    probes = build(settings, database_url=URL, interval_s=2).probes
    assert sorted(each.name for each in probes if not each.required) == ["custom_sql", "prometheus"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"active_backends_target": 0},
        {"commit_latency_target_s": float("nan")},
        {"connections_target": 1.0},
        {"canary_per_s": 11},
        {"custom_sql": "SELECT 1"},
        {"custom_sql_target": 1},
        {"prometheus_url": "http://reader:s3cret@p", "prometheus_query": "up"},
    ],
)
def test_settings_that_measure_nothing_are_refused(wrong: dict[str, object]) -> None:
    """Half a probe, or a target out of its range; what was given is not repeated."""
    with pytest.raises(ValidationError) as refused:
        ProbeSettings(**wrong)  # type: ignore[arg-type]
    assert "s3cret" not in str(refused.value)


def test_the_time_out_is_below_the_interval() -> None:
    """A read that may take longer than an interval would delay every decision."""
    with pytest.raises(ValueError, match="GOVERNOR_PROBE_TIMEOUT_S"):
        build(ProbeSettings(probe_timeout_s=2), database_url=URL, interval_s=2)


def test_every_probe_has_the_setting_of_its_target() -> None:
    """Whoever proposes targets names the variable."""
    assert set(TARGETS.values()) == {name for name in ProbeSettings.model_fields if "_target" in name}


def rows() -> list[str]:
    """Say each setting as a row of the table in docs/probes.md."""
    signs = {"ge": "≥ ", "gt": "> ", "le": "≤ "}
    said = ["| variable | default | range | meaning |", "|---|---|---|---|"]
    for name, field in ProbeSettings.model_fields.items():
        shown = "off" if field.default is None else str(field.default)
        bounds = [
            f"{sign}{getattr(m, key):,}"
            for m in field.metadata
            for key, sign in signs.items()
            if hasattr(m, key)
        ]
        said.append(f"| `GOVERNOR_{name.upper()}` | `{shown}` | {', '.join(bounds)} | {field.description} |")
    return said


def test_the_page_lists_every_setting() -> None:
    """`python tests/unit/test_probe_settings.py` prints the table anew."""
    page = DOCS.read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith("| `GOVERNOR_")] == rows()[2:]


def test_reading_probes_loads_no_driver() -> None:
    """Who has no PostgreSQL, and probes of their own, needs none."""
    program = """
import sys
sys.modules["asyncpg"] = None  # an import of it fails from now on
from governor.probes.pool_wait import PoolWait, Waits
from governor.probes import Probes
"""
    # Only the package itself: governor's own __init__ loads the bucket in PostgreSQL.
    program = (
        "import types, sys\ngovernor = types.ModuleType('governor')\ngovernor.__path__ = ['governor']\n"
        "sys.modules['governor'] = governor\n" + program
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=DOCS.parents[1])


if __name__ == "__main__":
    sys.stdout.write("\n".join(rows()) + "\n")
