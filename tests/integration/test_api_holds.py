from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from aiohttp import ClientResponse

from expiry.wakeups import Wakeups
from tests.api_client import OTHER_TENANT, Api, at, every_change, problem, read


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
    assert at(found["expires_at"]) - at(found["placed_at"]) == timedelta(
        microseconds=round(ttl_s * 1_000_000)
    )


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


async def test_repeating_an_end_has_no_new_effect(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
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
    for verb, body in every_change(ttl_s=5):
        if verb == "release":
            continue
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

    async def change(verb: str, generation: int, **body: Any) -> ClientResponse:  # noqa: ANN401
        if form == "header":
            return await api.verb(hold, verb, headers={"If-Match": f'"g{generation}"'}, **body)
        return await api.verb(hold, verb, generation=generation, **body)

    hold = await api.placed()
    for verb, body in every_change(ttl_s=9):
        found = await problem(await change(verb, 2, **body), 412, "generation_mismatch")
        assert found["current_generation"] == 1
    assert (await change("renew", 1, ttl_s=9)).status == 200
    assert (await change("confirm", 2)).status == 200


async def test_conditions_are_read_strictly(api: Api) -> None:
    """No ETag is 400, one that no hold has is 412, a contradiction is 422, * is any generation."""
    hold = await api.placed()
    for etag in ('W/"g1"', '"g0"', '"x"', '"g99999999999999999999"'):
        await problem(await api.verb(hold, "confirm", headers={"If-Match": etag}), 412, "generation_mismatch")
    for etag in ("g1", "", '"g1", "g2"'):
        await problem(await api.verb(hold, "confirm", headers={"If-Match": etag}), 400, "malformed")
    await problem(await api.verb(hold, "confirm", headers={"If-Match": '"g1"'}, generation=2), 422, "invalid")
    assert (await api.verb(hold, "confirm", headers={"If-Match": "*"})).status == 200


async def test_a_change_needs_no_body(api: Api) -> None:
    """Confirm without a body and without a Content-Type is what curl -X POST sends."""
    hold = await api.placed()
    assert (await api.ask("POST", f"/v1/holds/{hold['id']}/confirm")).status == 200


async def test_metadata_is_answered_as_it_is_kept(api: Api) -> None:
    """PostgreSQL knows no negative zero, so nobody is shown one."""
    hold = await api.placed(metadata={"a": [-0.0, 1.5]})
    assert repr(hold["metadata"]) == repr((await api.hold(hold))["metadata"]) == "{'a': [0.0, 1.5]}"
