"""A buyer never meets a stale hold, and nothing is sold twice."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expiry import errors, holds, resources
from expiry.holds import Conn, Hold
from expiry.wanted import Item, Wanted
from tests import scene
from tests.scene import TENANT, Pool


async def available(conn: Conn, resource_id: str) -> int | None:
    """Answer what a buyer would be told."""
    return (await resources.get(conn, resource_id, tenant_id=TENANT)).available


async def test_p6_a_buyer_gets_the_units_of_overdue_holds(conn: Conn) -> None:
    """Place ends overdue holds itself, oldest first and only as many as it needs."""
    await scene.declare(conn, "room", 3)
    late = [await scene.overdue(conn, "room") for _ in range(3)]
    await scene.pass_time(conn, 10, late[1])
    assert await available(conn, "room") == 3
    placed = await holds.place_many(
        conn, [Wanted(items=[Item("room")], ttl_s=60)], tenant_id=TENANT, by="web"
    )
    assert placed.reclaimed == 1
    assert [await scene.state(conn, h) for h in late] == ["held", "expired", "held"]
    assert (await holds.get(conn, late[1].id, tenant_id=TENANT)).ended_by == "reclaim"
    assert await available(conn, "room") == 2
    await scene.audit(conn)


async def test_p6_every_item_of_an_overdue_hold_is_found(conn: Conn) -> None:
    """An overdue hold stands in nobody's way, whether the resource is its first item or its last."""
    for name in ("a", "b", "c"):
        await scene.declare(conn, name, 2)
    late = await scene.overdue(conn, Item("a", 2), Item("b", 2), Item("c", 2))
    assert [await available(conn, name) for name in ("a", "b", "c")] == [2, 2, 2]
    await scene.place(conn, Item("c", 1), Item("a", 1))
    assert await scene.state(conn, late) == "expired"
    assert [await available(conn, name) for name in ("a", "b", "c")] == [1, 2, 1]
    await scene.audit(conn)


async def test_p6_a_held_hold_is_never_reclaimed(conn: Conn) -> None:
    """When overdue units are too few the buyer is told how many there are, and nothing has ended."""
    await scene.declare(conn, "room", 4)
    await scene.place(conn, Item("room", 2), holder="ann")
    await scene.overdue(conn, Item("room", 2))
    before = await scene.everything(conn)
    with pytest.raises(errors.InsufficientCapacityError) as refused:
        await scene.place(conn, Item("room", 3))
    assert refused.value.facts["available"] == 2
    assert await scene.everything(conn) == before


async def test_p6_a_refused_place_ends_nothing(conn: Conn) -> None:
    """One resource could be reclaimed, the other is full: the overdue hold stays for the workers."""
    await scene.declare(conn, "room", 1)
    await scene.declare(conn, "sauna", 0)
    await scene.overdue(conn, "room")
    before = await scene.everything(conn)
    with pytest.raises(errors.InsufficientCapacityError):
        await scene.place(conn, "room", "sauna")
    assert await scene.everything(conn) == before


async def test_p6_a_buyer_waits_for_the_worker_that_ends_the_hold(pool: Pool) -> None:
    """A worker has ended the overdue hold but not committed: the buyer waits and gets the unit."""
    async with pool.acquire() as worker, pool.acquire() as buyer:
        await scene.declare(worker, "room", 1)
        late = await scene.overdue(worker, "room")
        async with scene.unfinished(worker) as batch:
            assert await scene.expire_now(worker, late) == ["expired"]
            async with scene.blocked(pool, buyer, scene.outcome(scene.place(buyer, "room"))) as place:
                await batch.commit()
                assert await place == "done"
    await scene.audit(pool)


