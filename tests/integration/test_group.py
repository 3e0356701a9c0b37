"""Places of many callers in one transaction: the same as each alone, and none of them waits for another."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from expiry import errors, holds
from expiry.api.hints import Hints
from expiry.api.placer import GROUP_MAX, Placer
from expiry.group import Ask, Left, ask, place_group
from expiry.holds import Conn, Hold
from expiry.wanted import Item, Wanted
from tests import scene
from tests.helpers import eventually
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
    return [isinstance(hold, Hold) for hold in await place_group(conn, asks)]


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
    assert isinstance(together, Hold)
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
        assert isinstance(hold, Hold)
        assert hold == await holds.get(conn, hold.id, tenant_id=one.tenant_id)
        assert (hold.tenant_id, list(hold.items)) == (one.tenant_id, one.wanted.items)
    assert isinstance(found[3], Hold)
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
            found = await place_group(conn, [asked("a"), asked("b", "bed"), asked("c", "x")])
            assert found[0] is Left.LOCKED
            assert [isinstance(hold, Hold) for hold in found] == [False, True, True]


async def test_a_group_may_wait_for_a_moment(pool: Pool) -> None:
    """Until the row is free, but no longer than the others can wait."""
    async with pool.acquire() as slow, pool.acquire() as conn:
        await scene.declare(conn, "room", 4)
        async with scene.unfinished(slow) as transaction:
            await scene.place(slow, "room")
            waiting = place_group(conn, [asked("a"), asked("b", "x")], wait=True)
            with pytest.raises(asyncpg.LockNotAvailableError):
                await waiting
            async with scene.blocked(
                pool, conn, place_group(conn, [asked("a"), asked("b", "x")], wait=True)
            ) as task:
                await transaction.commit()
                assert all(isinstance(hold, Hold) for hold in await task)
        assert await scene.units(conn, "room") == (2, 0)


async def test_p7_groups_that_wait_for_each_other_do_not_deadlock(pool: Pool) -> None:
    """They lock in the order of the resources, whatever the order of the requests."""
    for name in "abcdef":
        await scene.on(pool, scene.declare, name, 1000)

    async def group(number: int) -> None:
        names = random.Random(number).sample("abcdef", 6)  # noqa: S311 - to be repeated
        found = await scene.on(pool, place_group, [asked(f"{number}-{n}", n) for n in names], wait=True)
        assert all(isinstance(hold, Hold) for hold in found)

    await scene.together(*(group(number) for number in range(40)))
    await scene.audit(pool)


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
                if isinstance(hold, Hold) and rng.random() < 0.5:
                    await holds.release(conn, hold.id, tenant_id=TENANT)
                sold += isinstance(hold, Hold) and one.wanted.items[0].resource_id != "free"

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

    def get_max_size(self) -> int:
        """As asyncpg's."""
        return self._pool.get_max_size()

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


# For a hold of this holder the shop's own trigger does something: fails, or takes its time.
TROUBLE = """
CREATE OR REPLACE FUNCTION trouble() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.holder = 'bad' AND TG_ARGV[0] = 'sleep' THEN PERFORM pg_sleep(1.5);
    ELSIF NEW.holder = 'bad' THEN RAISE 'trouble' USING ERRCODE = TG_ARGV[0]; END IF;
    RETURN NEW;
END $$;
"""
GROUPS = "pg_stat_activity WHERE query LIKE '%expiry_place_group%' AND state = 'active' AND pid <> pg_backend_pid()"


async def make_trouble(conn: Conn, what: str) -> None:
    """Let each place for the holder "bad" fail with this SQLSTATE, or sleep."""
    await conn.execute(TROUBLE)
    trigger = "CREATE TRIGGER trouble BEFORE INSERT ON holds FOR EACH ROW EXECUTE FUNCTION trouble"
    await conn.execute(f"{trigger}('{what}')")


async def test_an_outage_is_told_at_once(placer: Placer, gate: Gate, pool: Pool) -> None:
    """Nobody is sent to find out alone that the database is away; and the next ones fare better."""
    await scene.on(pool, make_trouble, "sleep")
    gate.open.set()
    tasks = await started(placer, asked("a", holder="bad"), asked("b"))
    await eventually(lambda: pool.fetchval(f"SELECT EXISTS (SELECT FROM {GROUPS})"))
    await pool.execute(f"SELECT pg_terminate_backend(pid) FROM {GROUPS}")
    for task in tasks:
        with pytest.raises(errors.UnavailableError):
            await task
    assert await placer.place(asked("c")) is not None


