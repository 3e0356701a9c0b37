"""What may be done to a bucket, and what it does to the permits: publish, cut, charge."""

from __future__ import annotations

from typing import Any

import pytest

from governor import LocalBucket
from tests.buckets import BURST, FLOOR_PER_S, PERMIT, Clock, publish, take


async def test_a_lower_epoch_is_refused(bucket: LocalBucket) -> None:
    """A leader that lost its lease cannot publish over its successor; the same epoch can."""
    await publish(bucket, 100, epoch=2)
    stale = await bucket.publish(allowance_per_s=400, ttl_s=6, epoch=1)
    assert (stale.accepted, stale.epoch, stale.allowance_per_s) == (False, 2, 100)
    await publish(bucket, 50, epoch=2)
    await publish(bucket, 60, epoch=3)
    assert (await bucket.read()).allowance_per_s == 60


async def test_a_cut_only_lowers_and_once_per_dead_time(bucket: LocalBucket, clock: Clock) -> None:
    """Forty workers that see one incident halve the allowance once, and never below the floor."""
    await publish(bucket, 400)
    cuts = [await bucket.cut(factor=0.5, dead_time_s=2) for _ in range(40)]
    assert [cut.applied for cut in cuts] == [True] + [False] * 39
    assert {cut.allowance_per_s for cut in cuts} == {200}
    clock.advance(2)
    unchanged = await bucket.cut(factor=1, dead_time_s=2)
    assert (unchanged.applied, unchanged.allowance_per_s) == (False, 200)
    deepest = await bucket.cut(factor=0, dead_time_s=2)
    assert (deepest.applied, deepest.allowance_per_s) == (True, FLOOR_PER_S)


@pytest.mark.parametrize("allowance_per_s", [0, 3])
async def test_a_cut_does_not_raise_to_the_floor(bucket: LocalBucket, allowance_per_s: float) -> None:
    """An allowance below the floor (a pause) stays where it is."""
    await publish(bucket, allowance_per_s)
    cut = await bucket.cut(factor=0.5, dead_time_s=2)
    assert (cut.applied, cut.allowance_per_s) == (False, allowance_per_s)


async def test_a_cut_holds_for_its_dead_time(bucket: LocalBucket, clock: Clock) -> None:
    """A publication decided before the cut cannot undo it; a lower one counts, a later one too."""
    await publish(bucket, 400)
    await bucket.cut(factor=0.5, dead_time_s=2)
    await publish(bucket, 400)
    assert (await bucket.read()).allowance_per_s == 200
    await publish(bucket, 50)
    assert (await bucket.read()).allowance_per_s == 50
    clock.advance(2)
    await publish(bucket, 400)
    assert (await bucket.read()).allowance_per_s == 400


async def test_charges_use_tokens_then_become_debt(bucket: LocalBucket, clock: Clock) -> None:
    """Load that asked for no permit slows the takers by as much, and spares the floor's burst."""
    await publish(bucket, 205)
    clock.advance(1)
    await bucket.charge(100)
    assert await take(bucket) == 1  # of 51.25, 1.25 are the floor's
    assert (await bucket.read()).debt == 50 * PERMIT
    clock.advance(0.25)  # 200/s repay the 50, 5/s flow
    assert (await bucket.read()).debt == 0
    clock.advance(0.1)
    assert await take(bucket) == 22


async def test_debt_is_bounded(bucket: LocalBucket, clock: Clock) -> None:
    """A billion charges delay the takers by a second of allowance, not for ever."""
    await publish(bucket, 400)
    await bucket.charge(10**9)
    assert (await bucket.read()).debt == 400 * PERMIT
    clock.advance(1.02)
    await take(bucket)
    clock.advance(0.25)
    assert await take(bucket) == BURST


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        ("take", {"want": -1}),
        ("charge", {"n": 10**10}),
        ("publish", {"allowance_per_s": float("nan"), "ttl_s": 6, "epoch": 1}),
        ("publish", {"allowance_per_s": float("inf"), "ttl_s": 6, "epoch": 1}),
        ("publish", {"allowance_per_s": 10, "ttl_s": 10**6, "epoch": 1}),
        ("cut", {"factor": 1.5, "dead_time_s": 1}),
    ],
)
async def test_out_of_range_is_refused(bucket: LocalBucket, operation: str, args: dict[str, Any]) -> None:
    """What a column or a double could not hold is a ValueError, and changes nothing."""
    before = await bucket.read()
    with pytest.raises(ValueError, match="must be"):
        await getattr(bucket, operation)(**args)
    assert await bucket.read() == before
