from __future__ import annotations

from datetime import UTC, datetime, timedelta

import asyncpg

from tests.api_client import Api, at, every_change, make_overdue, problem


async def test_b5_a_hold_past_its_deadline_cannot_be_renewed_or_confirmed(
    api: Api, pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    """B5: 410 says when it expired, and another buyer takes the unit."""
    await api.declare(capacity=1)
    hold = await api.placed()
    await make_overdue(pool)
    for verb, body in every_change(ttl_s=60)[:2]:
        found = await problem(await api.verb(hold, verb, **body), 410, "hold_expired")
        assert at(found["expired_at"]) < datetime.now(UTC) + timedelta(minutes=1)
        assert (found["hold_id"], found["current_state"]) == (hold["id"], "expired")
    await problem(await api.verb(hold, "release"), 409, "already_ended")
    await api.placed()


async def test_b7_a_buyer_never_meets_a_stale_hold(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """B7: past T another place is 201, and the old hold says expired before and after."""
    await api.declare(capacity=1)
    hold = await api.placed()
    await make_overdue(pool)
    before = await api.hold(hold)
    assert (before["state"], before["expires_in_s"], before["ended_at"]) == ("expired", 0, None)
    assert (await api.resource())["available"] == 1

    await api.placed(holder="another")
    after = await api.hold(hold)
    assert (after["state"], after["ended_by"]) == ("expired", "reclaim")


async def test_what_place_reclaims_is_charged_to_the_bucket(
    api: Api, pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    """P9: ended holds that no permit was taken for become debt."""
    await api.declare(capacity=2)
    await api.placed(quantity=1)
    await api.placed(quantity=1)
    await make_overdue(pool)
    await api.placed(quantity=2)
    state = await api.bucket.read()
    assert state.debt > 0


async def test_b10_the_same_holder_is_shown_its_hold(api: Api) -> None:
    """B10: asking again for the last unit names the hold there is; never two confirmable."""
    await api.declare(capacity=1)
    first = await api.placed(holder="ann")
    for _ in range(2):
        refused = await problem(await api.place(holder="ann"), 409, "insufficient_capacity")
        assert (refused["hold_id"], refused["available"]) == (first["id"], 0)
    stranger = await problem(await api.place(holder="bob"), 409, "insufficient_capacity")
    assert "hold_id" not in stranger


async def test_b12_a_refused_change_leaves_the_hold_alone(
    api: Api, pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    """B12: after 409, 412 and 422 deadline, generation and events are as before."""
    hold = await api.placed(max_lifetime_s=90)
    events = await pool.fetchval("SELECT count(*) FROM outbox")
    responses = [
        await api.verb(hold, "renew", ttl_s=100),
        await api.verb(hold, "renew", ttl_s=100, generation=7),
        await api.verb(hold, "renew", ttl_s=0),
        await api.verb(hold, "renew", expires_at="2020-01-01T00:00:00Z"),
        await api.verb(hold, "return"),
    ]
    assert [r.status for r in responses] == [409, 412, 422, 422, 409]
    found = await api.hold(hold)
    assert [found[f] for f in ("expires_at", "generation", "state")] == [hold["expires_at"], 1, "held"]
    assert await pool.fetchval("SELECT count(*) FROM outbox") == events


async def test_c6_no_resource_twice_in_one_hold(api: Api) -> None:
    """C6: 5 + 5 of a resource with 5 is refused, and nothing is held."""
    await api.declare(capacity=5)
    twice = [{"resource_id": "seat", "quantity": 5}] * 2
    await problem(await api.place(items=twice), 422, "invalid")
    assert (await api.resource())["held"] == 0
