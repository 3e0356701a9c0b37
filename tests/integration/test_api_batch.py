"""Batches: each hold has its result, a retry completes what a crash left, atomic is all or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import aiohttp
import pytest

from expiry import holds as core
from expiry.api import batch, holds
from expiry.holds import Conn
from expiry.wanted import Wanted
from tests import scene
from tests.api_client import OTHER_TENANT, Api, problem, read
from tests.scene import Pool


def wanted(*resources: str, **more: object) -> list[dict[str, Any]]:
    """Ask for one unit of each resource, for a minute."""
    return [{"ttl_s": 60, "resource_id": r, **more} for r in resources]


async def place(api: Api, holds: list[dict[str, Any]], *, once: str | None = None, **more: Any) -> Any:  # noqa: ANN401
    """Place a batch."""
    return await api.ask(
        "POST",
        "/v1/holds/batch",
        headers={"Idempotency-Key": once or str(uuid4())},
        json={"holds": holds, **more},
    )


async def results(response: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Answer the results of a batch, each of which has a hold or a problem."""
    assert response.status == 200, await response.text()
    found: list[dict[str, Any]] = (await read(response))["results"]
    for result in found:
        assert set(result) == {"status", "hold" if result["status"] < 300 else "problem"}
        if "problem" in result:
            assert result["problem"]["status"] == result["status"]
            assert result["problem"]["instance"].startswith("/v1/holds/")
    return found


def statuses(found: list[dict[str, Any]]) -> list[int]:
    """Answer the statuses in order."""
    return [result["status"] for result in found]


def ids(found: list[dict[str, Any]]) -> list[str]:
    """Answer the ids of the holds in order."""
    return [result["hold"]["id"] for result in found]


async def test_each_hold_has_its_result_in_order(api: Api) -> None:
    """What is sold out is refused for itself; the others are placed as if alone."""
    await api.declare("one", capacity=1)
    found = await results(await place(api, wanted("one", "one", "free", "one")))
    assert statuses(found) == [201, 409, 201, 409]
    assert found[1]["problem"]["code"] == "insufficient_capacity"
    assert found[1]["problem"]["available"] == 0
    assert found[2]["hold"]["items"] == [{"resource_id": "free", "quantity": 1}]
    assert (await api.hold(found[0]["hold"]))["state"] == "held"


async def test_a_replay_answers_the_same_holds(api: Api, pool: Pool) -> None:
    """Nothing is placed twice, and what was refused is tried again."""
    await api.declare("one", capacity=1)
    batch_ = wanted("one", "one", "free")
    first = await results(await place(api, batch_, once="k"))
    response = await place(api, batch_, once="k")
    again = await results(response)
    assert response.headers["Idempotent-Replayed"] == "true"
    assert statuses(again) == [201, 409, 201]
    assert [r["hold"]["id"] for r in again if "hold" in r] == [r["hold"]["id"] for r in first if "hold" in r]
    await api.declare("one", capacity=2)
    response = await place(api, batch_, once="k")
    assert "Idempotent-Replayed" not in response.headers
    assert statuses(await results(response)) == [201, 201, 201]
    assert await pool.fetchval("SELECT count(*) FROM holds") == 3
    await scene.audit(pool)