@pytest.mark.parametrize("sqlstate", ["XX000", "42P01", "53100", "P0001", "57014"])
async def test_one_that_fails_fails_alone(start_api: Callable[..., Any], pool: Pool, sqlstate: str) -> None:
    """Whatever a trigger of the shop's raises for one hold: the others are placed."""
    await scene.on(pool, make_trouble, sqlstate)
    api = await start_api(None)
    answers = await asyncio.gather(
        *(
            api.ask(
                "POST",
                "/v1/holds",
                json={"ttl_s": 60, "resource_id": f"r{n}", "holder": "bad" if n == 3 else "good"},
                headers={"Idempotency-Key": f"k{n}"},
            )
            for n in range(8)
        )
    )
    statuses = [answer.status for answer in answers]
    assert statuses[:3] + statuses[4:] == [201] * 7
    assert statuses[3] == 503


async def test_who_hangs_keeps_nobody_waiting(pool: Pool) -> None:
    """Behind a transaction that does not end the next ones go on; when too many hang, everybody goes alone."""
    await scene.on(pool, make_trouble, "sleep")
    placer = Placer(pool, Hints(None))
    hanging = []
    for n in range(max(1, pool.get_max_size() // 4)):
        hanging += await started(placer, asked(f"a{n}", f"r{n}", holder="bad"))
        [next_] = await started(placer, asked(f"b{n}"))
        assert (await asyncio.wait_for(next_, 1) is None) is (n + 1 == pool.get_max_size() // 4)
    assert await asyncio.wait_for(placer.place(asked("c")), 0.1) is None
    assert all(await asyncio.gather(*hanging))
    assert await placer.place(asked("d")) is not None


async def test_a_group_that_takes_too_long_is_given_up(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of it places alone then, and whoever is to blame is alone with it."""
    monkeypatch.setattr("expiry.api.placer.GROUP_S_MAX", 0.3)
    await scene.on(pool, make_trouble, "sleep")
    placer = Placer(pool, Hints(None))
    found = await asyncio.gather(placer.place(asked("a", holder="bad")), placer.place(asked("b")))
    assert not any(found)
    assert await scene.on(pool, scene.place, "room", idempotency_key="b") is not None


async def test_who_finds_its_resource_locked_goes_with_the_next_that_waits(pool: Pool) -> None:
    """Another process has the row for a moment."""
    # A busy machine may need longer than the product's 100 ms to see the wait.
    await pool.execute("ALTER FUNCTION expiry_place_group SET lock_timeout = '1500ms'")
    await scene.on(pool, scene.declare, "room", 9)
    placer = Placer(pool, Hints(None))
    async with pool.acquire() as slow, scene.unfinished(slow) as transaction:
        await scene.place(slow, "room")
        tasks = await started(placer, asked("a"), asked("b"), asked("c", "bed"))
        assert await tasks[2] is not None
        assert not tasks[0].done()
        await eventually(
            # not on `slow`: within a transaction PostgreSQL shows who waits as of the first look
            lambda: pool.fetchval(f"SELECT EXISTS (SELECT FROM {GROUPS} AND wait_event_type = 'Lock')")
        )
        await transaction.commit()
        holds_ = [hold for hold in await asyncio.gather(*tasks[:2]) if hold is not None]
        assert len(holds_) == 2
    transactions = "SELECT count(DISTINCT xid) FROM outbox WHERE key LIKE 'place%' AND hold_id = ANY ($1)"
    assert await pool.fetchval(transactions, [hold.id for hold in holds_]) == 1


async def test_a_resource_that_stays_locked_is_waited_for_alone(pool: Pool) -> None:
    """In a lane, as ever."""
    await scene.on(pool, scene.declare, "room", 9)
    placer = Placer(pool, Hints(None))
    async with pool.acquire() as slow, scene.unfinished(slow):
        await scene.place(slow, "room")
        assert await placer.place(asked("a")) is None


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


async def test_a_bug_answers_everybody(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the work, nobody waits for ever, and the next ones are served."""

    async def fail(*_args: object, **_given: object) -> None:
        raise KeyError("ours")

    placer = Placer(pool, Hints(None))
    with monkeypatch.context() as broken:
        broken.setattr("expiry.api.placer.place_group", fail)
        for task in await started(placer, asked("a"), asked("b")):
            with pytest.raises(errors.BusyError):
                await asyncio.wait_for(task, 5)
    assert await placer.place(asked("c")) is not None
