"""Places of many callers in one transaction: the same as each alone, and none of them waits for another."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from expiry import errors, holds
from expiry.api.hints import Hints
from expiry.api.placer import GROUP_MAX, Placer
from expiry.group import Ask, ask, place_group
from expiry.holds import Conn, Hold
from expiry.wanted import Item, Wanted
from tests import scene
from tests.scene import TENANT, Pool

WHOLE = {
    "holder": "buyer",
    "external_ref": "cart-7",
    "metadata": {"channel": "web"},
    "max_renewals": 3,
    "max_lifetime_s": 600,
}


def asked(key: str, resource_id: str = "room", quantity: int = 1, **overrides: Any) -> Ask:  # noqa: ANN401 - as Wanted
    """Ask for units of a resource, for a minute unless told otherwise."""
    tenant_id = overrides.pop("tenant_id", TENANT)
    if "expires_at" not in overrides:
        overrides.setdefault("ttl_s", 60)
    wanted = Wanted(items=[Item(resource_id, quantity)], **overrides)
    found = ask(wanted, tenant_id=tenant_id, by="python", route="place", key=key)
    assert found is not None
    return found


async def placed(conn: Conn, *asks: Ask) -> list[bool]:
    """Place them together; answer which were placed."""
    return [hold is not None for hold in await place_group(conn, asks)]


async def rows(conn: Conn, hold: Hold) -> list[Any]:
    """Answer all that was written for a hold, but what tells any two apart."""
    found = [
        await conn.fetchrow("SELECT * FROM holds WHERE id = $1", hold.id),
        await conn.fetchrow("SELECT * FROM outbox WHERE hold_id = $1", hold.id),
        await conn.fetchrow("SELECT * FROM idempotency_keys WHERE response->'ids'->>0 = $1", str(hold.id)),
    ]
    text = json.dumps([dict(row) for row in found if row is not None], default=str)
    assert len(json.loads(text)) == 3
    document = json.loads(text.replace(str(hold.id), "ID"))
    for row in document:
        for name in ("placed_at", "expires_at", "lifetime_ends_at", "occurred_at", "created_at", "xid", "id"):
            row.pop(name, None)
    document[1]["data"] = json.loads(document[1]["data"]) | {"expires_at": None}
    document[2]["response"] = json.loads(document[2]["response"]) | {"placed_at": None}
    document[2].pop("key")
    return list(document)


@pytest.mark.parametrize("capacity", [None, 5, "undeclared"])
@pytest.mark.parametrize("given", [{}, WHOLE], ids=["plain", "whole"])
async def test_together_is_as_alone(conn: Conn, capacity: Any, given: dict[str, Any]) -> None:  # noqa: ANN401
    """The same rows, event and key, and the answer is what the row says."""
    if capacity != "undeclared":
        await scene.declare(conn, "room", capacity)
    alone = await scene.place(conn, Item("room", 2), idempotency_key="a", **given)
    [together] = await place_group(conn, [asked("b", quantity=2, **given)])
    assert together is not None
    assert await rows(conn, together) == await rows(conn, alone)
    assert await holds.get(conn, together.id, tenant_id=TENANT) == together
    again = await holds.place(
        conn, tenant_id=TENANT, items=[Item("room", 2)], ttl_s=60, idempotency_key="b", **given
    )
    assert again.id == together.id  # the key is the same in both
    await scene.audit(conn)


async def test_each_has_its_own(conn: Conn) -> None:
    """Tenants, resources, keys and deadlines of one group do not mix."""
    await scene.declare(conn, "room", 10)
    until = datetime.now(UTC) + timedelta(hours=1)
    asks = [
        asked("a"),
        asked("a", tenant_id="other"),
        asked("b", "bed", 3, holder="x"),
        asked("c", expires_at=until),
        asked("d", quantity=4),
    ]
    found = await place_group(conn, asks)
    for one, hold in zip(asks, found, strict=True):
        assert hold is not None
        assert hold == await holds.get(conn, hold.id, tenant_id=one.tenant_id)
        assert (hold.tenant_id, list(hold.items)) == (one.tenant_id, one.wanted.items)
    assert found[3] is not None
    assert found[3].expires_at == until
    assert await scene.units(conn, "room") == (6, 0)
    await scene.audit(conn)
    await scene.audit(conn, tenant_id="other")


async def test_a_key_that_was_used_is_left_alone(conn: Conn) -> None:
    """With the same body or another: what to say to it is not the group's affair."""
    await scene.place(conn, "room", idempotency_key="a")
    before = await scene.everything(conn)
    assert await placed(conn, asked("a"), asked("a", quantity=2)) == [False, False]
    assert await scene.everything(conn) == before


async def test_one_key_is_placed_once_in_a_group(conn: Conn) -> None:
    """The same request twice at the same time, or two bodies: the first one counts."""
    assert await placed(conn, asked("a"), asked("a"), asked("a", quantity=2), asked("b")) == [
        True,
        False,
        False,
        True,
    ]
    assert await placed(conn, asked("c"), asked("c", tenant_id="other")) == [True, True]


