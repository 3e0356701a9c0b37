"""What went through a bucket between two looks at it."""

from __future__ import annotations

from dataclasses import dataclass

from governor.bucket import Attempts, BucketState


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A bucket and the fleet's totals beside it, at one instant."""

    state: BucketState
    attempts: Attempts
    at_s: float  # monotonic clock of the leader, once the bucket had answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One interval of a bucket. None = unknown: the bucket was lost in between, or not seen."""

    interval_s: float | None = None
    started: int | None = None  # permits granted and charged, less those refunded
    blocked_ratio: float | None = None  # share of the interval with an unmet request, 0..1
    allowance_per_s: float | None = None  # in force, time-weighted
    attempts: Attempts | None = None


def between(
    before: Look | None, after: Look | None, *, ttl_us: int, dead_us: int, published_per_s: float | None
) -> Flow:
    """Return what happened between two looks at one bucket.

    ttl_us and dead_us are what the fleet publishes and cuts with: they date the last publication and the
    last cut. published_per_s is what was in force right after the publication, if that is known.
    """
    if before is None or after is None:
        return Flow()
    then, now = before.state, after.state
    span_us = now.micros - then.micros
    # More may have been refunded than granted, but not much more: that far back is another bucket's beginning.
    if span_us <= 0 or now.unmet < then.unmet or 2 * now.spent < then.spent:
        return Flow(interval_s=after.at_s - before.at_s)
    return Flow(
        interval_s=span_us / 1_000_000,
        started=max(0, now.spent - then.spent),
        blocked_ratio=min(1.0, (now.unmet - then.unmet) / span_us),
        allowance_per_s=_weighted(then, now, ttl_us, dead_us, published_per_s),
        attempts=after.attempts.since(before.attempts),
    )


def _weighted(
    then: BucketState, now: BucketState, ttl_us: int, dead_us: int, published_per_s: float | None
) -> float:
    """Weigh the allowances between two states by how long each was in force, permits/s."""
    published_us, cut_us = now.until - ttl_us, now.cut_until - dead_us
    after_publication = now.rate / 1000 if published_per_s is None else published_per_s
    changes = [(then.micros, then.allowance_per_s)]
    if then.micros < published_us <= now.micros:
        changes.append((published_us, after_publication))
    if then.micros < cut_us <= now.micros:
        changes.append((cut_us, now.rate / 1000))
    if then.micros < now.until <= now.micros:
        changes.append((now.until, now.floor / 1000))
    changes.sort()
    ends = [at_us for at_us, _ in changes[1:]] + [now.micros]
    total = sum(rate * (end - start) for (start, rate), end in zip(changes, ends, strict=True))
    return total / (now.micros - then.micros)
