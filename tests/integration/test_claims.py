"""Claim: what is due, with its permits, under a lease, in one call."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from expiry.settings import Settings
from expiry.wakeups import Wakeups
from tests.fleet import Counted, settings_for, wakeups_on
from tests.wakes import FROZEN, fill, scores, some


@pytest.fixture
def settings(redis_url: str) -> Settings:
    """Give settings that need no database."""
    return settings_for("postgresql://unused", redis_url, lease_s=2)


@pytest.fixture
async def wakeups(settings: Settings) -> AsyncIterator[Wakeups]:
    """Give the queue; its bucket is empty until it is filled."""
    async with wakeups_on(settings, FROZEN) as wakeups:
        yield wakeups


async def now_ms(redis: Redis) -> float:
    """Return Redis's clock."""
    seconds, micros = await redis.time()
    return float(seconds * 1000 + micros / 1000)


async def test_nothing_is_claimed_before_its_score(wakeups: Wakeups, redis: Redis) -> None:
    """A claim takes what is due by the corrected clock, to the millisecond, and says what comes next."""
    await fill(wakeups)
    [(wake, at)] = some(1, due_in_s=60)
    await wakeups.enqueue_due([(wake, at)])
    score = next(iter((await scores(redis)).values()))
    short = await wakeups.claim(10, skew_ms=59_000 - 1)
    assert short.wakes == []
    assert short.head_ms == score
    assert short.now_ms < score
    enough = await wakeups.claim(10, skew_ms=61_000)
    assert enough.wakes == [wake]
    assert enough.now_ms == pytest.approx(await now_ms(redis) + 61_000, abs=1000)


async def test_oldest_are_claimed_first(wakeups: Wakeups) -> None:
    """A claim takes the lowest scores, in order."""
    wakes = [some(1, due_in_s=-s)[0] for s in (1, 3, 2)]
    await wakeups.enqueue_due(wakes)
    await fill(wakeups)
    assert (await wakeups.claim(2, skew_ms=0)).wakes == [wakes[1][0], wakes[2][0]]


async def test_a_claim_is_a_lease(wakeups: Wakeups, redis: Redis, settings: Settings) -> None:
    """Claimed is hidden for the lease, then comes again and is counted as an expired lease."""
    await wakeups.enqueue_due(some(3))
    await fill(wakeups)
    counted = Counted()
    claim = await wakeups.claim(10, skew_ms=0)
    assert len(claim.ids) == 3
    lease_ms = settings.lease_s * 1000
    for score in (await scores(redis)).values():
        assert score % 1 == 0.5
        assert score == pytest.approx(claim.now_ms + lease_ms, abs=1.5)
    hidden = await wakeups.claim(10, skew_ms=lease_ms - 500)
    assert hidden.ids == []
    assert hidden.head_ms is not None
    assert counted("expiry_leases_expired_total") == 0
    assert sorted((await wakeups.claim(10, skew_ms=lease_ms + 5)).ids) == sorted(claim.ids)
    assert counted("expiry_leases_expired_total") == 3
    assert counted("expiry_wakeups_claimed_total") == 6


async def test_a_claim_takes_as_many_permits_as_wake_ups(wakeups: Wakeups) -> None:
    """What is claimed is paid for in the same call; what was wanted beyond that costs nothing."""
    await wakeups.enqueue_due(some(200))
    bucket = await fill(wakeups, allowance_per_s=1000)
    started_s = time.monotonic()
    assert len((await wakeups.claim(240, skew_ms=0)).ids) == 200
    left = (await bucket.read()).permits
    assert 50 <= left <= 51 + 1000 * (time.monotonic() - started_s)


async def test_a_claim_never_exceeds_the_permits(wakeups: Wakeups, redis: Redis) -> None:
    """Due wake-ups beyond the permits stay as they are."""
    await wakeups.enqueue_due(some(500))
    await fill(wakeups, allowance_per_s=1000)
    started_s = time.monotonic()
    claimed = len((await wakeups.claim(500, skew_ms=0)).ids)
    assert 250 <= claimed <= 251 + 1000 * (time.monotonic() - started_s)
    leased = [s for s in (await scores(redis)).values() if s % 1 == 0.5]
    assert len(leased) == claimed


async def test_no_permit_no_claim(wakeups: Wakeups, redis: Redis) -> None:
    """Without permits nothing is leased, and the answer says how long to wait for one."""
    bucket = await fill(wakeups, allowance_per_s=0.5)
    await bucket.take(1)
    await wakeups.enqueue_due(some(3))
    before = await scores(redis)
    claim = await wakeups.claim(10, skew_ms=0)
    assert claim.wakes == []
    assert 1 < claim.permit_wait_s <= 2
    assert claim.allowance_per_s == 0.5
    assert claim.head_ms == min(before.values())
    assert await scores(redis) == before


async def test_an_empty_queue_says_so(wakeups: Wakeups) -> None:
    """Nothing there: no wakes, no head."""
    claim = await wakeups.claim(10, skew_ms=0)
    assert (claim.wakes, claim.head_ms) == ([], None)
    assert await wakeups.oldest_ms() is None


FOREIGN = [
    b"5f0c4c2d9d3e4a3c8f7f1b2f3c4d5e6f",  # a job of stock arq
    b"expire:not-a-uuid:1",
    b"expire:018f0000-0000-7000-8000-000000000000:",
    b"expire:018f0000-0000-7000-8000-000000000000:1:2",
    b"expire:018f0000-0000-7000-8000-000000000000:-1",
    b"expire:018f0000-0000-7000-8000-000000000000:99999999999999999999",  # no bigint
    b"remind:018f0000-0000-7000-8000-000000000000:1",
    b" expire:018f0000-0000-7000-8000-000000000000:1",
    b"expire:018f0000-0000-7000-8000-000000000000:1\n",
    b"\xff\xfe\x00",
    b"",
]


async def test_foreign_jobs_are_moved_aside_with_their_bodies(wakeups: Wakeups, redis: Redis) -> None:
    """What is not ours is never answered, never lost: id, score and body stay, out of the way."""
    for id_ in FOREIGN:
        await redis.zadd(wakeups.queue, {id_: 1})
        await redis.set(b"arq:job:" + id_, b"body of " + id_, px=60_000)
    ours = some(1)
    await wakeups.enqueue_due(ours)
    await fill(wakeups)
    counted = Counted()
    claim = await wakeups.claim(len(FOREIGN) + 1, skew_ms=0)
    assert claim.wakes == [ours[0][0]]
    assert counted("expiry_wakeups_unknown_total") == len(FOREIGN)
    assert await scores(redis, wakeups.aside) == dict.fromkeys(FOREIGN, 1.0)
    for id_ in FOREIGN:
        assert await redis.get(b"arq:job:" + id_) == b"body of " + id_
        assert await redis.pttl(b"arq:job:" + id_) == -1  # for ever


async def test_foreign_jobs_cost_no_permits_and_hide_nothing(wakeups: Wakeups, redis: Redis) -> None:
    """A head full of foreign jobs is cleared by the next claims; only ours are paid for."""
    await redis.zadd(wakeups.queue, {f"foreign-{i}": 1 for i in range(50)})
    await wakeups.enqueue_due(some(5))
    await fill(wakeups, allowance_per_s=0.01)  # one permit
    for _ in range(5):
        assert (await wakeups.claim(10, skew_ms=0)).wakes == []
    assert len((await wakeups.claim(10, skew_ms=0)).wakes) == 1