async def test_a_key_in_use_is_not_waited_for(pool: Pool) -> None:
    """Its first request has not committed: nobody waits, and nothing is placed for it."""
    async with pool.acquire() as slow, pool.acquire() as conn, scene.unfinished(slow):
        await scene.place(slow, "room", idempotency_key="a")
        assert await placed(conn, asked("a"), asked("b", "bed")) == [False, True]


async def test_two_groups_with_one_key_place_once(pool: Pool) -> None:
    """Whichever of them is first."""
    for key in "abcdefgh":
        found = await scene.together(
            *(scene.on(pool, placed, asked(key), asked(key + "2")) for _ in range(4))
        )
        assert sum(one for one, _ in found) <= 1
    await scene.audit(pool)
    assert await pool.fetchval("SELECT count(*) = count(DISTINCT response->'ids') FROM idempotency_keys")


async def test_what_is_short_is_left_alone(conn: Conn) -> None:
    """A group sells what there is and no more; overdue holds are not its affair."""
    await scene.declare(conn, "room", 4)
    await scene.overdue(conn, "room")
    assert await placed(conn, asked("a", quantity=2), asked("b", quantity=2), asked("c")) == [
        True,
        False,
        False,
    ]
    assert await scene.units(conn, "room") == (3, 0)
    assert await placed(conn, asked("d"), asked("e")) == [True, False]
    await scene.audit(conn)


async def test_a_locked_resource_delays_nobody(pool: Pool) -> None:
    """Whoever wants it is left alone; the others are placed at once."""
    async with pool.acquire() as slow, pool.acquire() as conn:
        await scene.declare(conn, "room", 4)
        await scene.declare(conn, "bed", 4)
        async with scene.unfinished(slow):
            await scene.place(slow, "room")
            assert await placed(conn, asked("a"), asked("b", "bed"), asked("c", "x")) == [False, True, True]


async def test_p7_a_declaration_under_way_is_not_waited_for(pool: Pool) -> None:
    """Nobody knows yet whether it is counted: it is left alone."""
    async with pool.acquire() as slow, pool.acquire() as conn, scene.unfinished(slow) as transaction:
        await scene.declare(slow, "room", 4)
        assert await placed(conn, asked("a")) == [False]
        await transaction.commit()
        assert await placed(conn, asked("a")) == [True]
        await scene.audit(conn)


async def test_p7_a_group_in_flight_is_counted_by_the_declaration(pool: Pool) -> None:
    """Declaring waits for it."""
    async with pool.acquire() as slow, pool.acquire() as conn, scene.unfinished(slow) as transaction:
        assert await placed(slow, asked("a")) == [True]
        async with scene.blocked(pool, conn, scene.declare(conn, "room", 4)) as declaring:
            await transaction.commit()
            await declaring
        assert await scene.units(conn, "room") == (1, 0)
        await scene.audit(conn)


@pytest.mark.parametrize(
    "given",
    [
        {"expires_at": datetime(2020, 1, 1, tzinfo=UTC)},
        {"expires_at": datetime(2900, 1, 1, tzinfo=UTC)},
        {"ttl_s": 60, "max_lifetime_s": 30},
    ],
    ids=str,
)
async def test_a_deadline_out_of_range_is_left_alone(conn: Conn, given: dict[str, Any]) -> None:
    """And spoils nothing for the others."""
    assert await placed(conn, asked("a", **given), asked("b")) == [False, True]


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_an_old_snapshot_places_nothing(conn: Conn, isolation: scene.Isolation) -> None:
    """What its locks waited for would not be seen."""
    async with scene.unfinished(conn, isolation=isolation):
        assert await placed(conn, asked("a")) == [False]


def test_what_is_never_simple() -> None:
    """Several resources, or a hold that replaces another."""
    several = Wanted(items=[Item("a"), Item("b")], ttl_s=60)
    moved = Wanted(items=[Item("a")], ttl_s=60, replaces=several.id)
    for wanted in (several, moved):
        assert ask(wanted, tenant_id=TENANT, by="python", route="place", key="k") is None


async def test_p7_groups_and_others_sell_what_there_is(pool: Pool) -> None:
    """Groups, single places, releases and expiries at once: never more than the capacity, and every unit in the end."""
    for name in ("room", "bed"):
        await scene.on(pool, scene.declare, name, 25)
    rng = random.Random(7)  # noqa: S311 - to be repeated
    sold = 0

    async def group(number: int) -> None:
        nonlocal sold
        asks = [asked(f"{number}/{i}", rng.choice(("room", "bed", "free"))) for i in range(6)]
        async with pool.acquire() as conn:
            for one, hold in zip(asks, await place_group(conn, asks), strict=True):
                if hold is not None and rng.random() < 0.5:
                    await holds.release(conn, hold.id, tenant_id=TENANT)
                sold += hold is not None and one.wanted.items[0].resource_id != "free"

    async def alone() -> None:
        async with pool.acquire() as conn:
            await scene.outcome(scene.place(conn, rng.choice(("room", "bed"))))

    for number in range(8):
        await scene.together(*(group(number * 10 + i) for i in range(4)), *(alone() for _ in range(2)))
        await scene.audit(pool)
    assert sold >= 50


