"""A hold is placed whole or not at all, as asked, once a key, and in the caller's own transaction."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from expiry import errors, holds
from expiry.holds import Conn
from expiry.wanted import Item, Wanted, uuid7
from tests import scene
from tests.scene import TENANT, Pool


async def test_a_placed_hold_is_what_its_row_says(conn: Conn) -> None:
    """What place answers is what get reads, to the microsecond and the last accent."""
    await scene.declare(conn, "room", 5)
    placed = await scene.place(
        conn,
        Item("room", 2),
        "breakfast",
        ttl_s=Decimal("90.000001"),
        holder="Zoë",
        external_ref="order-7",
        metadata={"note": "naïve \u2028 🎟", "nested": {"a": [1, None]}},
        max_renewals=3,
        max_lifetime_s=600,
    )
    assert placed == await holds.get(conn, placed.id, tenant_id=TENANT)
    assert placed.expires_at - placed.placed_at == timedelta(microseconds=90_000_001)
    assert placed.items == (Item("room", 2), Item("breakfast"))
    assert await scene.units(conn, "room") == (2, 0)


async def test_p3_placing_writes_one_event(conn: Conn) -> None:
    """The event is keyed place:{hold}:1 and says what was taken, by whom and until when."""
    hold = await scene.place(conn, Item("room", 2), holder="ann", by="web")
    [event] = await conn.fetch("SELECT * FROM outbox")
    assert (event["key"], event["type"]) == (f"place:{hold.id}:1", "hold.placed")
    assert (event["hold_id"], event["generation"]) == (hold.id, 1)
    assert (event["tenant_id"], event["occurred_at"]) == (TENANT, hold.placed_at)
    data = json.loads(event["data"])
    assert datetime.fromisoformat(data.pop("expires_at")) == hold.expires_at
    assert data == {
        "resource_ids": ["room"],
        "quantities": [2],
        "holder": "ann",
        "external_ref": None,
        "by": "web",
    }


async def test_all_resources_or_none(conn: Conn) -> None:
    """When the last of fifty resources is full, nothing is held and nothing is written."""
    await scene.declare(conn, "r00", 5)
    await scene.declare(conn, "r49", 0)
    before = await scene.everything(conn)
    with pytest.raises(errors.InsufficientCapacityError) as refused:
        await scene.place(conn, *(f"r{i:02}" for i in range(50)), idempotency_key="k")
    assert refused.value.facts == {"resource_id": "r49", "available": 0, "hold_id": None}
    assert await scene.everything(conn) == before


async def test_place_many_is_one_decision(conn: Conn) -> None:
    """Several holds are placed in order, or none of them when together they want too much."""
    await scene.declare(conn, "room", 3)
    two = [Wanted(items=[Item("room")], ttl_s=60, holder=name) for name in ("ann", "bob")]
    placement = await holds.place_many(conn, two, tenant_id=TENANT)
    assert [h.holder for h in placement.holds] == ["ann", "bob"]
    before = await scene.everything(conn)
    again = [Wanted(items=[Item("room")], ttl_s=60) for _ in range(2)]
    with pytest.raises(errors.InsufficientCapacityError) as refused:
        await holds.place_many(conn, again, tenant_id=TENANT)
    assert refused.value.facts["available"] == 1
    assert str(refused.value) == "The resource 'room' has too few units left: 1 available."
    assert await scene.everything(conn) == before
    assert await holds.place_many(conn, [], tenant_id=TENANT) == holds.Placement([])


async def test_an_undeclared_resource_has_no_limit_and_no_row(conn: Conn) -> None:
    """Holding it takes no counter, so that nothing is there to be contended."""
    hold = await scene.place(conn, Item("anything", 1_000_000_000))
    await scene.place(conn, Item("anything", 1_000_000_000))
    assert await conn.fetchval("SELECT count(*) FROM resources") == 0
    assert await conn.fetchval("SELECT counted FROM holds WHERE id = $1", hold.id) == [False]


async def test_tenants_share_nothing(conn: Conn) -> None:
    """Another tenant's resource of the same name is another resource, and its hold is not there."""
    await scene.declare(conn, "room", 1)
    hold = await scene.place(conn, "room")
    await scene.place(conn, "room", tenant_id="other")
    assert await scene.units(conn, "room") == (1, 0)
    for verb in (holds.get, holds.confirm, holds.release, holds.return_):
        with pytest.raises(errors.HoldNotFoundError):
            await verb(conn, hold.id, tenant_id="other")


@pytest.mark.parametrize("ttl_s", [-1, 0, 0.999999, True, "60", None, float("nan"), float("inf"), 1e12, 1e38])
async def test_no_hold_is_dead_on_arrival(conn: Conn, ttl_s: Any) -> None:  # noqa: ANN401 - anything at all
    """A time to live that is no number of seconds from 1 to a year is refused before anything happens."""
    with pytest.raises(errors.OutOfRangeError):
        await scene.place(conn, "room", ttl_s=ttl_s)
    assert await scene.everything(conn) == []