async def crash(api: Api, asked: list[dict[str, Any]], *, after: int) -> None:
    """Place a batch under the key k, in a process that dies after so many of the holds."""
    placed = 0

    async def dies(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - place_now
        nonlocal placed
        if placed == after:
            raise asyncio.CancelledError  # nothing that follows is done, no answer is sent
        placed += 1
        return await holds.place_now(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch, "place_now", dies)
        with pytest.raises(aiohttp.ClientConnectionError):
            await place(api, asked, once="k")


@pytest.mark.parametrize("after", [0, 3])
async def test_a_crash_halfway_is_completed_by_the_retry(api: Api, pool: Pool, after: int) -> None:
    """The process died after some of the holds: the same request places the others, no other does anything."""
    asked = wanted(*(f"r{i}" for i in range(7)))
    await crash(api, asked, after=after)
    assert await pool.fetchval("SELECT count(*) FROM holds") == after
    for atomic in (True, False):
        await problem(await place(api, wanted("other"), once="k", atomic=atomic), 422, "key_reused")
    assert statuses(await results(await place(api, asked, once="k"))) == [201] * 7
    assert await pool.fetchval("SELECT count(*) FROM holds") == 7


async def test_a_key_is_not_free_while_an_item_is_kept(api: Api, pool: Pool) -> None:
    """Items that a late repeat placed are pruned later than what bound the key."""
    await results(await place(api, wanted("a", "b"), once="k"))
    await pool.execute("DELETE FROM idempotency_keys WHERE route = 'batch' OR key = 'k#0'")
    await problem(await place(api, wanted("x", "y", "z"), once="k"), 422, "key_reused")
    assert await pool.fetchval("SELECT count(*) FROM holds") == 2


@pytest.mark.parametrize("atomic", [True, False])
async def test_the_key_belongs_to_one_batch(api: Api, pool: Pool, atomic: bool) -> None:  # noqa: FBT001
    """Another body, a longer or shorter one, the other kind: 422, and nothing is placed."""
    holds = wanted("a", "b")
    await results(await place(api, holds, once="k", atomic=atomic))
    others: list[tuple[list[dict[str, Any]], bool]] = [
        (wanted("a", "c"), atomic),
        (wanted("a"), atomic),
        (wanted("a", "b", "c"), atomic),
        (holds, not atomic),
    ]
    for other, kind in others:
        await problem(await place(api, other, once="k", atomic=kind), 422, "key_reused")
    assert await pool.fetchval("SELECT count(*) FROM holds") == 2


async def test_a_longer_batch_with_the_key_of_a_refused_one(api: Api) -> None:
    """Whichever of its holds was stored gives the key away."""
    await api.declare("none", capacity=0)
    assert statuses(await results(await place(api, wanted("none", "none", "x"), once="k"))) == [409, 409, 201]
    await problem(await place(api, wanted("y"), once="k"), 422, "key_reused")


async def test_atomic_is_all_or_none(api: Api, pool: Pool) -> None:
    """The hold that was refused says why, the others that they were not placed; then all of them fit."""
    await api.declare("two", capacity=2)
    holds = wanted("free", "two", "two", "two", "free")
    found = await results(await place(api, holds, once="k", atomic=True))
    assert statuses(found) == [424, 424, 424, 409, 424]
    assert found[3]["problem"]["code"] == "insufficient_capacity"
    assert found[3]["problem"]["available"] == 2
    assert "index" not in found[3]["problem"]
    assert found[0]["problem"]["code"] == "not_placed"
    assert await pool.fetchval("SELECT count(*) FROM holds") == 0
    await api.declare("two", capacity=3)
    first = await results(await place(api, holds, once="k", atomic=True))
    assert statuses(first) == [201] * 5
    response = await place(api, holds, once="k", atomic=True)
    assert response.headers["Idempotent-Replayed"] == "true"
    assert [r["hold"]["id"] for r in await results(response)] == [r["hold"]["id"] for r in first]
    await scene.audit(pool)


async def test_atomic_names_the_hold_that_was_refused(api: Api) -> None:
    """A deadline in the past or in the year 9999, a hold to be replaced that is not there or has ended."""
    ended = await api.placed()
    await api.verb(ended, "release")
    held = await api.placed()
    past = {"resource_id": "a", "expires_at": "2020-01-01T00:00:00Z"}
    for wrong, status in (
        (past, 422),
        (past | {"expires_at": "9999-12-31T00:00:00Z"}, 422),
        (wanted("a", replaces=str(uuid4()))[0], 404),
        (wanted("a", replaces=ended["id"])[0], 409),
    ):
        found = await results(await place(api, [*wanted("a", replaces=held["id"]), wrong], atomic=True))
        assert statuses(found) == [424, status]
    assert (await api.hold(held))["state"] == "held"
    found = await results(await place(api, wanted("a", "b", replaces=held["id"])))
    assert statuses(found) == [201, 409]
    held = await api.placed()
    response = await place(api, wanted("a", "b", replaces=held["id"]), atomic=True)
    await problem(response, 422, "out_of_range")


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"holds": []}, "#/holds"),
        ({"holds": wanted("a") * 501}, "#/holds"),
        ({"holds": [*wanted("a"), {"ttl_s": 0, "resource_id": "b"}]}, "#/holds/1/ttl_s"),
        ({"holds": [{"ttl_s": 5}]}, "#/holds/0"),
        ({"holds": wanted("a"), "atomic": 1}, "#/atomic"),
        ({"holds": wanted("a"), "more": 1}, "#/more"),
        ({}, "#/holds"),
    ],
)
async def test_a_batch_that_is_not_valid_is_refused_whole(
    api: Api, pool: Pool, body: dict[str, Any], pointer: str
) -> None:
    """The pointer says which hold is wrong; nothing is placed."""
    response = await api.ask("POST", "/v1/holds/batch", headers={"Idempotency-Key": "k"}, json=body)
    found = await problem(response, 422, "invalid")
    assert [e["pointer"] for e in found["errors"]] == [pointer]
    assert await pool.fetchval("SELECT count(*) FROM holds") == 0


async def test_a_batch_needs_a_key(api: Api) -> None:
    """Without one a repeat would place everything again."""
    response = await api.ask("POST", "/v1/holds/batch", json={"holds": wanted("a")})
    await problem(response, 400, "idempotency_key_missing")


