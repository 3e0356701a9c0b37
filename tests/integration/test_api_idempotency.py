from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone

import asyncpg
import pytest

from tests.api_client import CHANGES, OTHER_TENANT, Api, at, make_overdue, problem, read


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
    assert [again.headers[h] for h in ("ETag", "Location")] == [
        first.headers[h] for h in ("ETag", "Location")
    ]
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


async def test_what_tells_requests_apart_is_what_they_want(api: Api) -> None:
    """A number written otherwise, a default that is said, a condition in its other form: the same request."""
    for once, first, second in (
        ("a", {"ttl_s": 60}, {"ttl_s": 60.0}),
        ("b", {"ttl_s": 60}, {"ttl_s": 60, "expires_at": None}),
    ):
        hold = await api.placed()
        headers = {"Idempotency-Key": once}
        assert (await api.verb(hold, "renew", headers=headers, **first)).status == 200
        again = await api.verb(hold, "renew", headers=headers, **second)
        assert again.headers["Idempotent-Replayed"] == "true"
        await problem(await api.verb(hold, "renew", headers=headers, ttl_s=61), 422, "key_reused")
    hold = await api.placed()
    headers = {"Idempotency-Key": "c", "If-Match": '"g1"'}
    assert (await api.verb(hold, "confirm", headers=headers)).status == 200
    again = await api.verb(hold, "confirm", headers={"Idempotency-Key": "c"}, generation=1)
    assert again.headers["Idempotent-Replayed"] == "true"
    await problem(await api.verb(hold, "confirm", headers={"Idempotency-Key": "c"}), 422, "key_reused")


async def test_what_tells_places_apart_is_what_they_want(api: Api) -> None:
    """Numbers, times and defaults written otherwise place nothing more, alone and in a batch."""
    at = (datetime.now(UTC) + timedelta(hours=1)).replace(microsecond=500_000)
    later = at.astimezone(timezone(timedelta(hours=2)))
    text = at.isoformat()
    for number, spellings in enumerate(
        (
            ['"ttl_s": 60', '"ttl_s": 60.0, "quantity": 1', '"ttl_s": 6e1, "expires_at": null'],
            ['"ttl_s": 60.5', '"ttl_s": 60.50', '"ttl_s": 6.05e1'],
            [f'"expires_at": "{t}"' for t in (text, text.replace("+00:00", "Z"), later.isoformat())],
            [f'"ttl_s": 60{m}' for m in ("", ', "metadata": {}', ', "metadata": null')],
            [f'"ttl_s": 60, "metadata": {{{m}}}' for m in ('"a": 0.5, "b": 1', '"b": 1, "a": 0.50')],
        )
    ):
        for path, body in (
            ("/v1/holds", '{"resource_id": "seat", %s}'),
            ("/v1/holds/batch", '{"holds": [{"resource_id": "seat", %s}]}'),
        ):
            headers = {"Idempotency-Key": f"{path} {number}", "Content-Type": "application/json"}
            answers = [
                await api.ask("POST", path, headers=headers, data=(body % one).encode()) for one in spellings
            ]
            replayed = [a.headers.get("Idempotent-Replayed") for a in answers]
            assert replayed == [None] + ["true"] * (len(spellings) - 1), spellings
