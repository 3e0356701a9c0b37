from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from expiry.wakeups import Wakeups
from tests.api_client import OTHER_TENANT, Api, make_overdue, problem, read

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
CHANGES = ("renew", "confirm", "release", "return")


def at(text: str) -> datetime:
    """Read a time of the wire, which has exactly one form."""
    assert TIME.fullmatch(text)
    return datetime.fromisoformat(text)


async def test_a_placed_hold_is_answered_in_full(api: Api) -> None:
    """201 carries Location, ETag and the whole hold, timed by the database's clock."""
    response = await api.place(ttl_s=900, external_ref="cart-77", metadata={"é": [1, 0.1, None, "\u2028"]})
    hold = await read(response)

    assert response.status == 201
    assert response.headers["Location"] == f"/v1/holds/{hold['id']}"
    assert response.headers["ETag"] == '"g1"'
    assert "Idempotent-Replayed" not in response.headers
    placed_at, expires_at = at(hold.pop("placed_at")), at(hold.pop("expires_at"))
    assert expires_at - placed_at == timedelta(seconds=900)
    assert hold.pop("expires_in_s") == (expires_at - at(hold.pop("server_time"))).total_seconds()
    assert hold.pop("id")
    assert hold == {
        "state": "held",
        "generation": 1,
        "items": [{"resource_id": "seat", "quantity": 1}],
        "holder": None,
        "external_ref": "cart-77",
        "metadata": {"é": [1, 0.1, None, "\u2028"]},
        "renewals": 0,
        "max_renewals": None,
        "lifetime_ends_at": None,
        "ended_at": None,
        "ended_by": None,
    }


async def test_get_answers_what_place_answered(api: Api) -> None:
    """Only the clock moves between the two."""
    placed = await api.placed(holder="h", max_renewals=2, max_lifetime_s=60.5, metadata={"a": {"b": 1.5}})
    response = await api.ask("GET", f"/v1/holds/{placed['id']}")
    found = await read(response)

    assert response.headers["ETag"] == '"g1"'
    assert at(found["server_time"]) > at(placed["server_time"])
    assert found["expires_in_s"] < placed["expires_in_s"]
    for moving in ("server_time", "expires_in_s"):
        del placed[moving], found[moving]
    assert found == placed


@pytest.mark.parametrize("ttl_s", [1, 1.000001, 59.1, 0.1e1, 31_536_000, 31_535_999.999999])
async def test_the_deadline_is_exactly_the_ttl_away(api: Api, ttl_s: float) -> None:
    """Nothing is rounded between the JSON text and the row."""
    hold = await api.placed(ttl_s=ttl_s)
    found = await api.hold(hold)
    assert hold["expires_at"] == found["expires_at"]
    assert at(found["expires_at"]) - at(found["placed_at"]) == timedelta(microseconds=round(ttl_s * 1_000_000))


async def test_expires_at_is_taken_as_it_is(api: Api) -> None:
    """A deadline in any zone is the same instant."""
    deadline = datetime.now(UTC).replace(microsecond=120_000) + timedelta(hours=1)
    local = deadline.astimezone().isoformat()
    hold = await api.placed(expires_at=local)
    assert at(hold["expires_at"]) == deadline


async def test_several_resources_are_held_all_or_none(api: Api) -> None:
    """A full one among them leaves the others untouched, and says how many it has."""
    await api.declare("a", capacity=5)
    await api.declare("b", capacity=1)
    items = [{"resource_id": "a", "quantity": 2}, {"resource_id": "b", "quantity": 2}]
    refused = await problem(await api.place(items=items), 409, "insufficient_capacity")
    assert (refused["available"], refused["resource_id"]) == (1, "b")
    assert (await api.resource("a"))["held"] == 0

    items[1]["quantity"] = 1
    hold = await api.placed(items=items)
    assert hold["items"] == items
    assert [(await api.resource(r))["held"] for r in "ab"] == [2, 1]


async def test_a_placed_hold_has_its_wakeup(api: Api) -> None:
    """After the 201 the queue knows the deadline; after a renewal the new one too."""
    assert isinstance(api.wakeups, Wakeups)
    hold = await api.placed()
    assert await api.wakeups.depth() == 1
    assert (await api.verb(hold, "renew", ttl_s=100)).status == 200
    members = await api.wakeups.redis.zrange(api.wakeups.queue, 0, -1)
    assert members == [f"expire:{hold['id']}:{g}".encode() for g in (1, 2)]


async def test_replaced_holds_make_room(api: Api) -> None:
    """The units of an own hold count for its replacement; foreign and ended ones are named."""
    await api.declare(capacity=1)
    first = await api.placed()
    second = await api.placed(replaces=first["id"])
    assert (await api.hold(first))["state"] == "released"
    await api.declare(capacity=2)
    await problem(await api.place(replaces=first["id"]), 409, "already_ended")
    await problem(await api.place(replaces=str(uuid4())), 404, "not_found")
    await problem(await api.place(key=OTHER_TENANT, replaces=second["id"]), 404, "not_found")


