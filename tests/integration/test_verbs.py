"""Renew, confirm, release, return: what each does to a hold in each state, once."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from expiry import errors, holds
from expiry.holds import Conn, Hold
from expiry.wanted import uuid7
from tests import scene
from tests.helpers import eventually
from tests.scene import TENANT, Pool

Verb: TypeAlias = Callable[..., Awaitable[Hold]]

VERBS: dict[str, Verb] = {
    "renew": holds.renew,
    "confirm": holds.confirm,
    "release": holds.release,
    "return": holds.return_,
}
# What each verb says to a hold in each state; "done" has an effect, "repeated" has none.
TABLE = {
    "held": {"renew": "done", "confirm": "done", "release": "done", "return": "not_confirmed"},
    "overdue": {
        "renew": "hold_expired",
        "confirm": "hold_expired",
        "release": "already_ended",
        "return": "already_ended",
    },
    "expired": {
        "renew": "hold_expired",
        "confirm": "hold_expired",
        "release": "already_ended",
        "return": "already_ended",
    },
    "confirmed": {
        "renew": "already_ended",
        "confirm": "repeated",
        "release": "already_ended",
        "return": "done",
    },
    "released": {
        "renew": "already_ended",
        "confirm": "already_ended",
        "release": "repeated",
        "return": "already_ended",
    },
    "returned": {
        "renew": "already_ended",
        "confirm": "already_ended",
        "release": "already_ended",
        "return": "repeated",
    },
}


async def in_state(conn: Conn, state: str) -> Hold:
    """Place a hold on the room and bring it into this state."""
    if state == "overdue":
        return await scene.overdue(conn, "room")
    hold = await (scene.overdue if state == "expired" else scene.place)(conn, "room")
    if state == "expired":
        await scene.expire_now(conn, hold)
    if state in ("confirmed", "returned"):
        await holds.confirm(conn, hold.id, tenant_id=TENANT)
    if state == "returned":
        await holds.return_(conn, hold.id, tenant_id=TENANT)
    if state == "released":
        await holds.release(conn, hold.id, tenant_id=TENANT)
    return hold


def asked(verb: str) -> dict[str, Any]:
    """Answer what this verb must be given."""
    return {"tenant_id": TENANT} | ({"ttl_s": 60} if verb == "renew" else {})


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("state", TABLE)
async def test_p2_each_verb_in_each_state(conn: Conn, state: str, verb: str) -> None:
    """A hold ends once: a verb does what it says, repeats without effect, or is refused without effect."""
    await scene.declare(conn, "room", 3)
    hold = await in_state(conn, state)
    before = await scene.everything(conn)
    expected = TABLE[state][verb]
    said = await scene.outcome(VERBS[verb](conn, hold.id, **asked(verb)))
    assert said == ("done" if expected == "repeated" else expected)
    assert (await scene.everything(conn) != before) == (expected == "done")
    await scene.audit(conn)


@pytest.mark.parametrize("verb", VERBS)
async def test_p3_no_change_without_its_event(conn: Conn, verb: str) -> None:
    """When the event cannot be written the verb has done nothing."""
    await scene.declare(conn, "room", 3)
    hold = await in_state(conn, "confirmed" if verb == "return" else "held")
    before = await scene.everything(conn)
    await scene.break_events(conn)
    with pytest.raises(asyncpg.RaiseError):
        await VERBS[verb](conn, hold.id, **asked(verb))
    assert await scene.everything(conn) == before


@pytest.mark.parametrize("verb", VERBS)
async def test_an_unknown_hold(conn: Conn, verb: str) -> None:
    """There is nothing to do to a hold that is not there."""
    assert await scene.outcome(VERBS[verb](conn, uuid7(), **asked(verb))) == "not_found"


@pytest.mark.parametrize("verb", VERBS)
async def test_p4_a_caller_that_saw_an_older_generation_is_refused(conn: Conn, verb: str) -> None:
    """Given the generation that the caller has seen, a verb refuses once the hold was renewed."""
    hold = await in_state(conn, "confirmed" if verb == "return" else "held")
    stale = hold.generation + 1
    before = await scene.everything(conn)
    with pytest.raises(errors.GenerationMismatchError) as refused:
        await VERBS[verb](conn, hold.id, generation=stale, **asked(verb))
    assert refused.value.facts["current_generation"] == hold.generation
    assert await scene.everything(conn) == before
    assert await scene.outcome(VERBS[verb](conn, hold.id, generation=1, **asked(verb))) == "done"


async def test_a_renewal_moves_the_deadline_from_now(conn: Conn) -> None:
    """The new deadline counts from the renewal on the database's clock, and the generation goes up by one."""
    hold = await scene.place(conn, "room", ttl_s=60)
    before = await conn.fetchval("SELECT clock_timestamp()")
    renewed = await holds.renew(conn, hold.id, tenant_id=TENANT, ttl_s=600.5)
    after = await conn.fetchval("SELECT clock_timestamp()")
    ttl = timedelta(seconds=600.5)
    assert before + ttl <= renewed.expires_at <= after + ttl
    assert (renewed.generation, renewed.renewals, renewed.placed_at) == (2, 1, hold.placed_at)
    assert renewed == await holds.get(conn, hold.id, tenant_id=TENANT)


async def test_a_repeat_answers_the_same_hold(conn: Conn) -> None:
    """Confirming or returning again answers what the first call answered, whoever asks."""
    hold = await scene.place(conn, "room")
    confirmed = await holds.confirm(conn, hold.id, tenant_id=TENANT, by="till")
    assert await holds.confirm(conn, hold.id, tenant_id=TENANT, by="desk") == confirmed
    returned = await holds.return_(conn, hold.id, tenant_id=TENANT)
    assert await holds.return_(conn, hold.id, tenant_id=TENANT, by="desk") == returned


