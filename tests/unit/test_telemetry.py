"""Logs are one event a line, in two forms, and hold no password in either."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, Histogram

from expiry.telemetry import BatchHistogram, mask, set_up_logging

SECRET = "s3cret"  # noqa: S105 - to be looked for in what is written
URL = f"postgresql://joe:{SECRET}@db:5432/expiry"

log = structlog.get_logger()


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Leave logging as other tests expect it."""
    root, structured = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**structured)


def written(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the events on standard error, and check that nothing is on standard output."""
    out, err = capsys.readouterr()
    assert out == ""
    return [json.loads(line) for line in err.splitlines()]


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"redis://:{SECRET}@h:1/0", "redis://:***@h:1/0"),
        (f"at {URL}: refused", "at postgresql://joe:***@db:5432/expiry: refused"),
        (f"redis://u:{SECRET}@{SECRET}@h", "redis://u:***@h"),
        (f"redis://u:{SECRET}/{SECRET}@h", "redis://u:***@h"),
        (f"postgresql://h/db?user=joe&password={SECRET}&x=1", "postgresql://h/db?user=joe&password=***&x=1"),
        (f"password={SECRET} user=joe", "password=*** user=joe"),
        (f"redis://:{SECRET}@a, redis://:{SECRET}@b", "redis://:***@a, redis://:***@b"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("postgresql://joe@h/db", "postgresql://joe@h/db"),
        ("http://127.0.0.1:8080 for a@b", "http://127.0.0.1:8080 for a@b"),
        ("12:30 a@b", "12:30 a@b"),
    ],
)
def test_passwords_are_masked_and_nothing_else(text: str, masked: str) -> None:
    """In every place where a URL may hold one, with characters that should have been encoded too."""
    assert mask(text) == masked


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It holds the event, its level, the time in UTC, and what was said."""
    set_up_logging("json", "info")
    log.info("batch.settled", holds=3)
    log.warning("lease.left")
    first, second = written(capsys)
    assert first.pop("timestamp").endswith("Z")
    assert first == {"event": "batch.settled", "level": "info", "holds": 3}
    assert second["level"] == "warning"


def fail() -> None:
    """Raise an error that quotes a URL, with a secret at hand in a local variable."""
    local = f"local {SECRET}"
    raise ValueError(f"cannot use {URL}, {len(local)}")


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_password_gets_into_a_log(form: Any, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ANN401
    """Not by a value, a nested value, a traceback, its local variables, or another library's log."""
    set_up_logging(form, "info")
    log.info("settings.read", url=URL, stores=[{"url": URL}])
    try:
        fail()
    except ValueError as error:
        log.error("loop.failed", exc_info=error)  # noqa: TRY400 - as the loops do
        logging.getLogger("other").exception("failed at %s", URL)
    err = capsys.readouterr().err
    assert SECRET not in err
    assert err.count("joe:***@db") >= 5
    assert err.count("ValueError") >= 2  # what happened, and where, is told
    assert err.count("in fail") + err.count('"fail"') >= 2


def test_console_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """Time, level, event and values, no JSON."""
    set_up_logging("console", "info")
    log.info("batch.settled", holds=3)
    line = capsys.readouterr().err
    assert "batch.settled" in line
    assert "holds=3" in line
    assert not line.startswith("{")


def test_auto_is_json_unless_it_is_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A file or a collector gets what it can read."""
    set_up_logging("auto")
    log.info("batch.settled")
    assert written(capsys)[0]["event"] == "batch.settled"


def test_logs_of_libraries_join(capsys: pytest.CaptureFixture[str]) -> None:
    """From warnings on: arq and aiohttp tell each job and each request below that."""
    set_up_logging("json", "debug")
    logging.getLogger("arq").info("a job")
    logging.getLogger("arq").warning("%s jobs", 3)
    [event] = written(capsys)
    assert event["event"] == "3 jobs"
    assert event["level"] == "warning"


@pytest.mark.parametrize(
    ("level", "seen"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_the_level_is_the_least_severe_that_is_written(
    level: str, seen: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """For our events and, from warnings on, for those of libraries."""
    set_up_logging("json", level)
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("ours")
        getattr(logging.getLogger("library"), name)("theirs")
    events = written(capsys)
    assert [e["level"] for e in events if e["event"] == "ours"] == seen
    theirs = [e["level"] for e in events if e["event"] == "theirs"]
    assert theirs == [name for name in seen if name in ("warning", "error")]


def test_setting_up_twice_writes_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is doubled when a command sets up logging after another one did."""
    set_up_logging("json")
    set_up_logging("json")
    logging.getLogger("library").warning("theirs")
    log.info("ours")
    assert [event["event"] for event in written(capsys)] == ["theirs", "ours"]


BOUNDS = (0.001, 0.5, 2.0)
MINE = BatchHistogram("test_mine", "In batches.", by=("a", "b"), buckets=BOUNDS)
THEIRS = Histogram("test_theirs", "One by one.", ["by"], buckets=BOUNDS)


@given(st.lists(st.sampled_from(BOUNDS) | st.floats(min_value=0, max_value=4), max_size=20))
def test_a_histogram_of_batches_counts_as_one_of_values(values: list[float]) -> None:
    """A value on a bound belongs below it; batches add up."""
    MINE.observe("a", values)
    for value in values:
        THEIRS.labels("a").observe(value)
    for suffix, labels in [
        ("count", {}),
        *(("bucket", {"le": le}) for le in ("0.001", "0.5", "2.0", "+Inf")),
    ]:
        mine, theirs = (
            REGISTRY.get_sample_value(f"test_{name}_{suffix}", {"by": "a", **labels})
            for name in ("mine", "theirs")
        )
        assert (mine or 0) == (theirs or 0)
    sums = [REGISTRY.get_sample_value(f"test_{name}_sum", {"by": "a"}) for name in ("mine", "theirs")]
    assert sums[0] == pytest.approx(sums[1] or 0)
    assert REGISTRY.get_sample_value("test_mine_count", {"by": "b"}) == 0
