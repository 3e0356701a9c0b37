"""Batches: each hold has its result, a retry completes what a crash left, atomic is all or none."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import aiohttp
import pytest

from expiry.api import batch, holds
from expiry.holds import Conn
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


async def test_a_crash_halfway_is_completed_by_the_retry(
    api: Api, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process died after some of the holds: the same request places the others."""
    placed = 0

    async def dies(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - place_now
        nonlocal placed
        if placed == 3:
            raise asyncio.CancelledError  # nothing that follows is done, no answer is sent
        placed += 1
        return await holds.place_now(*args, **kwargs)

    asked = wanted(*(f"r{i}" for i in range(7)))
    with monkeypatch.context() as patched:
        patched.setattr(batch, "place_now", dies)
        with pytest.raises(aiohttp.ClientConnectionError):
            await place(api, asked, once="k")
    assert await pool.fetchval("SELECT count(*) FROM holds") == 3
    assert statuses(await results(await place(api, asked, once="k"))) == [201] * 7
    assert await pool.fetchval("SELECT count(*) FROM holds") == 7


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
    """A deadline in the past, a hold to be replaced that is not there or has ended."""
    ended = await api.placed()
    await api.verb(ended, "release")
    held = await api.placed()
    past = {"resource_id": "a", "expires_at": "2020-01-01T00:00:00Z"}
    for wrong, status in (
        (past, 422),
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
        for result in await results(answer):
            assert result["status"] == 201 or result["problem"]["code"] == "key_in_progress"
    assert await pool.fetchval("SELECT count(*) FROM holds") == 4


async def test_what_is_not_about_one_hold_is_the_answer_itself(api: Api, conn: Conn) -> None:
    """A key in use, an atomic batch of one hold too."""
    for count in (1, 2):
        async with conn.transaction():
            await conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('shop/batch/k', 0))")
            response = await place(api, wanted(*"ab"[:count]), once="k", atomic=True)
            await problem(response, 409, "key_in_progress")


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
