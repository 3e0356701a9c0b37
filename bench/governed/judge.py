"""What the shop had of it: percentiles of its latencies, and what changed in ratio."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench.figures import percentile

TAIL_S = 6.0  # the shop goes on so long, so that late orders are in; they are not judged
SETTLE_S = 10.0  # after a fault has ended: what the outage itself left in queues of the shop
SLICE_S = 2  # of the plots


def shop(
    seconds: Sequence[dict[str, Any]], *, start_s: float, end_s: float, clear_s: float | None
) -> dict[str, Any]:
    """Answer percentiles (ms) of the orders that were due from start to end, and after the fault.

    Raises RuntimeError without any orders.
    """
    judged = [each for each in seconds if start_s - 1 < each["at"] and each["at"] + 1 <= end_s]
    latencies = [ms for each in judged for ms in each["ms"]]
    if not latencies:
        raise RuntimeError("the shop had no orders")
    after = [
        ms
        for each in judged
        if clear_s is not None and each["at"] >= start_s + clear_s + SETTLE_S
        for ms in each["ms"]
    ]
    slices: dict[int, list[float]] = defaultdict(list)
    for each in judged:
        slices[int(each["at"] - start_s) // SLICE_S * SLICE_S] += each["ms"]
    return {
        "orders": len(latencies),
        "failed": sum(each["failed"] for each in judged) / len(latencies),
        "p50_ms": percentile(latencies, 50),
        "p99_ms": percentile(latencies, 99),
        "after_p99_ms": percentile(after, 99) if after else None,
        "slices": [(at, percentile(values, 99)) for at, values in sorted(slices.items())],
    }


def beside(runs: Sequence[dict[str, Any]], run: dict[str, Any]) -> dict[str, float | None]:
    """Answer p99 by that of the shop alone on the same course, and the drain by that of the best fixed rate."""
    others = {r["contender"]: r for r in runs if r["course"] == run["course"] and "error" not in r}
    alone, best = others.get("alone"), others.get("fixed")
    return {
        "of_alone": run["p99_ms"] / alone["p99_ms"] if alone else None,
        "of_fixed": run["drain_s"] / best["drain_s"]
        if best and best["drain_s"] and run["drain_s"] and run["contender"] != "alone"
        else None,
    }
