"""Cases C of the public bug reports: quantities, counted once whatever comes together."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally

import pytest

from expiry import errors, holds, resources
from expiry.holds import Conn, Hold
from expiry.wanted import Item, Wanted
from tests import scene
from tests.scene import TENANT, Pool

RUNS = 500
PAIRS = 200


async def available(conn: Conn, resource_id: str) -> int | None:
    """Answer what a buyer would be told."""
    return (await resources.get(conn, resource_id, tenant_id=TENANT)).available


async def test_c1_released_twice_at_once_and_expired(pool: Pool) -> None:
    """Capacity 10, holds of 3 and 4; the first is released twice and expired at once: 6 available."""
    async with pool.acquire() as conn:
        await scene.declare(conn, "room", 10)
        first = await scene.place(conn, Item("room", 3))
        second = await scene.place(conn, Item("room", 4))
        await scene.together(
            scene.outcome(scene.on(pool, holds.release, first.id, tenant_id=TENANT)),
            scene.outcome(scene.on(pool, holds.release, first.id, tenant_id=TENANT)),
            scene.on(pool, scene.expire_now, first),
        )
        assert await available(conn, "room") == 6
        assert await scene.state(conn, first) == "released"
        assert await scene.state(conn, second) == "held"
        assert await scene.events(conn, first) == ["place::1", "release::1"]
    await scene.audit(pool)


async def test_c1_released_twice_with_the_first_uncommitted(pool: Pool) -> None:
    """The second release waits for the first and gives nothing back; the expiry does not wait."""
    async with pool.acquire() as one, pool.acquire() as two:
        await scene.declare(one, "room", 10)
        first = await scene.place(one, Item("room", 3))
        await scene.place(one, Item("room", 4))
        async with scene.unfinished(one) as release:
            await holds.release(one, first.id, tenant_id=TENANT)
            assert await scene.on(pool, scene.expire_now, first) == ["early"]
            again = scene.outcome(holds.release(two, first.id, tenant_id=TENANT))
            async with scene.blocked(pool, two, again) as second:
                await release.commit()
                assert await second == "done"
        assert await available(one, "room") == 6
    await scene.audit(pool)


async def test_c2_released_and_expired_in_the_same_instant(pool: Pool) -> None:
    """Five hundred times: the quantity comes back once, whoever was first."""
    said: Tally[str] = Tally()
    async with pool.acquire() as buyer, pool.acquire() as worker:
        await scene.declare(worker, "room", RUNS)
        wanted = [Wanted(items=[Item("room")], ttl_s=3600) for _ in range(RUNS)]
        for run, hold in enumerate((await holds.place_many(worker, wanted, tenant_id=TENANT)).holds):
            await worker.execute(
                "UPDATE holds SET expires_at = clock_timestamp() + $1 * interval '1 ms' WHERE id = $2",
                run % 9 / 2 - 1.0,
                hold.id,
            )
            release = scene.outcome(holds.release(buyer, hold.id, tenant_id=TENANT))
            released, expired = await scene.together(release, scene.outcome(one_expiry(worker, hold)))
            said[f"{released}/{expired}"] += 1
            await scene.expire_now(worker, hold)
    assert await scene.units(pool, "room") == (0, 0)
    ends = Tally([row["type"] for row in await pool.fetch("SELECT type FROM outbox")])
    assert ends["hold.released"] + ends["hold.expired"] == RUNS
    assert min(ends["hold.released"], ends["hold.expired"]) > 0, "nobody raced"
    assert said["done/done"] + said["already_ended/done"] == RUNS
    await scene.audit(pool)


async def one_expiry(conn: Conn, hold: Hold) -> None:
    """Run the transition; what it says does not matter here."""
    await scene.expire_now(conn, hold)


async def test_c5_two_buyers_between_check_and_insert(pool: Pool) -> None:
    """Both see the last unit free; the second waits at the counter and is refused once the first commits."""
    async with pool.acquire() as one, pool.acquire() as two:
        await scene.declare(one, "room", 1)
        async with scene.unfinished(one) as first:
            await scene.place(one, "room")
            async with scene.blocked(pool, two, scene.outcome(scene.place(two, "room"))) as second:
                await first.commit()
                assert await second == "insufficient_capacity"
    assert await scene.units(pool, "room") == (1, 0)
    await scene.audit(pool)


async def test_c5_the_unit_is_there_when_the_first_buyer_gives_up(pool: Pool) -> None:
    """The first transaction rolls back: the second buyer gets the unit instead of a refusal."""
    async with pool.acquire() as one, pool.acquire() as two:
        await scene.declare(one, "room", 1)
        async with scene.unfinished(one) as first:
            await scene.place(one, "room")
            async with scene.blocked(pool, two, scene.outcome(scene.place(two, "room"))) as second:
                await first.rollback()
                assert await second == "done"
    await scene.audit(pool)


async def test_c6_the_same_resource_twice_in_one_hold(conn: Conn) -> None:
    """Five and five of five are refused; nothing is held."""
    await scene.declare(conn, "room", 5)
    before = await scene.everything(conn)
    with pytest.raises(errors.OutOfRangeError):
        await scene.place(conn, Item("room", 5), Item("room", 5))
    assert await scene.everything(conn) == before


async def test_c6_the_same_resource_in_two_holds_of_one_call(conn: Conn) -> None:
    """Two holds placed together are added up before they are judged."""
    await scene.declare(conn, "room", 5)
    before = await scene.everything(conn)
    wanted = [Wanted(items=[Item("room", 5)], ttl_s=60) for _ in range(2)]
    with pytest.raises(errors.InsufficientCapacityError):
        await holds.place_many(conn, wanted, tenant_id=TENANT)
    assert await scene.everything(conn) == before


async def test_c7_resources_are_locked_by_name(pool: Pool) -> None:
    """Asked for b and a, a buyer who has to wait for a has not locked b yet."""
    async with pool.acquire() as other, pool.acquire() as buyer:
        for name in ("a", "b"):
            await scene.declare(other, name, 5)
        async with scene.unfinished(other) as first:
            await scene.place(other, "a")
            async with scene.blocked(pool, buyer, scene.outcome(scene.place(buyer, "b", "a"))) as place:
                await pool.fetchval("SELECT held FROM resources WHERE resource_id = 'b' FOR UPDATE NOWAIT")
                await first.commit()
                assert await place == "done"
    await scene.audit(pool)


async def test_c7_opposite_order_never_deadlocks(pool: Pool) -> None:
    """Two hundred pairs at once, each pair with the same resources in opposite order: all are placed."""
    names = ["a", "b", "c", "d"]
    async with pool.acquire() as conn:
        for name in names:
            await scene.declare(conn, name, 2 * PAIRS)
    places = [
        scene.outcome(scene.on(pool, scene.place, *order))
        for pair in range(PAIRS)
        for order in (names[: 2 + pair % 3], names[: 2 + pair % 3][::-1])
    ]
    assert Tally(await scene.together(*places)) == Tally(done=2 * PAIRS)
    assert await scene.units(pool, "a") == (2 * PAIRS, 0)
    await scene.audit(pool)


async def test_c7_place_many_in_opposite_order_never_deadlocks(pool: Pool) -> None:
    """The same for carts of several holds, whose order is the buyer's."""
    names = ["a", "b", "c", "d"]
    async with pool.acquire() as conn:
        for name in names:
            await scene.declare(conn, name, 2 * PAIRS)

    async def cart(order: list[str]) -> None:
        wanted = [Wanted(items=[Item(name)], ttl_s=60) for name in order]
        await scene.on(pool, holds.place_many, wanted, tenant_id=TENANT)

    carts = [scene.outcome(cart(order)) for _ in range(PAIRS // 2) for order in (names, names[::-1])]
    assert Tally(await scene.together(*carts)) == Tally(done=PAIRS)
    await scene.audit(pool)


async def test_c7_everything_at_once_on_the_same_resources(pool: Pool) -> None:
    """Places, confirmations, releases and expiries over shared resources in any order: no deadlock."""
    names = ["a", "b", "c"]
    async with pool.acquire() as conn:
        for name in names:
            await scene.declare(conn, name, 1000)
        placed = [await scene.place(conn, *names[:: 1 - 2 * (i % 2)]) for i in range(60)]
        late = [await scene.overdue(conn, *names[:: 1 - 2 * (i % 2)]) for i in range(60)]
    verbs = [scene.on(pool, holds.confirm, h.id, tenant_id=TENANT) for h in placed[::2]]
    verbs += [scene.on(pool, holds.release, h.id, tenant_id=TENANT) for h in placed[1::2]]
    verbs += [scene.on(pool, scene.place, *names[:: 1 - 2 * (i % 2)]) for i in range(60)]
    batches = [scene.on(pool, scene.expire_now, *late[i::6]) for i in range(6)]
    expiring = asyncio.gather(*batches)
    assert set(await scene.together(*(scene.outcome(v) for v in verbs))) == {"done"}
    assert {kind for kinds in await expiring for kind in kinds} <= {"expired", "contended"}
    await scene.audit(pool)


async def test_c17_capacity_lowered_below_what_is_held(conn: Conn) -> None:
    """The holds are kept and can be confirmed, nothing is available, nothing new is placed until they end."""
    await scene.declare(conn, "room", 10)
    kept, given_back = [await scene.place(conn, Item("room", 4)) for _ in range(2)]
    await scene.declare(conn, "room", 5)
    assert await available(conn, "room") == 0
    with pytest.raises(errors.InsufficientCapacityError) as refused:
        await scene.place(conn, "room")
    assert refused.value.facts["available"] == 0
    assert (await holds.confirm(conn, kept.id, tenant_id=TENANT)).state == "confirmed"
    await holds.release(conn, given_back.id, tenant_id=TENANT)
    assert await available(conn, "room") == 1
    assert await scene.outcome(scene.place(conn, "room")) == "done"
    await scene.audit(conn)
