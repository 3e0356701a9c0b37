"""Settings come from the environment, are checked together, and never show a password."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from pydantic import ValidationError

from expiry.settings import Settings

SECRET = "s3cret"  # noqa: S105 - to be looked for in what is shown
DATABASE_URL = f"postgresql://joe:{SECRET}@db/expiry"


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start from an environment without settings."""
    for name in os.environ:
        if name.startswith("EXPIRY_"):
            monkeypatch.delenv(name)


def settings(**fields: Any) -> Settings:  # noqa: ANN401 - wrong ones too
    """Return settings with these fields."""
    return Settings(**fields)


def test_the_environment_sets_a_field_and_the_rest_has_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """EXPIRY_ and the field's name; what the program is given by name comes first."""
    monkeypatch.setenv("EXPIRY_LEASE_S", "45.5")
    monkeypatch.setenv("EXPIRY_SWEEP_ENABLED", "false")
    monkeypatch.setenv("EXPIRY_METRICS_PORT", "9100")
    monkeypatch.setenv("EXPIRY_NOTHING_OF_OURS", "x")
    read = Settings(lease_s=50)
    assert (read.lease_s, read.sweep_enabled, read.metrics_port) == (50, False, 9100)
    assert (read.mode, read.batch_max, read.horizon_s) == ("hybrid", 500, 900)


def test_settings_do_not_change() -> None:
    """What was checked at the start holds until the end."""
    with pytest.raises(ValidationError, match="frozen"):
        Settings().lease_s = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changed", "grace_s", "queue_used"),
    [
        ({}, 2, True),
        ({"mode": "queue"}, 2, True),
        ({"mode": "sweep"}, 0, False),
        ({"mode": "sweep", "sweep_grace_s": 3}, 3, False),
        ({"sweep_grace_s": 0}, 0, True),
    ],
)
def test_the_sweep_waits_for_the_queue_where_there_is_one(
    changed: dict[str, Any], grace_s: float, *, queue_used: bool
) -> None:
    """Two seconds, none in sweep mode, or what is said; 0 is said, too."""
    changed_settings = settings(**changed)
    assert (changed_settings.grace_s, changed_settings.queue_used) == (grace_s, queue_used)


@pytest.mark.parametrize("interval_s", [0.1, 5, 300])
def test_every_deadline_is_in_reach_of_writer_or_promoter(interval_s: float) -> None:
    """A writer enqueues further than two rounds of the promoter reach, so that no hold falls in between."""
    near = Settings(promoter_interval_s=interval_s, horizon_s=10)
    assert near.enqueue_within_s >= near.horizon_s + 2 * interval_s


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("mode", value) for value in ("fast", "")),
        *(("lease_s", value) for value in (0.9, 3601, "x", float("nan"))),
        *(("batch_max", value) for value in (0, 5001, 1.5)),
        *(("retention_s", value) for value in (86_399, float("nan"))),
        *(("api_port", value) for value in (-1, 65_536)),
        *(("queue", value) for value in ("", "q" * 201)),
        *(
            (f"api_{name}_timeout_s", value)
            for name in ("head", "body", "answer", "idle")
            for value in (0, 3601)
        ),
        *(("api_drain_s", value) for value in (-1, 601)),
        *(("api_connections_max", value) for value in (0, 100_001)),
        *(("api_line_bytes_max", value) for value in (4095, 65_537)),
        *(("api_header_bytes_max", value) for value in (2047, 65_537)),
        *(("api_headers_max", value) for value in (15, 1001)),
        *(("api_body_bytes_max", value) for value in (16_383, 67_108_865)),
        *(("api_json_depth_max", value) for value in (7, 201)),
        ("stop_grace_s", 0),
        ("database_pool_max", 1),
        ("log_level", "loud"),
        ("log_format", "xml"),
    ],
)
def test_what_is_out_of_range_is_refused(field: str, value: object) -> None:
    """At the start, by name."""
    with pytest.raises(ValidationError) as refused:
        settings(**{field: value})
    assert [wrong["loc"] for wrong in refused.value.errors()] == [(field,)]


def test_all_that_is_wrong_is_told_at_once() -> None:
    """Whoever mends one does not meet the next one afterwards."""
    with pytest.raises(ValidationError) as refused:
        settings(lease_s=0, batch_max=0, redis_url="nonsense")
    assert {wrong["loc"][0] for wrong in refused.value.errors()} == {"lease_s", "batch_max", "redis_url"}


def test_a_setting_without_a_meaning_is_refused() -> None:
    """In queue mode nothing waits for a sweep."""
    with pytest.raises(ValidationError, match="EXPIRY_SWEEP_GRACE_S has no meaning in queue mode"):
        Settings(mode="queue", sweep_grace_s=1)


@pytest.mark.parametrize(
    ("field", "url"),
    [
        *(
            ("database_url", url)
            for url in (DATABASE_URL, "postgres:///expiry?host=/run", "postgresql://a:1,b:2/x")
        ),
        *(
            ("redis_url", url)
            for url in ("redis://h", f"rediss://u:{SECRET}@h:1/2", "unix:///run/redis.sock?db=1")
        ),
    ],
)
def test_urls_that_a_driver_reads_are_taken(field: str, url: str) -> None:
    """One host or several, TLS, sockets."""
    assert getattr(settings(**{field: url}), field).get_secret_value() == url


@pytest.mark.parametrize(
    ("field", "url"),
    [
        *(
            ("database_url", url)
            for url in ("", "db", f"joe:{SECRET}@h/x", "mysql://h/x", f"postgres://j:{SECRET}/@h")
        ),
        *(
            ("redis_url", url)
            for url in ("", "h:6379", "http://h", f"redis://:{SECRET}/@h", "redis://h:x", "redis://[")
        ),
    ],
)
def test_urls_that_no_driver_reads_are_refused(field: str, url: str) -> None:
    """At the start rather than at the first use, and without being shown."""
    with pytest.raises(ValidationError, match=r"must start with|cannot be read") as refused:
        settings(**{field: url})
    assert [wrong["loc"] for wrong in refused.value.errors()] == [(field,)]
    assert SECRET not in str(refused.value)


def test_a_password_is_not_shown() -> None:
    """Neither in a traceback nor in a dump."""
    secret = settings(database_url=DATABASE_URL, redis_url=f"redis://:{SECRET}@h")
    for shown in (repr(secret), str(secret), secret.model_dump_json(), str(secret.model_dump())):
        assert SECRET not in shown
    assert json.loads(secret.model_dump_json())["lease_s"] == 30


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_explains_itself(name: str) -> None:
    """A sentence, and the unit in the name of whatever is a time."""
    field = Settings.model_fields[name]
    assert (field.description or "").endswith(".")
    if field.annotation is float:
        assert name.endswith("_s")
