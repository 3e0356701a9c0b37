"""Enqueue and settle: every call has a definite answer, and what is done leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from expiry.expire import Wake
from expiry.holds import Hold
from expiry.settings import Settings
from expiry.wakeups import BODY, BODY_OUTLIVES_MS, BULK_MAX, Again, Enqueued, Wakeups, job_id
from expiry.wanted import Item, uuid7
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


def hold(wake: Wake, at: datetime, state: str = "held") -> Hold:
    """Return a hold as `enqueue` takes it."""
    return Hold(
        id=wake.hold_id,
        tenant_id="shop",
        state=state,
        generation=wake.generation,
        items=(Item("r"),),
        holder=None,
        external_ref=None,
        metadata=None,
        placed_at=at,
        expires_at=at,
        read_at=datetime.now(UTC),
    )


# --- enqueue


async def test_enqueue_tells_new_ones_from_those_that_were_there(wakeups: Wakeups) -> None:
    """Every wake-up is answered for: queued now, or a duplicate."""
    wakes = some(3)
    assert await wakeups.enqueue_due(wakes[:2]) == Enqueued(queued=2)
    assert await wakeups.enqueue_due(wakes) == Enqueued(queued=1, duplicate=2)
    assert await wakeups.enqueue_due([]) == Enqueued()
    assert await wakeups.depth() == 3


async def test_duplicate_keeps_its_score(wakeups: Wakeups, redis: Redis) -> None:
    """Enqueuing again does not move what is queued, nor shorten the lease of what is claimed."""
    [(wake, at)] = some(1)
    await wakeups.enqueue_due([(wake, at)])
    before = await scores(redis)
    await wakeups.enqueue_due([(wake, at + timedelta(seconds=9))])
    assert await scores(redis) == before
    await fill(wakeups)
    assert len((await wakeups.claim(10, skew_ms=0)).ids) == 1
    leased = await scores(redis)
    assert leased != before
    await wakeups.enqueue_due([(wake, at)])
    assert await scores(redis) == leased


async def test_what_was_lost_alone_is_mended(wakeups: Wakeups, redis: Redis) -> None:
    """A body or the set may be evicted by itself: enqueuing again brings both back."""
    wakes = some(3)
    await wakeups.enqueue_due(wakes)
    [body, *_] = await redis.keys("arq:job:*")
    await redis.delete(body)
    assert await wakeups.enqueue_due(wakes) == Enqueued(duplicate=3)
    assert len(await redis.keys("arq:job:*")) == 3
    await redis.delete(wakeups.queue)
    assert await wakeups.enqueue_due(wakes) == Enqueued(queued=3)
    assert len(await redis.keys("arq:job:*")) == await wakeups.depth() == 3


async def test_many_go_in_several_calls(wakeups: Wakeups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one is counted, whichever call it goes with; a call that fails leaves none of them running."""
    monkeypatch.setattr("expiry.wakeups.BULK_MAX", 2)
    wakes = some(7)
    await wakeups.enqueue_due(wakes[:3])
    assert await wakeups.enqueue_due(wakes) == Enqueued(queued=4, duplicate=3)
    wrong = [(wakes[0][0], wakes[0][1]), *some(4)]
    monkeypatch.setattr("expiry.wakeups.score_ms", lambda at: "x" if at == wrong[2][1] else 1)
    before = len(asyncio.all_tasks())
    with pytest.raises(ResponseError):
        await wakeups.enqueue_due(wrong)
    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize(
    ("micros", "score"), [(0, 0), (1, 1), (999, 1), (1000, 1), (1001, 2), (999_999, 1000)]
)
async def test_score_is_the_deadline_rounded_up(
    wakeups: Wakeups, redis: Redis, micros: int, score: int
) -> None:
    """The score is the first whole millisecond at which the deadline is past."""
    second = datetime(2031, 5, 5, tzinfo=UTC)
    await wakeups.enqueue_due([(Wake(uuid7(), 1), second + timedelta(microseconds=micros))])
    assert list((await scores(redis)).values()) == [second.timestamp() * 1000 + score]


async def test_a4_a_deadline_25_h_past_is_enqueued_like_any_other(wakeups: Wakeups, redis: Redis) -> None:
    """However old the deadline: no error, a body that lives on, and it is the first to be claimed."""
    [old], [recent] = some(1, due_in_s=-25 * 3600), some(1)
    assert await wakeups.enqueue_due([recent, old]) == Enqueued(queued=2)
    ttl_ms = await redis.pttl(f"arq:job:{job_id(old[0])}")
    assert BODY_OUTLIVES_MS - 10_000 < ttl_ms <= BODY_OUTLIVES_MS
    await fill(wakeups)
    assert (await wakeups.claim(1, skew_ms=0)).wakes == [old[0]]


async def test_a_body_outlives_its_deadline_by_a_day(wakeups: Wakeups, redis: Redis) -> None:
    """The body is the constant one, and is there until a day after the deadline."""
    [(wake, at)] = some(1, due_in_s=600)
    await wakeups.enqueue_due([(wake, at)])
    key = f"arq:job:{job_id(wake)}"
    assert await redis.get(key) == BODY
    assert BODY_OUTLIVES_MS + 590_000 < await redis.pttl(key) <= BODY_OUTLIVES_MS + 600_001