@pytest.mark.parametrize(
    "expires_at",
    [
        datetime.now(UTC) - timedelta(seconds=1),
        datetime.now(UTC) + timedelta(days=366),
        datetime.max.replace(tzinfo=UTC),
        datetime.now(),  # noqa: DTZ005 - that is what is refused
    ],
    ids=["past", "far", "year-9999", "naive"],
)
async def test_a_deadline_lies_ahead_within_a_year(conn: Conn, expires_at: datetime) -> None:
    """A deadline in the past, beyond a year or without a zone is refused."""
    with pytest.raises(errors.OutOfRangeError):
        await scene.place(conn, "room", expires_at=expires_at)
    assert await scene.everything(conn) == []


@pytest.mark.parametrize(
    "items",
    [
        [],
        [Item(f"r{i}") for i in range(51)],
        [Item("a"), Item("a")],
        [Item("")],
        [Item("r" * 256)],
        [Item("a", 0)],
        [Item("a", 1_000_000_001)],
    ],
    ids=["none", "51", "twice", "empty-name", "long-name", "zero", "too-many"],
)
async def test_what_a_hold_may_take(conn: Conn, items: list[Item]) -> None:
    """One to fifty resources, none twice, each with a name and a positive quantity."""
    with pytest.raises(errors.OutOfRangeError):
        await holds.place(conn, tenant_id=TENANT, items=items, ttl_s=60)
    assert await scene.everything(conn) == []


async def test_replacing_moves_the_unit_in_one_step(conn: Conn) -> None:
    """The last unit goes from the old hold to the new one; nobody can step between."""
    await scene.declare(conn, "room", 1)
    old = await scene.place(conn, "room", holder="ann")
    new = await scene.place(conn, "room", holder="ann", replaces=old.id, by="web")
    assert await scene.state(conn, new) == "held"
    assert (await holds.get(conn, old.id, tenant_id=TENANT)).ended_by == "web"
    assert await scene.events(conn, old) == ["place::1", "release::1"]
    assert (
        await conn.fetchval("SELECT data->>'reason' FROM outbox WHERE type = 'hold.released'") == "replaced"
    )
    await scene.audit(conn)


async def test_a_refused_replacement_changes_nothing(conn: Conn) -> None:
    """What replaces an unknown, another tenant's, an ended or an overdue hold, or wants too much, is refused."""
    await scene.declare(conn, "room", 2)
    held = await scene.place(conn, "room")
    foreign = await scene.place(conn, "room", tenant_id="other")
    ended = await scene.place(conn, "bed")
    await holds.release(conn, ended.id, tenant_id=TENANT)
    late = await scene.overdue(conn, "bed")
    before = await scene.everything(conn)
    for replaces, refusal in (
        (uuid7(), errors.HoldNotFoundError),
        (foreign.id, errors.HoldNotFoundError),
        (ended.id, errors.AlreadyEndedError),
        (late.id, errors.AlreadyEndedError),
    ):
        with pytest.raises(refusal):
            await scene.place(conn, "room", replaces=replaces)
    with pytest.raises(errors.InsufficientCapacityError) as refused:
        await scene.place(conn, Item("room", 3), replaces=held.id)
    assert refused.value.facts["available"] == 2
    assert await scene.everything(conn) == before


async def test_a_key_places_once(conn: Conn) -> None:
    """The same key and request answer the first hold; with another request the key is refused."""
    await scene.declare(conn, "room", 5)
    first = await scene.place(conn, "room", idempotency_key="k")
    before = await scene.everything(conn)
    assert await scene.place(conn, "room", idempotency_key="k") == first
    with pytest.raises(errors.KeyReusedError):
        await scene.place(conn, "room", ttl_s=61, idempotency_key="k")
    assert await scene.everything(conn) == before
    assert (await scene.place(conn, "room", idempotency_key="k", tenant_id="other")).id != first.id


async def test_a_refusal_does_not_use_up_the_key(conn: Conn) -> None:
    """What was refused for lack of units may be asked again with its key."""
    await scene.declare(conn, "room", 0)
    with pytest.raises(errors.InsufficientCapacityError):
        await scene.place(conn, "room", idempotency_key="k")
    await scene.declare(conn, "room", 1)
    assert await scene.state(conn, await scene.place(conn, "room", idempotency_key="k")) == "held"


async def test_a_duplicate_in_flight_never_waits(pool: Pool) -> None:
    """While the first request with a key is uncommitted the second is told so at once, then replays."""
    async with pool.acquire() as one, pool.acquire() as two:
        async with scene.unfinished(one) as first:
            hold = await scene.place(one, "room", idempotency_key="k")
            with pytest.raises(errors.KeyInProgressError):
                await scene.place(two, "room", idempotency_key="k")
            await first.commit()
        assert await scene.place(two, "room", idempotency_key="k") == hold