# --- changes


async def test_a_hold_can_be_renewed_confirmed_and_returned(api: Api) -> None:
    """Each change answers the hold as it is then, with its ETag."""
    hold = await api.placed(ttl_s=10)
    response = await api.verb(hold, "renew", ttl_s=100.5)
    renewed = await read(response)
    assert (response.status, response.headers["ETag"]) == (200, '"g2"')
    assert (renewed["generation"], renewed["renewals"], renewed["state"]) == (2, 1, "held")
    assert 100 < renewed["expires_in_s"] <= 100.5

    confirmed = await read(await api.verb(hold, "confirm"))
    assert (confirmed["state"], confirmed["expires_in_s"]) == ("confirmed", 0)
    assert confirmed["ended_by"].startswith("api:")
    assert at(confirmed["ended_at"]) <= at(confirmed["server_time"])

    returned = await read(await api.verb(hold, "return", reason="refund"))
    assert returned["state"] == "returned"
    assert returned["ended_at"] == confirmed["ended_at"]


async def test_repeating_an_end_has_no_new_effect(
    api: Api, pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    """Confirm, release and return are 200 a second time, and write no second event."""
    for verb in ("confirm", "return", "release"):
        hold = await api.placed()
        if verb == "return":
            await api.verb(hold, "confirm")
        first, second = await api.verb(hold, verb), await api.verb(hold, verb)
        assert (first.status, second.status) == (200, 200)
        assert (await read(first))["ended_at"] == (await read(second))["ended_at"]
    assert await pool.fetchval("SELECT count(*) FROM outbox WHERE type <> 'hold.placed'") == 4


async def test_an_end_cannot_be_changed_into_another(api: Api) -> None:
    """409 says how the hold ended."""
    hold = await api.placed()
    await problem(await api.verb(hold, "return"), 409, "not_confirmed")
    await api.verb(hold, "release")
    for verb, body in (("confirm", {}), ("return", {}), ("renew", {"ttl_s": 5})):
        found = await problem(await api.verb(hold, verb, **body), 409, "already_ended")
        assert found["hold_id"] == hold["id"]
        assert (found["current_state"], found["current_generation"]) == ("released", 1)


async def test_renewals_have_limits(api: Api) -> None:
    """Number and lifetime; 409 either way."""
    few = await api.placed(max_renewals=1)
    assert (await api.verb(few, "renew", ttl_s=5)).status == 200
    await problem(await api.verb(few, "renew", ttl_s=5), 409, "limit_reached")
    short = await api.placed(max_lifetime_s=60)
    await problem(await api.verb(short, "renew", ttl_s=61), 409, "limit_reached")


@pytest.mark.parametrize("form", ["header", "body"])
async def test_a_condition_must_match(api: Api, form: str) -> None:
    """If-Match or `generation` of another generation is 412, and changes nothing."""

    async def change(verb: str, generation: int, **body: object) -> Any:  # noqa: ANN401 - the response
        if form == "header":
            return await api.verb(hold, verb, headers={"If-Match": f'"g{generation}"'}, **body)
        return await api.verb(hold, verb, generation=generation, **body)

    hold = await api.placed()
    for verb, body in (("renew", {"ttl_s": 9}), ("confirm", {}), ("release", {}), ("return", {})):
        found = await problem(await change(verb, 2, **body), 412, "generation_mismatch")
        assert found["current_generation"] == 1
    assert (await change("renew", 1, ttl_s=9)).status == 200
    assert (await change("confirm", 2)).status == 200


async def test_conditions_are_read_strictly(api: Api) -> None:
    """Foreign ETags are 400, a contradiction is 422, * is any generation."""
    hold = await api.placed()
    for etag in ("g1", 'W/"g1"', '"g0"', '"x"', "", '"g1", "g2"'):
        await problem(await api.verb(hold, "confirm", headers={"If-Match": etag}), 400, "malformed")
    await problem(await api.verb(hold, "confirm", headers={"If-Match": '"g1"'}, generation=2), 422, "invalid")
    assert (await api.verb(hold, "confirm", headers={"If-Match": "*"})).status == 200


async def test_a_change_needs_no_body(api: Api) -> None:
    """Confirm without a body and without a Content-Type is what curl -X POST sends."""
    hold = await api.placed()
    assert (await api.ask("POST", f"/v1/holds/{hold['id']}/confirm")).status == 200


# --- past the deadline, with queue and sweep off


async def test_b5_a_hold_past_its_deadline_cannot_be_renewed_or_confirmed(
    api: Api, pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    """B5: 410 says when it expired, and another buyer takes the unit."""
    await api.declare(capacity=1)
    hold = await api.placed()
    await make_overdue(pool)
    for verb, body in (("renew", {"ttl_s": 60}), ("confirm", {})):
        found = await problem(await api.verb(hold, verb, **body), 410, "hold_expired")
        assert at(found["expired_at"]) < datetime.now(UTC) + timedelta(minutes=1)
        assert (found["hold_id"], found["current_state"]) == (hold["id"], "expired")
    await problem(await api.verb(hold, "release"), 409, "already_ended")
    await api.placed()


async def test_b7_a_buyer_never_meets_a_stale_hold(
    api: Api, pool: asyncpg.Pool[asyncpg.Record]
) -> None:
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


# --- idempotency


async def test_f9_one_key_places_one_hold(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """F9: of 50 at once one places; the others replay it or come again."""
    responses = await asyncio.gather(*(api.place(once="k") for _ in range(50)))
    statuses = [r.status for r in responses]
    assert set(statuses) <= {201, 409}
    ids = {(await read(r))["id"] for r in responses if r.status == 201}
    assert len(ids) == 1
    first = [r for r in responses if r.status == 201 and "Idempotent-Replayed" not in r.headers]
    assert len(first) == 1
    for response in responses:
        if response.status == 409:
            await problem(response, 409, "key_in_progress")
    assert await pool.fetchval("SELECT count(*) FROM holds") == 1


async def test_f10_a_key_belongs_to_its_body(api: Api) -> None:
    """F10: same key, other body: 422; missing or impossible key: 400."""
    await api.placed(once="k", quantity=1)
    await problem(await api.place(once="k", quantity=2), 422, "key_reused")
    missing = await api.ask("POST", "/v1/holds", json={"ttl_s": 5, "resource_id": "seat"})
    await problem(missing, 400, "idempotency_key_missing")
    for impossible in (" ", '""', "x" * 256, "a\tb"):
        await problem(await api.place(once=impossible), 400, "malformed")
    assert (await api.place(once="x" * 255)).status == 201


async def test_a_replay_is_the_first_answer(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Only server_time and expires_in_s move; quoted or bare, and whatever the order of fields, it is one key."""
    first = await api.place(once="k-1", holder="h", metadata={"a": 1, "b": 2})
    again = await api.place(once='"k-1"', metadata={"b": 2, "a": 1}, holder="h")
    assert (first.status, again.status) == (201, 201)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert [again.headers[h] for h in ("ETag", "Location")] == [first.headers[h] for h in ("ETag", "Location")]
    one, two = await read(first), await read(again)
    assert at(two["server_time"]) > at(one["server_time"])
    assert two["expires_in_s"] < one["expires_in_s"]
    assert one | {"server_time": "", "expires_in_s": 0} == two | {"server_time": "", "expires_in_s": 0}

    await make_overdue(pool)
    other = await api.place(key=OTHER_TENANT, once="k-1")
    assert (await read(other))["id"] != one["id"]


async def test_a_refused_key_is_free_again(api: Api) -> None:
    """Only 2xx are kept: once there is room, the same request places."""
    await api.declare(capacity=1)
    hold = await api.placed()
    await problem(await api.place(once="k"), 409, "insufficient_capacity")
    await api.verb(hold, "release")
    response = await api.place(once="k")
    assert response.status == 201
    assert "Idempotent-Replayed" not in response.headers


@pytest.mark.parametrize("verb", CHANGES)
async def test_a_change_with_a_key_happens_once(
    api: Api, pool: asyncpg.Pool[asyncpg.Record], verb: str
) -> None:
    """The first answer is kept, per hold and verb; another body is 422, a refusal keeps nothing."""
    hold = await api.placed()
    body = {"ttl_s": 77} if verb == "renew" else {}
    headers = {"Idempotency-Key": "k"}
    if verb == "return":
        await problem(await api.verb(hold, verb, headers=headers), 409, "not_confirmed")
        await api.verb(hold, "confirm", headers=headers)
    first = await api.verb(hold, verb, headers=headers, **body)
    events = await pool.fetchval("SELECT count(*) FROM outbox")
    again = await api.verb(hold, verb, headers=headers, **body)
    assert (first.status, again.status) == (200, 200)
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.headers["ETag"] == first.headers["ETag"]
    one, two = await read(first), await read(again)
    assert at(two["server_time"]) > at(one["server_time"])
    assert one | {"server_time": "", "expires_in_s": 0} == two | {"server_time": "", "expires_in_s": 0}
    await problem(await api.verb(hold, verb, headers=headers, generation=1, **body), 422, "key_reused")
    assert await pool.fetchval("SELECT count(*) FROM outbox") == events


@pytest.mark.parametrize("route", ["place", "renew"])
async def test_a_key_in_use_is_told_at_once(
    api: Api, conn: asyncpg.Connection[asyncpg.Record], route: str
) -> None:
    """While a request with the key runs, the next is 409 and parks no connection."""
    hold = await api.placed()
    scope = "shop/place/k" if route == "place" else f"shop/renew/{hold['id']}/k"
    async with conn.transaction():
        await conn.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", scope)
        if route == "place":
            response = await api.place(once="k")
        else:
            response = await api.verb(hold, "renew", headers={"Idempotency-Key": "k"}, ttl_s=9)
        await problem(response, 409, "key_in_progress")