async def test_more_than_one_call_can_take(wakeups: Wakeups) -> None:
    """A bulk beyond one call's size goes in completely, and out again completely."""
    wakes = some(2 * BULK_MAX + 1)
    assert await wakeups.enqueue_due(wakes) == Enqueued(queued=2 * BULK_MAX + 1)
    await fill(wakeups)
    claim = await wakeups.claim(5000, skew_ms=0)
    assert set(claim.wakes) == {w for w, _ in wakes}
    await wakeups.settle(done=claim.ids[:BULK_MAX], again=[Again(i, 1) for i in claim.ids[BULK_MAX:]])
    assert await wakeups.depth() == BULK_MAX + 1


async def test_only_held_and_near_holds_are_enqueued(wakeups: Wakeups, settings: Settings) -> None:
    """What has ended needs no wake-up; what is past the horizon is the promoter's."""
    [near], [far] = some(1, due_in_s=5), some(1, due_in_s=settings.enqueue_within_s + 60)
    holds = [hold(*near), hold(*far), hold(*some(1)[0], state="confirmed")]
    counted = Counted()
    assert await wakeups.enqueue(holds) == Enqueued(queued=1, later=1)
    assert counted("expiry_wakeups_enqueued_total", result="later") == 1
    assert await wakeups.depth() == 1


async def test_enqueue_never_raises_for_redis(redis_url: str) -> None:
    """Without Redis the answer is `error` for each, counted, and the request goes on."""
    nobody = redis_url.rpartition(":")[0] + ":1"
    async with wakeups_on(settings_for("postgresql://unused", nobody)) as wakeups:
        counted = Counted()
        assert await wakeups.enqueue([hold(*w) for w in some(3)]) == Enqueued(error=3)
    assert counted("expiry_wakeups_enqueued_total", result="error") == 3


async def test_the_queue_is_in_arqs_format(wakeups: Wakeups) -> None:
    """Our deserializer in hand, arq's own client lists our queue."""
    wakes = some(2, due_in_s=60)
    await wakeups.enqueue_due(wakes)
    jobs = await wakeups.redis.queued_jobs()
    assert {j.job_id for j in jobs} == {job_id(w) for w, _ in wakes}
    assert {(j.function, j.args) for j in jobs} == {("expire", ())}


async def test_memory_of_a_wake_up_is_bounded(wakeups: Wakeups, redis: Redis) -> None:
    """A queued wake-up costs Redis at most 400 bytes, body and all."""
    n = 10_000
    await wakeups.enqueue_due(some(1, due_in_s=60))  # scripts are loaded
    before = (await redis.info("memory"))["used_memory"]
    await wakeups.enqueue_due(some(n, due_in_s=60))
    each = ((await redis.info("memory"))["used_memory"] - before) / n
    print(f"bytes of one wake-up in Redis: {each:.0f}")  # noqa: T201 - a figure for the reader of -s
    assert 100 < each < 400


# --- settle


async def test_settled_is_gone_with_its_body(wakeups: Wakeups, redis: Redis) -> None:
    """Done means gone: no member, no body, nothing to come again."""
    await wakeups.enqueue_due(some(3))
    await fill(wakeups)
    claim = await wakeups.claim(10, skew_ms=0)
    await wakeups.settle(done=claim.ids)
    assert await redis.keys("arq:*") == []
    assert await wakeups.depth() == 0


async def test_what_comes_again_has_a_score_of_its_own(wakeups: Wakeups, redis: Redis) -> None:
    """A retry is queued at the time asked for, as a whole millisecond: it is no expired lease."""
    await wakeups.enqueue_due(some(2))
    await fill(wakeups)
    claim = await wakeups.claim(10, skew_ms=0)
    at_ms = claim.now_ms // 1 - 10
    await wakeups.settle(done=claim.ids[:1], again=[Again(claim.ids[1], at_ms)])
    assert await scores(redis) == {claim.ids[1]: at_ms}
    assert await redis.get(b"arq:job:" + claim.ids[1]) == BODY
    counted = Counted()
    assert (await wakeups.claim(10, skew_ms=0)).ids == [claim.ids[1]]
    assert counted("expiry_leases_expired_total") == 0


async def test_a_late_settle_resurrects_nothing(wakeups: Wakeups) -> None:
    """What somebody else has settled meanwhile does not come back by a retry."""
    await wakeups.enqueue_due(some(1))
    await fill(wakeups)
    claim = await wakeups.claim(10, skew_ms=0)
    await wakeups.settle(done=claim.ids)
    await wakeups.settle(done=[], again=[Again(claim.ids[0], 1)])
    assert await wakeups.depth() == 0


async def test_settling_twice_is_harmless(wakeups: Wakeups) -> None:
    """A settle that is repeated, as after a lost answer, changes nothing more."""
    await wakeups.enqueue_due(some(2))
    await fill(wakeups)
    claim = await wakeups.claim(1, skew_ms=0)
    for _ in range(2):
        await wakeups.settle(done=claim.ids)
        assert await wakeups.depth() == 1


async def test_refunded_permits_can_be_taken_again(wakeups: Wakeups) -> None:
    """What started nothing gives its permit back with the settle."""
    await wakeups.enqueue_due(some(25))
    bucket = await fill(wakeups, allowance_per_s=100)
    claim = await wakeups.claim(25, skew_ms=0)
    started_s = time.monotonic()
    await wakeups.settle(done=claim.ids, refund=10)
    left = (await bucket.read()).permits
    assert 10 <= left <= 11 + 100 * (time.monotonic() - started_s)


def test_ids_name_hold_and_generation() -> None:
    """A renewed hold has another wake-up than before."""
    id_ = UUID("018f0000-0000-7000-8000-000000000000")
    assert job_id(Wake(id_, 7)) == "expire:018f0000-0000-7000-8000-000000000000:7"