async def test_500_holds_at_once(api: Api, pool: Pool) -> None:
    """As many as a batch may have, in one transaction and one by one."""
    await api.declare("much", capacity=1000)
    for atomic in (True, False):
        found = await results(await place(api, wanted(*["much"] * 500), atomic=atomic))
        assert statuses(found) == [201] * 500
    assert await scene.units(pool, "much") == (1000, 0)


async def test_duplicates_at_the_same_time(api: Api, pool: Pool) -> None:
    """Each hold is placed once; who comes too early is told to come again, nothing is a 5xx."""
    holds = wanted("a", "b", "c", "d")
    for answer in await asyncio.gather(*(place(api, holds, once="k") for _ in range(8))):
        if answer.status == 409:
            await problem(answer, 409, "key_in_progress")
            continue
        for result in await results(answer):
            assert result["status"] == 201 or result["problem"]["code"] == "key_in_progress"
    assert await pool.fetchval("SELECT count(*) FROM holds") == 4


@pytest.mark.parametrize("atomic", [(False,), (True, False)], ids=["separate", "mixed"])
async def test_other_bodies_at_the_same_time(api: Api, pool: Pool, atomic: tuple[bool, ...]) -> None:
    """One of them is placed, and whole; the others are refused whole, then and later."""
    bodies: list[dict[str, Any]] = [
        {"holds": wanted(*(f"{i}-{j}" for j in range(5))), "atomic": atomic[i % len(atomic)]}
        for i in range(8)
    ]
    answers = await asyncio.gather(*(place(api, **body, once="k") for body in bodies))
    winner = [answer.status for answer in answers].index(200)
    first = await results(answers[winner])
    assert statuses(first) == [201] * 5
    for i, body in enumerate(bodies):
        if i != winner:
            code = (await read(answers[i]))["code"]
            await problem(answers[i], 409 if code == "key_in_progress" else 422, code)
            await problem(await place(api, **body, once="k"), 422, "key_reused")
    again = await results(await place(api, **bodies[winner], once="k"))
    assert ids(again) == ids(first)
    assert await pool.fetchval("SELECT count(*) FROM holds") == 5


@asynccontextmanager
async def stuck(
    request: Coroutine[Any, Any, Any], owner: object, function: str, at: Callable[..., bool]
) -> AsyncIterator[asyncio.Task[Any]]:
    """Let the request wait before a call of the function until the block ends; others pass."""
    reached, go_on = asyncio.Event(), asyncio.Event()
    work = getattr(owner, function)

    async def waits(*args: Any, **given: Any) -> Any:  # noqa: ANN401 - the function
        if at(*args) and not reached.is_set():
            reached.set()
            await go_on.wait()
        return await work(*args, **given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, function, waits)
        running = asyncio.create_task(request)
        try:
            await asyncio.wait_for(reached.wait(), 5)
            yield running
        finally:
            go_on.set()
            await asyncio.wait([running])


async def test_while_a_batch_still_runs(api: Api, pool: Pool) -> None:
    """Another body is refused; a repeat goes on with what is missing, and both answer the same holds."""

    def at_b(_call: Any, wanted: list[Wanted]) -> bool:  # noqa: ANN401 - a Call
        return [item.resource_id for item in wanted[0].items] == ["b"]

    asked = wanted("a", "b", "c")
    async with stuck(place(api, asked, once="k"), batch, "place_now", at_b) as first:
        for atomic in (True, False):
            await problem(await place(api, wanted("x"), once="k", atomic=atomic), 422, "key_reused")
        again = await results(await place(api, asked, once="k"))
        assert statuses(again) == [201] * 3
    assert ids(await results(await first)) == ids(again)
    assert await pool.fetchval("SELECT count(*) FROM holds") == 3


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("count", [1, 2])
async def test_what_is_not_about_one_hold_is_the_answer_itself(
    api: Api,
    conn: Conn,
    count: int,
    atomic: bool,  # noqa: FBT001
) -> None:
    """A key in use, for a batch of one hold too; nobody waits for it."""
    async with conn.transaction():
        await in_use(conn, "shop/batch/k")
        response = await asyncio.wait_for(place(api, wanted(*"ab"[:count]), once="k", atomic=atomic), 5)
        await problem(response, 409, "key_in_progress")


async def test_an_item_that_is_being_placed_is_not_waited_for(api: Api, conn: Conn) -> None:
    """The others are placed."""
    async with conn.transaction():
        await in_use(conn, "shop/batch-item/k#1")
        response = await asyncio.wait_for(place(api, wanted("a", "b", "c"), once="k"), 5)
    found = await results(response)
    assert statuses(found) == [201, 409, 201]
    assert found[1]["problem"]["code"] == "key_in_progress"


async def in_use(conn: Conn, key: str) -> None:
    """Have the key (tenant/route/key) in use until the transaction ends."""
    await conn.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", key)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("keys", [("k", "k#0"), ("k#0", "k")])
