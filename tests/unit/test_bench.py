"""The arithmetic of the bench, and what it prints and draws."""

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from bench import churn, drain, enqueue, governed, idle, lag, quick, report, show
from bench.figures import figure, paired_ratio, percentile
from bench.governed import judge
from bench.proc import cpu_s, parse_stat, said, started
from bench.report import Result


@pytest.mark.parametrize(
    ("per_cent", "expected"), [(0, 1), (50, 50), (99, 99), (99.1, 100), (100, 100)], ids=str
)
def test_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    per_cent: float, expected: float
) -> None:
    """The nearest rank, not an interpolation: a latency that nobody had is not reported."""
    values = list(range(100, 0, -1))
    assert percentile(values, per_cent) == expected


def test_percentile_of_one_value_is_that_value_and_of_none_an_error() -> None:
    """One lone hold has a p99 too; none is a fault of the caller."""
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


def test_a_ratio_is_taken_run_by_run_so_that_a_slow_hour_cancels_out() -> None:
    """Both runs of a pair were slow for the same reason."""
    assert paired_ratio([50, 5, 100], [100, 10, 200]) == 0.5
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1], [1, 2])


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "-"),
        (0, "0"),
        (float("nan"), "-"),
        (0.012345, "0.0123"),
        (0.8, "0.800"),
        (9.999, "10.0"),
        (78.65, "78.7"),
        (1450.2, "1,450"),
        (48_123, "48,100"),
        (-2.5, "-2.50"),
    ],
)
def test_figures_have_three_digits(value: float | None, written: str) -> None:
    """More digits would claim more than three runs can tell."""
    assert figure(value) == written


def test_cpu_time_counts_own_and_reaped_children_and_survives_odd_names() -> None:
    """The name of a process may hold spaces and parentheses."""
    tick = os.sysconf("SC_CLK_TCK")
    stat = f"42 (a) b (c)) S 7 1 1 0 -1 0 0 0 0 0 {tick} {2 * tick} {3 * tick} {4 * tick} 20 0 1 0 99"
    assert parse_stat(stat) == (7, 10.0)


def test_cpu_time_of_a_tree_grows_with_its_children() -> None:
    """A pool's or a server's work is done by its children."""
    busy = ["sh", "-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done & wait; sleep 30"]
    process = subprocess.Popen(busy)
    try:
        deadline_s = time.monotonic() + 20
        while cpu_s(process.pid) < 0.05:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()


def test_what_was_started_is_ended_with_its_children(tmp_path: Path) -> None:
    """Nothing is left behind that would disturb the next run."""
    log = tmp_path / "log"
    with started([["sh", "-c", "sleep 60 & echo $!; wait"]], {"PATH": os.environ["PATH"]}, log) as processes:
        deadline_s = time.monotonic() + 10
        while not said(log).strip():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert processes[0].poll() is not None
    with pytest.raises(ProcessLookupError):
        _signal_living(int(said(log)))


def _signal_living(pid: int) -> None:
    # Whoever inherits the child may be slow to bury it: a zombie is dead too.
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            raise ProcessLookupError from None
        if state == "Z":
            raise ProcessLookupError
        time.sleep(0.01)


def run(name: str, title: str, rate: float, baseline: float | None = None) -> dict[str, object]:
    """Answer a raw run, as a drain records it."""
    cpu = {"consumer": 1.0, "redis": 0.5, "postgres": 2.0}
    made = {"contender": name, "title": title, "rate": rate, "done": 1000, "seconds": 1.0, "cpu_s": cpu}
    return made if baseline is None else made | {"baseline_rate": baseline}


def drained() -> Result:
    """Answer three rounds of two contenders and one of a third."""
    runs = [
        run("bare", "bare SQL", 100),
        run("ours", "expiry", 90, 100),
        run("bare", "bare SQL", 50),
        run("ours", "expiry", 40, 50),
        run("bare", "bare SQL", 90),
        run("ours", "expiry", 81, 90),
        run("odd", "<odd> & peer", 1, 90),
    ]
    return Result("drain", {"runs": 3}, runs, {"Valkey": "9"}, "2026-01-01")


def test_a_drain_is_shown_fastest_first_with_medians_and_paired_ratios() -> None:
    """What a reader looks for first stands first."""
    rows = drain.view(drained()).rows
    assert [row[:5] for row in rows] == [
        ["bare SQL", "90.0", "1.00", "50.0", "100"],
        ["expiry", "81.0", "0.900", "40.0", "90.0"],
        ["<odd> & peer", "1.00", "0.0111", "1.00", "1.00"],
    ]
    assert rows[0][5:] == ["1,000", "500", "2,000", "1,000"]