async def test_a_renewal_may_name_the_deadline(conn: Conn) -> None:
    """A deadline given as a time is taken as it is, and may lie before the old one."""
    hold = await scene.place(conn, "room", ttl_s=600)
    sooner = hold.expires_at - timedelta(seconds=300)
    renewed = await holds.renew(conn, hold.id, tenant_id=TENANT, expires_at=sooner)
    assert renewed.expires_at == sooner


@pytest.mark.parametrize("ahead_s", [-1, 0, 0.5, 31_537_000])
async def test_a_renewal_stays_in_range(conn: Conn, ahead_s: float) -> None:
    """A renewed hold is neither dead on arrival nor beyond a year; refused, it stays as it was."""
    hold = await scene.place(conn, "room")
    before = await scene.everything(conn)
    at = await conn.fetchval("SELECT clock_timestamp()") + timedelta(seconds=ahead_s)
    with pytest.raises(errors.OutOfRangeError):
        await holds.renew(conn, hold.id, tenant_id=TENANT, expires_at=at)
    assert await scene.everything(conn) == before


async def test_renewals_are_limited_in_number_and_in_time(conn: Conn) -> None:
    """No more renewals than the hold was placed with, and none past its lifetime."""
    twice = await scene.place(conn, "room", max_renewals=2)
    for _ in range(2):
        await holds.renew(conn, twice.id, tenant_id=TENANT, ttl_s=60)
    bounded = await scene.place(conn, "room", ttl_s=60, max_lifetime_s=120)
    await holds.renew(conn, bounded.id, tenant_id=TENANT, ttl_s=119)
    before = await scene.everything(conn)
    for hold, ttl_s in ((twice, 1), (bounded, 121)):
        with pytest.raises(errors.LimitReachedError):
            await holds.renew(conn, hold.id, tenant_id=TENANT, ttl_s=ttl_s)
    assert await scene.everything(conn) == before


async def test_a_refusal_says_how_the_hold_is(conn: Conn) -> None:
    """Whoever comes too late learns the state, the generation and when it expired."""
    hold = await scene.overdue(conn, "room")
    with pytest.raises(errors.HoldExpiredError) as refused:
        await holds.confirm(conn, hold.id, tenant_id=TENANT)
    row = await holds.get(conn, hold.id, tenant_id=TENANT)
    assert refused.value.facts == {
        "hold_id": str(hold.id),
        "current_state": "expired",
        "current_generation": 1,
        "expired_at": row.expires_at,
        "server_time": refused.value.facts["server_time"],
    }


async def test_who_ended_a_hold_and_when(conn: Conn) -> None:
    """The row keeps who ended it at what time; a return keeps both and adds its own."""
    hold = await scene.place(conn, "room")
    before = await conn.fetchval("SELECT clock_timestamp()")
    confirmed = await holds.confirm(conn, hold.id, tenant_id=TENANT, by="till")
    assert confirmed.ended_at is not None
    assert before < confirmed.ended_at < hold.expires_at
    returned = await holds.return_(conn, hold.id, tenant_id=TENANT, by="desk", reason="refund")
    assert (returned.ended_at, returned.ended_by) == (confirmed.ended_at, "till")
    assert returned.returned_at is not None
    assert returned.returned_at > confirmed.ended_at
    told = json.loads(await conn.fetchval("SELECT data FROM outbox WHERE type = 'hold.returned'"))
    assert (told["by"], told["reason"]) == ("desk", "refund")


async def test_a_verb_waits_its_turn_then_looks_again(pool: Pool) -> None:
    """Two verbs on one hold: the second waits for the first to commit and is judged by what it left."""
    async with pool.acquire() as one, pool.acquire() as two:
        hold = await scene.place(one, "room")
        async with scene.unfinished(one) as first:
            await holds.release(one, hold.id, tenant_id=TENANT)
            verb = scene.outcome(holds.confirm(two, hold.id, tenant_id=TENANT))
            async with scene.blocked(pool, two, verb) as second:
                await first.commit()
                assert await second == "already_ended"
    await scene.audit(pool)


@pytest.mark.parametrize("verb", ["confirm", "release"])
async def test_p1_a_verb_that_waited_past_the_deadline_is_too_late(pool: Pool, verb: str) -> None:
    """Asked for in time, kept waiting by a checkout until past the deadline: refused, not back-dated."""
    async with pool.acquire() as checkout, pool.acquire() as buyer:
        await scene.declare(buyer, "room", 2)
        hold = await scene.place(buyer, "room")
        await scene.pass_time(buyer, 59.5, hold)
        async with scene.unfinished(checkout) as order:
            await scene.place(checkout, "room")
            asked_for = scene.outcome(VERBS[verb](buyer, hold.id, tenant_id=TENANT))
            async with scene.blocked(pool, buyer, asked_for) as waiting:
                assert await eventually(
                    lambda: pool.fetchval(
                        "SELECT expires_at < clock_timestamp() FROM holds WHERE id = $1", hold.id
                    )
                )
                await order.commit()
                assert await waiting == TABLE["overdue"][verb]
    assert await scene.state(pool, hold) == "held"


async def test_a_verb_gives_up_on_a_lock_after_two_seconds(pool: Pool) -> None:
    """A hold that stays locked is a BusyError, which tells the caller to come again."""
    async with pool.acquire() as one, pool.acquire() as two:
        hold = await scene.place(one, "room")
        async with scene.unfinished(one):
            await holds.release(one, hold.id, tenant_id=TENANT)
            assert await scene.outcome(holds.confirm(two, hold.id, tenant_id=TENANT)) == "busy"
        assert await scene.outcome(holds.confirm(two, hold.id, tenant_id=TENANT)) == "done"