async def test_a_key_like_that_of_an_item(
    api: Api,
    pool: Pool,
    keys: tuple[str, str],
    atomic: bool,  # noqa: FBT001
) -> None:
    """A batch with the key `k#0` is none of the first item of a batch with the key `k`, with the same body too."""
    for key in keys:
        kind = atomic and key == "k#0"
        assert statuses(await results(await place(api, wanted("a"), once=key, atomic=kind))) == [201]
    assert await pool.fetchval("SELECT count(*) FROM holds") == 2


async def test_what_time_does_not_allow_comes_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past its time a batch answers what it has; the retry does the rest."""
    monkeypatch.setattr(batch, "TAKES_S_MAX", -1.0)
    found = await results(await place(api, wanted("a", "b"), once="k"))
    assert [r["problem"]["code"] for r in found] == ["busy", "busy"]
    monkeypatch.undo()
    assert statuses(await results(await place(api, wanted("a", "b"), once="k"))) == [201, 201]


# --- release


async def release(api: Api, ids: list[str], **more: Any) -> Any:  # noqa: ANN401 - headers, key
    """Release a batch."""
    return await api.ask("POST", "/v1/holds/release-batch", json={"ids": ids}, **more)


async def test_each_release_has_its_result(api: Api, pool: Pool) -> None:
    """Released, released before, confirmed, unknown, another tenant's: each for itself."""
    held, released, confirmed = [await api.placed() for _ in range(3)]
    foreign = await api.placed(key=OTHER_TENANT)
    await api.verb(released, "release")
    await api.verb(confirmed, "confirm")
    ids = [h["id"] for h in (held, released, confirmed, foreign, held)]
    found = await results(await release(api, ids))
    assert statuses(found) == [200, 200, 409, 404, 200]
    assert found[0]["hold"]["state"] == "released"
    assert found[2]["problem"]["code"] == "already_ended"
    await scene.audit(pool)


async def test_a_release_with_a_key_is_replayed(api: Api) -> None:
    """The first answers come again; another body is refused."""
    first, second = await api.placed(), await api.placed()
    once = {"headers": {"Idempotency-Key": "k"}}
    assert statuses(await results(await release(api, [first["id"]], **once))) == [200]
    response = await release(api, [first["id"]], **once)
    assert response.headers["Idempotent-Replayed"] == "true"
    await problem(await release(api, [second["id"]], **once), 422, "key_reused")
    assert (await api.hold(second))["state"] == "held"


@pytest.mark.parametrize("keys", [("k", "k#0"), ("k#0", "k")])
async def test_a_release_with_a_key_like_that_of_an_item(api: Api, keys: tuple[str, str]) -> None:
    """Each is a batch of its own."""
    for key in keys:
        hold = await api.placed()
        response = await release(api, [hold["id"]], headers={"Idempotency-Key": key})
        assert statuses(await results(response)) == [200]
        assert (await api.hold(hold))["state"] == "released"


async def test_other_releases_at_the_same_time(api: Api, pool: Pool) -> None:
    """One of them is done, and whole; the others are refused whole."""
    bodies = [[(await api.placed())["id"] for _ in range(3)] for _ in range(6)]
    once = {"headers": {"Idempotency-Key": "k"}}
    answers = await asyncio.gather(*(release(api, ids, **once) for ids in bodies))
    winner = [answer.status for answer in answers].index(200)
    assert statuses(await results(answers[winner])) == [200] * 3
    for i, ids in enumerate(bodies):
        if i != winner:
            code = (await read(answers[i]))["code"]
            await problem(answers[i], 409 if code == "key_in_progress" else 422, code)
            await problem(await release(api, ids, **once), 422, "key_reused")
    released = await pool.fetch("SELECT id::text FROM holds WHERE state = 'released'")
    assert {row["id"] for row in released} == set(bodies[winner])


async def test_while_a_release_still_runs(api: Api) -> None:
    """Another body is refused; a repeat goes on with what is missing."""
    asked: list[str] = [(await api.placed())["id"] for _ in range(3)]
    other = await api.placed()
    once = {"headers": {"Idempotency-Key": "k"}}

    def at_second(_conn: Conn, id_: UUID) -> bool:
        return str(id_) == asked[1]

    async with stuck(release(api, asked, **once), core, "release", at_second) as first:
        await problem(await release(api, [other["id"]], **once), 422, "key_reused")
        again = await results(await release(api, asked, **once))
        assert statuses(again) == [200, 409, 200]
        assert again[1]["problem"]["code"] == "key_in_progress"  # its transaction is the first one's
    assert statuses(await results(await first)) == [200] * 3
    assert statuses(await results(await release(api, asked, **once))) == [200] * 3
    assert (await api.hold(other))["state"] == "held"
