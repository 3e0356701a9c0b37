"""What the shop had of it: percentiles of its latencies, and what changed in ratio."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench.figures import percentile

TAIL_S = 6.0  # the shop goes on so long, so that late orders are in; they are not judged
SETTLE_S = (
    10.0  # after a fault has ended, what it left in queues of the shop is still counted as of the fault
)
REACH_S = 3.0  # an order that was due so long before the fault may have been caught by it
SLICE_S = 2  # of the plots


def shop(
    seconds: Sequence[dict[str, Any]],
    *,
    start_s: float,
    end_s: float,
    fault: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Answer percentiles (ms) of the orders that were due from start to end, in ordinary times and in the fault's.

    fault: from when to when, s after the start. Raises RuntimeError without any orders.
    """
    judged = [each for each in seconds if start_s - 1 < each["at"] and each["at"] + 1 <= end_s]
    begins_s, ends_s = (
        (start_s + fault[0] - REACH_S, start_s + fault[1] + SETTLE_S) if fault else (end_s, end_s)
    )
    ordinary = [ms for each in judged if not begins_s <= each["at"] < ends_s for ms in each["ms"]]
    in_fault = [ms for each in judged if begins_s <= each["at"] < ends_s for ms in each["ms"]]
    if not ordinary:
        raise RuntimeError("the shop had no orders")
    before = [ms for each in judged if each["at"] < begins_s for ms in each["ms"]]
    slices: dict[int, list[float]] = defaultdict(list)
    for each in judged:
        slices[int(each["at"] - start_s) // SLICE_S * SLICE_S] += each["ms"]
    return {
        "orders": len(ordinary) + len(in_fault),
        "failed": sum(each["failed"] for each in judged) / (len(ordinary) + len(in_fault)),
        "p50_ms": percentile(ordinary, 50),
        "p99_ms": percentile(ordinary, 99),
        "fault_p99_ms": percentile(in_fault, 99) if in_fault else None,
        "before_p99_ms": percentile(before, 99) if before else None,
        "slices": [(at, percentile(values, 99)) for at, values in sorted(slices.items())],
    }


def beside(runs: Sequence[dict[str, Any]], run: dict[str, Any]) -> dict[str, float | None]:
    """Answer both p99 by those of the shop alone on the same course, and the drain by that of the best fixed rate."""
    others = {r["contender"]: r for r in runs if r["course"] == run["course"] and "error" not in r}
    return {
        "of_alone": _ratio(run, others.get("alone"), "p99_ms"),
        "fault_of_alone": _ratio(run, others.get("alone"), "fault_p99_ms"),
        "of_fixed": _ratio(run, others.get("fixed"), "drain_s"),
    }


def _ratio(run: dict[str, Any], other: dict[str, Any] | None, what: str) -> float | None:
    mine, theirs = run[what], other and other[what]
    return mine / theirs if mine and theirs else None