async def test_p6_a_buyer_gets_the_unit_when_the_worker_fails(pool: Pool) -> None:
    """The worker rolls back: the waiting buyer ends the hold itself."""
    async with pool.acquire() as worker, pool.acquire() as buyer:
        await scene.declare(worker, "room", 1)
        late = await scene.overdue(worker, "room")
        async with scene.unfinished(worker) as batch:
            await scene.expire_now(worker, late)
            async with scene.blocked(pool, buyer, scene.outcome(scene.place(buyer, "room"))) as place:
                await batch.rollback()
                assert await place == "done"
        assert (await holds.get(worker, late.id, tenant_id=TENANT)).ended_by == "reclaim"
    await scene.audit(pool)


async def test_p6_a_buyer_waits_for_whoever_has_the_overdue_hold(pool: Pool) -> None:
    """Somebody has the overdue hold locked, not its resource: the buyer waits, then ends the hold itself."""
    async with pool.acquire() as somebody, pool.acquire() as buyer:
        await scene.declare(buyer, "room", 1)
        late = await scene.overdue(buyer, "room")
        async with scene.unfinished(somebody) as look:
            await somebody.execute("SELECT FROM holds WHERE id = $1 FOR NO KEY UPDATE", late.id)
            async with scene.blocked(pool, buyer, scene.outcome(scene.place(buyer, "room"))) as place:
                await look.rollback()
                assert await place == "done"
        assert (await holds.get(buyer, late.id, tenant_id=TENANT)).ended_by == "reclaim"
    await scene.audit(pool)


async def test_p6_a_worker_that_hangs_is_busy_never_full(pool: Pool) -> None:
    """The wait is bounded, and then the answer is to come again: the resource is not full."""
    async with pool.acquire() as worker, pool.acquire() as buyer:
        await scene.declare(worker, "room", 1)
        late = await scene.overdue(worker, "room")
        async with scene.unfinished(worker):
            await scene.expire_now(worker, late)
            with pytest.raises(errors.BusyError):
                await scene.place(buyer, "room")
        assert await scene.outcome(scene.place(buyer, "room")) == "done"


async def test_p6_more_overdue_holds_than_one_request_may_end(conn: Conn) -> None:
    """Who needs more than 100 overdue holds ended is told to come again, not that there is nothing."""
    await scene.declare(conn, "room", 101)
    wanted = [Wanted(items=[Item("room")], ttl_s=60) for _ in range(101)]
    late = (await holds.place_many(conn, wanted, tenant_id=TENANT)).holds
    await scene.pass_time(conn, 61, *late)
    assert await scene.outcome(scene.place(conn, Item("room", 101))) == "busy"
    assert await scene.outcome(scene.place(conn, Item("room", 100))) == "done"
    await scene.audit(conn)


async def test_a_row_in_back_off_keeps_its_units(conn: Conn) -> None:
    """An overdue hold that cannot be ended is not sold over: the buyer is refused."""
    await scene.declare(conn, "room", 1)
    late = await scene.overdue(conn, "room")
    await conn.execute("UPDATE holds SET attempts = 5, next_attempt_at = 'infinity' WHERE id = $1", late.id)
    assert await available(conn, "room") == 0
    assert await scene.outcome(scene.place(conn, "room")) == "insufficient_capacity"


async def test_p7_returned_units_are_sold_again(conn: Conn) -> None:
    """Confirmed units stay taken until they are returned."""
    await scene.declare(conn, "room", 1)
    hold = await scene.place(conn, "room")
    await holds.confirm(conn, hold.id, tenant_id=TENANT)
    assert await scene.units(conn, "room") == (0, 1)
    assert await scene.outcome(scene.place(conn, "room")) == "insufficient_capacity"
    await holds.return_(conn, hold.id, tenant_id=TENANT)
    assert await scene.units(conn, "room") == (0, 0)
    assert await scene.outcome(scene.place(conn, "room")) == "done"


async def test_p7_forty_buyers_for_ten_units(pool: Pool) -> None:
    """All at once, half of them for overdue units: ten get one, the others are told it is full."""
    async with pool.acquire() as conn:
        await scene.declare(conn, "room", 10)
        for _ in range(5):
            await scene.overdue(conn, "room")
    said = await scene.together(*(scene.outcome(scene.on(pool, scene.place, "room")) for _ in range(40)))
    assert set(said) <= {"done", "insufficient_capacity", "busy"}
    assert said.count("done") == 10
    await scene.audit(pool)