def test_pictures_are_svg_that_a_parser_takes_whatever_the_labels() -> None:
    """Labels are escaped; lengths are in proportion."""
    bars = ET.fromstring(drain.view(drained()).picture)  # noqa: S314 - our own
    widths = [float(r.get("width", 0)) for r in bars.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths == sorted(widths, reverse=True)
    assert widths[1] / widths[0] == pytest.approx(0.9, abs=0.01)
    spreads = show.spreads("Lag", [("a & b", 1.0, 10.0, 100.0), ("expiry", 0.01, 1.0, 2.0)])
    xs = [float(c.get("cx", 0)) for c in ET.fromstring(spreads).iter("{http://www.w3.org/2000/svg}circle")]  # noqa: S314
    assert xs[0] > xs[1] >= show.LABEL_WIDTH


def test_a_table_in_markdown_has_our_rows_in_bold() -> None:
    """GitHub shows it."""
    text = show.markdown(("drain", "holds/s"), [["expiry", "90"], ["other", "9"]])
    assert text.splitlines() == [
        "| drain | holds/s |",
        "|---|---:|",
        "| **expiry** | **90** |",
        "| other | 9 |",
    ]


def test_results_survive_a_file_and_fill_the_document_between_its_marks(tmp_path: Path) -> None:
    """Writing twice changes nothing more."""
    result = drained()
    view = drain.view(result)
    report.save(result, view, tmp_path)
    assert report.load(tmp_path / "drain.json") == result
    document = tmp_path / "benchmarks.md"
    document.write_text("before\n<!-- drain -->\nold\n<!-- /drain -->\nafter\n")
    for _ in range(2):
        report.write_document({"drain": (result, view), "lag": (result, view)}, document)
        text = document.read_text()
        assert re.match(r"before\n<!-- drain -->\n\| drain ", text)
        assert text.endswith("<!-- /drain -->\nafter\n")
        assert "\nold\n" not in text
    assert (tmp_path / "pictures/drain.svg").read_text() == view.picture


def test_lags_are_pooled_over_runs_and_lone_holds_stand_apart() -> None:
    """Percentiles of percentiles would be nonsense."""
    runs: list[dict[str, Any]] = [
        {"contender": name, "title": title, "stream_ms": stream, "commit_ms": stream, "lone_ms": lone}
        | {"early_looks": 1, "missing": 0, "p99_ms": 0}
        for name, title, stream, lone in (
            ("ours", "expiry", [1.0] * 99 + [5.0], [2.0]),
            ("ours", "expiry", [2.0] * 100, [4.0]),
            ("slow", "slow", [50.0], []),
        )
    ]
    runs.append({"contender": "bad", "title": "bad", "error": "Traceback:\nit broke"})
    view = lag.view(Result("lag", {}, runs, {}, "now"))
    assert view.rows[0] == ["expiry", "2.00", "2.00", "5.00", "2.00", "2.00", "2.00", "4.00", "2", "0"]
    assert view.rows[1][5:8] == ["50.0", "-", "-"]
    assert view.notes[-1] == "bad failed: it broke"


def test_early_looks_are_counted_in_our_log_and_in_that_of_the_peers() -> None:
    """Ours counts them per batch, a peer's script writes a line for each."""
    assert (
        lag.early_looks('{"event": "batch.settled", "early": 2, "expired": 3}\nearly\nearlier\nearly\n') == 4
    )


def test_memory_is_shown_for_queues_in_redis_and_on_7_where_it_was_measured() -> None:
    """A queue in PostgreSQL has no such figure, nor has a machine without Redis 7."""
    cpu = {"consumer": 0.0, "redis": 0.1, "postgres": 0.2}
    shared = {"n": 1000, "seconds": 0.1, "cpu_s": cpu}
    runs: list[dict[str, Any]] = [
        {"contender": "ours", "title": "expiry", "rate": 100.0, "bytes": 260.0, "bytes_redis7": 371.0}
        | shared,
        {"contender": "pg", "title": "in PostgreSQL", "rate": 300.0, "bytes": None} | shared,
    ]
    rows = enqueue.view(Result("enqueue", {}, runs, {}, "now")).rows
    assert rows[0] == ["in PostgreSQL", "300", "300", "300", "-", "-", "100", "200"]
    assert rows[1][4:6] == ["260", "371"]


def test_idle_workers_are_shown_with_the_quietest_first() -> None:
    """By commands in the table, by CPU time in the picture."""
    runs: list[dict[str, Any]] = [
        {"contender": n, "title": n, "commands_per_s": c, "transactions_per_s": 1.0, "cpu_ms_per_s": cpu}
        for n, c, cpu in (
            ("loud", 40.0, {"consumer": 1.0, "redis": 1.0, "postgres": 1.0}),
            ("expiry", 15.0, {"consumer": 2.0, "redis": 1.0, "postgres": 3.0}),
        )
    ]
    view = idle.view(Result("idle", {}, runs, {}, "now"))
    assert [row[:3] for row in view.rows] == [["expiry", "15.0", "1.00"], ["loud", "40.0", "1.00"]]
    assert view.picture.index(">loud<") < view.picture.index(">expiry<")


async def test_a_guard_that_falls_short_is_measured_again_before_it_counts() -> None:
    """Noise fails nobody once; what is slow twice is said."""
    ratios = iter([0.5, 0.1, 0.9, 0.1, 0.2])

    async def ratio(_stage: object) -> float:
        return next(ratios)

    guards = [quick.Guard(name, 0.6, ratio) for name in ("steady", "noisy", "slow")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "GUARDS", guards)
        short = await quick.failing(None)  # type: ignore[arg-type]
    assert short == ["slow: 0.200 (aim 0.600, at least 0.300)"]


def test_the_shop_is_judged_between_start_and_end_and_again_after_the_fault() -> None:
    """Seconds that only touch the clearance are not in it; what a fault left in queues has ten seconds to go."""
    seconds = [{"at": 99 + n, "ms": [1.0 + n] * 100, "failed": n == 2} for n in range(43)]
    shop = judge.shop(seconds, start_s=99.5, end_s=140.5, fault=(10.0, 20.0))
    assert shop["orders"] == 41 * 100  # 99 began too early by half a second at most, 140 ended too late
    assert shop["failed"] == 1 / 4100
    assert [shop[name] for name in ("p50_ms", "p99_ms", "fault_p99_ms", "before_p99_ms")] == [
        32.0,
        41.0,
        31.0,
        8.0,
    ]
    assert [at for at, _ in shop["slices"]] == list(range(0, 40, 2))


def test_a_shop_without_orders_is_no_result() -> None:
    """A process that never began would look like a fast one."""
    with pytest.raises(RuntimeError, match="no orders"):
        judge.shop([{"at": 5, "ms": [1.0], "failed": 0}], start_s=10.0, end_s=20.0)


def _cleared(course: str, contender: str, p99_ms: float, drain_s: float | None) -> dict[str, Any]:
    return {
        "course": course,
        "contender": contender,
        "title": {"governed": "expiry, governed"}.get(contender, contender),
        "p50_ms": 2.0,
        "p99_ms": p99_ms,
        "fault_p99_ms": None if course == "calm" else 8 * p99_ms,
        "failed": 0.0,
        "drain_s": drain_s,
        "slices": [(0, p99_ms), (2, p99_ms * 2)],
        "left": [(0.5, 99.0), (1.5, 98.0)],
        "allowance": [(-3.0, 5.0), (1.0, 100.0)],
    }


def test_a_clearance_is_compared_within_its_course() -> None:
    """The shop alone is another one while the database is slow."""
    runs = [
        _cleared("calm", "alone", 4.0, None),
        _cleared("calm", "fixed", 6.0, 100.0),
        _cleared("calm", "governed", 5.0, 120.0),
        _cleared("slow", "alone", 40.0, None),
        _cleared("slow", "governed", 60.0, 300.0),
    ]
    assert judge.beside(runs, runs[2]) == {"of_alone": 1.25, "fault_of_alone": None, "of_fixed": 1.2}
    assert judge.beside(runs, runs[4]) == {"of_alone": 1.5, "fault_of_alone": 1.5, "of_fixed": None}
    seen = governed.view(Result("governor", {}, runs, {}, ""))
    assert seen.rows[2] == [
        "expiry, governed - nothing goes wrong",
        "2.00",
        "5.00",
        "1.25",
        "-",
        "-",
        "0",
        "120",
        "1.20",
    ]
    drawn = ET.fromstring(seen.picture)  # noqa: S314 - our own
    assert (
        len(drawn.findall("{*}polyline")) == 3 + 5 + 5
    )  # allowances but of the shop alone, what is left, latencies


def _seen(shop: str, minute: float, dead: int, vacuums: int) -> dict[str, Any]:
    sizes = dict.fromkeys(("holds", "holds_indexes", "resources", "outbox"), 2_000_000)
    memory = dict.fromkeys(("worker_mb", "api_mb", "postgres_mb", "redis_mb"), 50.0)
    counts = {"vacuums": vacuums, "resources_vacuums": 9, "outbox_vacuums": 1}
    return {"contender": shop, "minute": minute, "dead": dead, "page_us": 900.0, **sizes, **memory, **counts}


def test_churn_shows_both_shops_evenly_and_the_most_that_was_dead() -> None:
    """A few looks stand for all of them; the most does not have to be among those."""
    runs = [_seen("ours", minute, dead, minute) for minute, dead in enumerate([10, 70, 20, 40, 30, 50, 60])]
    runs += [_seen("defaults", 1, 500, 0)]
    seen = churn.view(Result("churn", {"minutes": 2}, runs, {}, ""))
    assert [row[:4] for row in seen.rows][-2:] == [
        ["expiry's settings", "6", "60", "2.00"],
        ["PostgreSQL's defaults", "1", "500", "2.00"],
    ]
    assert seen.notes == [
        "expiry's settings: at most 70 dead holds; autovacuums: 6 of holds, 9 of resources, 1 of outbox.",
        "PostgreSQL's defaults: at most 500 dead holds; autovacuums: 0 of holds, 9 of resources, 1 of outbox.",
    ]
    drawn = ET.fromstring(seen.picture)  # noqa: S314 - our own
    assert len(drawn.findall("{*}polyline")) == 3 * 2
