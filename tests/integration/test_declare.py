"""Declaring a resource counts what is held already, whatever is in flight at that moment."""

from __future__ import annotations

import pytest

from expiry import errors, holds
from expiry.holds import Conn
from expiry.wanted import Item
from tests import scene
from tests.scene import TENANT, Pool


async def test_units_held_before_are_counted(conn: Conn) -> None:
    """First or later item, held or overdue: all of it counts from the declaration on."""
    for items in ([Item("room", 2)], [Item("bed"), Item("room", 3)], [Item("bed", 4)]):
        await scene.place(conn, *items)
    late = await scene.overdue(conn, Item("room", 4))
    await scene.place(conn, Item("room", 8), tenant_id="other")
    await scene.declare(conn, "room", 10)
    assert await scene.units(conn, "room") == (9, 0)
    assert await scene.expire_now(conn, late) == ["expired"]
    assert await scene.units(conn, "room") == (5, 0)
    await scene.audit(conn)


async def test_units_confirmed_before_stay_outside(conn: Conn) -> None:
    """The capacity says what is on sale from now on; what was sold before neither counts nor comes back."""
    sold = await scene.place(conn, Item("room", 3))
    await holds.confirm(conn, sold.id, tenant_id=TENANT)
    await scene.declare(conn, "room", 2)
    assert await scene.units(conn, "room") == (0, 0)
    await holds.return_(conn, sold.id, tenant_id=TENANT)
    assert await scene.units(conn, "room") == (0, 0)
    await scene.audit(conn)


async def test_declaring_again_changes_the_capacity_only(conn: Conn) -> None:
    """Counters stay; a capacity of null counts without a limit."""
    await scene.declare(conn, "room", 2)
    await scene.place(conn, Item("room", 2))
    await scene.declare(conn, "room", None)
    await scene.place(conn, Item("room", 5))
    assert await scene.units(conn, "room") == (7, 0)
    await scene.declare(conn, "room", 8)
    assert await scene.outcome(scene.place(conn, Item("room", 2))) == "insufficient_capacity"
    assert await scene.outcome(scene.place(conn, Item("room", 1))) == "done"


async def test_lowering_is_recorded_until_the_excess_is_allowed(conn: Conn) -> None:
    """A capacity below what is taken carries the time it was lowered; raising it clears that."""
    await scene.place(conn, Item("room", 3))
    stamps = []
    for capacity in (2, 1, 3):
        await scene.declare(conn, "room", capacity)
        stamps.append(await conn.fetchval("SELECT lowered_at FROM resources"))
    assert stamps[0] < stamps[1]
    assert stamps[2] is None


@pytest.mark.parametrize(("resource_id", "capacity"), [("", 1), ("r" * 256, 1), ("r", -1), ("r", 2**31)])
async def test_what_may_be_declared(conn: Conn, resource_id: str, capacity: int) -> None:
    """A name of 1 to 255 characters and a capacity that fits, or nothing is declared."""
    with pytest.raises(errors.OutOfRangeError):
        await scene.declare(conn, resource_id, capacity)
    assert await scene.everything(conn) == []


@pytest.mark.parametrize("items", [["room"], ["bed", "room"]], ids=["first-item", "later-item"])
async def test_p7_a_place_in_flight_is_waited_for(pool: Pool, items: list[str]) -> None:
    """A place that met an undeclared resource commits after the declaration began: it is counted."""
    async with pool.acquire() as buyer, pool.acquire() as seller:
        async with scene.unfinished(buyer) as order:
            await scene.place(buyer, *items)
            async with scene.blocked(pool, seller, scene.declare(seller, "room", 1)) as declaration:
                await order.commit()
                await declaration
        assert await scene.units(pool, "room") == (1, 0)
        assert await scene.outcome(scene.place(buyer, "room")) == "insufficient_capacity"
    await scene.audit(pool)


async def test_p7_a_place_waits_for_a_declaration_in_flight(pool: Pool) -> None:
    """A place that comes while the declaration is uncommitted is judged by the new capacity."""
    async with pool.acquire() as buyer, pool.acquire() as seller:
        async with scene.unfinished(seller) as listing:
            await scene.declare(seller, "room", 1)
            verb = scene.outcome(scene.place(buyer, Item("room", 2)))
            async with scene.blocked(pool, buyer, verb) as place:
                await listing.commit()
                assert await place == "insufficient_capacity"
        assert await scene.outcome(scene.place(buyer, "room")) == "done"
    await scene.audit(pool)


async def test_p7_a_place_goes_on_when_the_declaration_is_withdrawn(pool: Pool) -> None:
    """After the declaration's rollback the resource is what it was: without a limit."""
    async with pool.acquire() as buyer, pool.acquire() as seller, scene.unfinished(seller) as listing:
        await scene.declare(seller, "room", 1)
        verb = scene.outcome(scene.place(buyer, Item("room", 2)))
        async with scene.blocked(pool, buyer, verb) as place:
            await listing.rollback()
            assert await place == "done"
    assert await pool.fetchval("SELECT counted FROM holds") == [False]


@pytest.mark.parametrize("verb", ["confirm", "release", "expire"])
async def test_p7_a_hold_that_ends_in_flight(pool: Pool, verb: str) -> None:
    """A hold that is just ending when its resource is declared is counted as neither held nor sold."""
    async with pool.acquire() as buyer, pool.acquire() as seller:
        hold = await (scene.overdue if verb == "expire" else scene.place)(buyer, "room")
        async with scene.unfinished(buyer) as order:
            if verb == "expire":
                await scene.expire_now(buyer, hold)
            else:
                await {"confirm": holds.confirm, "release": holds.release}[verb](
                    buyer, hold.id, tenant_id=TENANT
                )
            async with scene.blocked(pool, seller, scene.declare(seller, "room", 1)) as declaration:
                await order.commit()
                await declaration
    assert await scene.units(pool, "room") == (0, 0)
    await scene.audit(pool)


async def test_p7_a_hold_that_ends_after_the_declaration_began(pool: Pool) -> None:
    """A release that waits for an uncommitted declaration gives back the unit that it counted."""
    async with pool.acquire() as buyer, pool.acquire() as seller:
        hold = await scene.place(buyer, "room")
        async with scene.unfinished(seller) as listing:
            await scene.declare(seller, "room", 1)
            verb = scene.outcome(holds.release(buyer, hold.id, tenant_id=TENANT))
            async with scene.blocked(pool, buyer, verb) as release:
                await listing.commit()
                assert await release == "done"
    assert await scene.units(pool, "room") == (0, 0)
    await scene.audit(pool)


async def test_two_declarations_at_once(pool: Pool) -> None:
    """The second waits for the first and counts nothing twice."""
    async with pool.acquire() as one, pool.acquire() as two:
        await scene.place(one, Item("room", 3))
        async with scene.unfinished(one) as listing:
            await scene.declare(one, "room", 5)
            async with scene.blocked(pool, two, scene.declare(two, "room", 4)) as second:
                await listing.commit()
                await second
    assert await scene.units(pool, "room") == (3, 0)
    assert await pool.fetchval("SELECT capacity FROM resources") == 4