# --- the placer


class Gate:
    """Stands before a pool until it is opened, so that requests gather."""

    def __init__(self, pool: Pool) -> None:
        """Begin closed."""
        self._pool = pool
        self.open = asyncio.Event()
        self.turns = 0

    def acquire(self, *, timeout: float) -> Any:  # noqa: ANN401 - as asyncpg's
        """Hand out a connection once the gate is open."""
        self.turns += 1
        return _Behind(self, self._pool.acquire(timeout=timeout))


class _Behind:
    def __init__(self, gate: Gate, inner: Any) -> None:  # noqa: ANN401 - asyncpg's
        self._gate = gate
        self._inner = inner

    async def __aenter__(self) -> Conn:
        await self._gate.open.wait()
        conn: Conn = await self._inner.__aenter__()
        return conn

    async def __aexit__(self, *error: object) -> None:
        await self._inner.__aexit__(*error)


@pytest.fixture
def gate(pool: Pool) -> Gate:
    """Give the test a gate before its pool."""
    return Gate(pool)


@pytest.fixture
def placer(gate: Gate) -> Placer:
    """Give the test a placer behind the gate, without a queue."""
    return Placer(gate, Hints(None))  # type: ignore[arg-type]


async def started(placer: Placer, *asks: Ask) -> list[asyncio.Task[Hold | None]]:
    """Ask for these, each as a request of its own; they have all gone as far as they can."""
    tasks = [asyncio.create_task(placer.place(one)) for one in asks]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_who_comes_meanwhile_goes_together(placer: Placer, gate: Gate, pool: Pool) -> None:
    """The first goes at once; those after it share a transaction, as many as one takes."""
    tasks = await started(placer, asked("first"))
    tasks += await started(placer, *(asked(f"k{i}", f"r{i}") for i in range(GROUP_MAX + 2)))
    gate.open.set()
    assert all(await asyncio.gather(*tasks))
    assert gate.turns == 3
    assert await pool.fetchval("SELECT count(DISTINCT xid) FROM outbox") == 3


async def test_one_that_spoils_it_costs_the_others_nothing_but_time(
    placer: Placer, gate: Gate, pool: Pool
) -> None:
    """A trigger of the shop's refuses a row: all of the group are told to go alone."""
    await scene.on(pool, scene.break_events)
    gate.open.set()
    assert await asyncio.gather(*await started(placer, asked("a"), asked("b"))) == [None, None]
    assert await pool.fetchval("SELECT count(*) FROM holds") == 0


async def test_an_outage_is_told_at_once(placer: Placer, gate: Gate, pool: Pool) -> None:
    """Nobody is sent to find out alone that the database is away; and the next ones fare better."""
    await pool.execute("ALTER FUNCTION expiry_place_group(jsonb) RENAME TO gone")
    gate.open.set()
    for task in await started(placer, asked("a"), asked("b")):
        with pytest.raises(errors.UnavailableError):
            await task
    await pool.execute("ALTER FUNCTION gone(jsonb) RENAME TO expiry_place_group")
    assert await placer.place(asked("c")) is not None


async def test_who_waits_too_long_is_told_to_come_again(pool: Pool, gate: Gate) -> None:
    """Before anything is done for it."""
    now_s = 100.0
    placer = Placer(gate, Hints(None), clock=lambda: now_s)  # type: ignore[arg-type]
    [first] = await started(placer, asked("a"))
    [late] = await started(placer, asked("b"))
    now_s = 103.0
    gate.open.set()
    assert await first is not None
    with pytest.raises(errors.BusyError):
        await late
    assert await pool.fetchval("SELECT count(*) FROM holds") == 1


async def test_who_went_away_is_forgotten(placer: Placer, gate: Gate, pool: Pool) -> None:
    """A request that was cancelled while it waited places nothing; the others do not notice."""
    [first] = await started(placer, asked("a"))
    gone, last = await started(placer, asked("b"), asked("c"))
    gone.cancel()
    gate.open.set()
    assert await first is not None
    assert await last is not None
    keys = await pool.fetch("SELECT key FROM idempotency_keys ORDER BY key")
    assert [row["key"] for row in keys] == ["a", "c"]


async def test_closing_waits_for_what_is_under_way(placer: Placer, gate: Gate) -> None:
    """What was begun is answered."""
    [task] = await started(placer, asked("a"))
    closing = asyncio.create_task(placer.close())
    gate.open.set()
    await closing
    assert await task is not None


async def test_work_that_ends_answers_everybody(placer: Placer, gate: Gate) -> None:
    """Whatever ends it, nobody waits for ever, and the next ones are served."""
    tasks = await started(placer, asked("a"))
    tasks += await started(placer, asked("b"))
    assert placer._working is not None  # noqa: SLF001 - there is no other way to break it
    placer._working.cancel()  # noqa: SLF001
    for task in tasks:
        with pytest.raises(errors.BusyError):
            await asyncio.wait_for(task, 5)
    gate.open.set()
    assert await placer.place(asked("c")) is not None