# --- any order of anything

NAMES = ("a", "b", "c")
_name = st.sampled_from(NAMES)
_item = st.builds(Item, _name, st.integers(1, 3))
_items = st.lists(_item, min_size=1, max_size=3, unique_by=lambda i: i.resource_id)
_which = st.integers(0, 15)
STEP = st.one_of(
    st.tuples(st.just("place"), _items),
    st.tuples(st.just("place"), _items),
    st.tuples(st.just("declare"), st.tuples(_name, st.one_of(st.none(), st.integers(0, 8)))),
    st.tuples(
        st.sampled_from(["renew", "confirm", "release", "return", "expire", "late", "replace"]), _which
    ),
)
ROUNDS = st.lists(st.lists(STEP, min_size=1, max_size=6), min_size=1, max_size=8)
_tenants = itertools.count(1)


class Shop:
    """One tenant with many connections, and the holds it has placed so far."""

    def __init__(self, pool: Pool) -> None:
        """Open without resources."""
        self.pool = pool
        self.tenant = f"shop-{next(_tenants)}"
        self.placed: list[Hold] = []

    async def step(self, verb: str, what: object) -> None:
        """Do one thing on a connection of its own; a refusal is an answer, a deadlock is not."""
        async with self.pool.acquire() as conn:
            assert await scene.outcome(self._do(conn, verb, what)) != "deadlock"

    async def _do(self, conn: Conn, verb: str, what: object) -> None:
        if isinstance(what, list):
            await self._place(conn, what)
        elif isinstance(what, tuple):
            await resources.declare(conn, what[0], tenant_id=self.tenant, capacity=what[1])
        elif isinstance(what, int) and self.placed:
            await self._verb(conn, verb, self.placed[what % len(self.placed)])

    async def _place(self, conn: Conn, items: list[Item], replaces: Hold | None = None) -> None:
        old = None if replaces is None else replaces.id
        hold = await holds.place(conn, tenant_id=self.tenant, items=items, ttl_s=60, replaces=old)
        self.placed.append(hold)

    async def _verb(self, conn: Conn, verb: str, hold: Hold) -> None:
        if verb == "renew":
            await holds.renew(conn, hold.id, tenant_id=self.tenant, ttl_s=60)
        elif verb == "late":
            await conn.execute(
                "UPDATE holds SET expires_at = clock_timestamp() WHERE id = $1 AND state = 'held'", hold.id
            )
        elif verb == "expire":
            await scene.expire_now(conn, *(scene.wake(h, g) for h in self.placed for g in (1, 2, 3)))
        elif verb == "replace":
            await self._place(conn, list(hold.items), hold)
        else:
            finish = {"confirm": holds.confirm, "release": holds.release, "return": holds.return_}[verb]
            await finish(conn, hold.id, tenant_id=self.tenant)

    async def excess(self) -> dict[str, int]:
        """Answer by how much each resource is beyond its capacity."""
        rows = await self.pool.fetch(
            "SELECT resource_id, held + confirmed - capacity AS units FROM resources WHERE tenant_id = $1",
            self.tenant,
        )
        return {r["resource_id"]: max(0, r["units"] or 0) for r in rows}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=ROUNDS)
async def test_p7_whatever_happens_the_books_balance(
    rounds: list[list[tuple[str, object]]], pool: Pool
) -> None:
    """Rounds of simultaneous steps: counters equal the rows, and only lowering a capacity exceeds it."""
    shop = Shop(pool)
    for steps in rounds:
        before = await shop.excess()
        async with asyncio.TaskGroup() as tasks:
            for verb, what in steps:
                tasks.create_task(shop.step(verb, what))
        declared = {what[0] for _, what in steps if isinstance(what, tuple)}
        for name, units in (await shop.excess()).items():
            assert name in declared or units <= before[name]
        await scene.audit(pool, tenant_id=shop.tenant)
