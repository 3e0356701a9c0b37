"""Faults that a reading of the code found, each with the test that shows it is gone."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import asyncpg
import pytest

import expiry
from expiry import deadletters, doctor, errors, holds, schema
from expiry.api.hints import Hints
from expiry.holds import Hold
from expiry.permits import Permits
from expiry.service import connect_database
from expiry.wakeups import Enqueued, Wakeups
from expiry.wanted import Item
from expiry.wire import problems
from governor import GovernorSettings, PostgresBucket
from tests import scene
from tests.api_client import Api, problem, read
from tests.fleet import TENANT, Pool, overdue, placed, settings_for, sweep_of, wakeups_on
from tests.helpers import eventually

REFUSE_ALL = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$BEGIN RAISE EXCEPTION 'no' USING DETAIL = 'holder alice@example.org'; END $$;
CREATE TRIGGER refuse BEFORE UPDATE ON holds FOR EACH ROW EXECUTE FUNCTION refuse()
"""


REFUSE_EXPIRY = REFUSE_ALL.replace("BEFORE UPDATE ON holds", "BEFORE UPDATE OF state ON holds")
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)


class Slow(Wakeups):
    """Holds back each call until it is let through."""

    gate: asyncio.Event

    async def enqueue(self, holds: object) -> Enqueued:
        """Wait at the gate first."""
        await self.gate.wait()
        return await super().enqueue(holds)  # type: ignore[arg-type]


async def test_the_last_of_a_burst_is_not_left_behind(pool: Pool, database_url: str, redis_url: str) -> None:
    """What came while a call hung goes with the next one, though no other request follows."""
    async with wakeups_on(settings_for(database_url, redis_url)) as plain:
        slow = Slow(plain.redis, settings_for(database_url, redis_url), GovernorSettings())
        slow.gate = asyncio.Event()
        hints = Hints(slow)
        first, last = await placed(pool, 2, ttl_s=60)
        await hints.enqueue([first])
        await hints.enqueue([last])  # answers after 0.1 s, for nobody waits long for Redis
        slow.gate.set()
        await hints.close()
        assert await plain.depth() == 2


async def test_the_databases_clock_says_what_is_near(pool: Pool, database_url: str, redis_url: str) -> None:
    """A process whose clock is an hour off enqueues what is due in a minute."""
    async with wakeups_on(settings_for(database_url, redis_url)) as wakeups:
        [hold] = await placed(pool, 1, ttl_s=60)
        shifted = {name: getattr(hold, name) + timedelta(hours=1) for name in ("expires_at", "read_at")}
        fields = {f: getattr(hold, f) for f in Hold.__dataclass_fields__} | shifted
        assert (await wakeups.enqueue([Hold(**fields)])).queued == 1


async def test_a_transaction_of_ours_is_the_outermost(conn: asyncpg.Connection[asyncpg.Record]) -> None:
    """Inside another one it could not know of the commit, so it refuses."""
    async with conn.transaction():
        with pytest.raises(errors.ExpiryError, match="outermost"):
            async with expiry.transaction(conn, None):
                pass


async def test_what_a_place_reclaimed_is_charged(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record]
) -> None:
    """Holds that a placing transaction expired are debt of the bucket."""
    await expiry.declare(conn, "room", tenant_id=TENANT, capacity=1)
    old = await holds.place(conn, tenant_id=TENANT, items=[Item("room")], ttl_s=60)
    await conn.execute(
        "UPDATE holds SET placed_at = placed_at - interval '1 h', expires_at = expires_at - interval '1 h' "
        "WHERE id = $1",
        old.id,
    )
    bucket = PostgresBucket(pool, "debt", floor_per_s=1)
    async with expiry.transaction(conn, None, bucket) as after:
        after.add(await holds.place(conn, tenant_id=TENANT, items=[Item("room")], ttl_s=60))
    state = await bucket.read()
    assert state.debt > 0


async def test_a_row_given_up_is_neither_overdue_nor_quoted(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], database_url: str, redis_url: str
) -> None:
    """A row that refuses every UPDATE becomes a dead letter without its content, and the doctor is content."""
    settings = settings_for(database_url, redis_url, attempts_max=1, sweep_grace_s=0)
    await overdue(pool, 1)
    await conn.execute(REFUSE_ALL)
    sweep = sweep_of(pool, settings)
    await sweep.permits.publish()
    await sweep.one_pass()
    [letter] = await deadletters.list_(conn)
    assert "alice" not in letter["first_error"] + letter["last_error"]
    assert doctor.healthy(await doctor.examine(conn, since=None, settings=settings))


async def test_a_discarded_letter_can_be_replayed(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], database_url: str, redis_url: str
) -> None:
    """A person may think again: until then nothing could end that hold."""
    settings = settings_for(database_url, redis_url, attempts_max=1, sweep_grace_s=0)
    await overdue(pool, 1)
    await conn.execute(REFUSE_ALL)
    sweep = sweep_of(pool, settings)
    await sweep.permits.publish()
    await sweep.one_pass()
    [letter] = await deadletters.list_(conn)
    await deadletters.discard(conn, [letter["id"]], by="bob")
    await conn.execute("DROP TRIGGER refuse ON holds")
    assert await deadletters.replay(conn, [letter["id"]], by="alice") == [letter["id"]]
    assert (await sweep.one_pass())["expired"] == 1


def test_every_error_has_an_answer() -> None:
    """No child of ExpiryError, present or future, can break the error handler."""
    children: set[type] = {errors.ExpiryError, *errors.ExpiryError.__subclasses__()}
    assert all(any(k in problems.PROBLEMS for k in child.__mro__) for child in children)


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": {"a": float("nan")}},
        {"metadata": {"a": "\0"}},
        {"metadata": {"\0": 1}},
        {"metadata": {"a": "\ud800"}},
        {"metadata": {"a": "x" * 9000}},
        {"metadata": {"a": object()}},
        {"holder": "x" * 256},
        {"external_ref": "a\0"},
        {"max_renewals": 2**31},
        {"items": [Item("room", True)]},  # noqa: FBT003 - that is what is refused
        {"items": [Item("room", 1.5)]},  # type: ignore[arg-type]
    ],
)
async def test_python_callers_are_told_what_is_wrong(
    conn: asyncpg.Connection[asyncpg.Record], wrong: dict[str, object]
) -> None:
    """Input that no row can hold is refused by name, before the database sees it."""
    given = {"tenant_id": TENANT, "items": [Item("room")], "ttl_s": 60} | wrong
    with pytest.raises(errors.OutOfRangeError):
        await holds.place(conn, **given)  # type: ignore[arg-type]


async def test_a_backslash_is_no_nul(conn: asyncpg.Connection[asyncpg.Record]) -> None:
    """The six characters of an escape, written out, are ordinary text."""
    metadata = {"a": "\\u0000"}
    hold = await holds.place(conn, tenant_id=TENANT, items=[Item("r")], ttl_s=60, metadata=metadata)
    assert (await holds.get(conn, hold.id, tenant_id=TENANT)).metadata == metadata


async def test_one_locked_resource_leaves_the_others_their_connections(api: Api, pool: Pool) -> None:
    """However many places wait for a row that a checkout keeps, an unrelated hold is confirmed at once."""
    await api.declare(capacity=1000)
    mine = await api.placed(resource_id="other")
    async with pool.acquire() as conn, conn.transaction():
        await conn.execute("SELECT FROM resources FOR UPDATE")
        waiting = [asyncio.create_task(api.place(ttl_s=60)) for _ in range(30)]
        await eventually(lambda: pool.fetchval(WAITING))
        async with asyncio.timeout(1):
            assert (await api.verb(mine, "confirm")).status == 200
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_replay_does_not_say_that_a_confirmed_hold_expired(api: Api, pool: Pool) -> None:
    """The first answer is repeated as it was, past its deadline too: GET says how the hold ended."""
    first = await read(await api.place(once="k", ttl_s=1))
    await api.verb(first, "confirm")
    await pool.execute(
        "UPDATE idempotency_keys SET response = response || jsonb_build_object("
        "'placed_at', clock_timestamp() - interval '1 h')"
    )
    again = await read(await api.place(once="k", ttl_s=1))
    assert (again["id"], again["state"]) == (first["id"], "held")


async def test_a_number_is_not_the_string_of_its_digits(api: Api) -> None:
    """Two bodies that differ in that are two bodies."""
    assert (await api.place(once="k", metadata={"price": 1.5})).status == 201
    again = await api.place(once="k", metadata={"price": "1.5"})
    await problem(again, 422, "key_reused")


async def test_an_old_snapshot_gives_no_wrong_refusal(pool: Pool) -> None:
    """What was released since a REPEATABLE READ transaction began is Busy to it, not sold out."""
    async with pool.acquire() as old, pool.acquire() as other:
        await expiry.declare(other, "room", tenant_id=TENANT, capacity=1)
        held = await holds.place(other, tenant_id=TENANT, items=[Item("room")], ttl_s=60)
        async with scene.unfinished(old, isolation="repeatable_read"):
            await old.execute("SELECT FROM holds")
            await holds.release(other, held.id, tenant_id=TENANT)
            with pytest.raises(errors.BusyError):
                await holds.place(old, tenant_id=TENANT, items=[Item("room")], ttl_s=60)


async def test_our_sessions_are_read_committed(pool: Pool, database_url: str, redis_url: str) -> None:
    """Whatever the database's default, our own functions need to see what they waited for."""
    name = await pool.fetchval("SELECT current_database()")
    await pool.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    ours = await connect_database(settings_for(database_url, redis_url), "test")
    assert await ours.fetchval("SHOW transaction_isolation") == "read committed"
    await ours.close()


async def test_a_fast_clock_fences_nobody_off(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose clock is a day ahead publishes by the database's clock like all others."""
    row = PostgresBucket(pool, "fixed", floor_per_s=5)
    monkeypatch.setattr("time.time", lambda: 4e9)
    await Permits(None, row, GovernorSettings()).publish()
    monkeypatch.undo()
    await Permits(None, row, GovernorSettings()).publish()
    assert (await row.read()).epoch < time.time() + 60
    assert (await row.read()).allowance_per_s == GovernorSettings().ceiling_per_s


async def test_a_database_that_cannot_say_every_name_is_refused(pool: Pool, database_url: str) -> None:
    """Only UTF8 holds every holder and resource id."""
    await pool.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    conn = await asyncpg.connect(database_url.rpartition("/")[0] + "/latin")
    try:
        with pytest.raises(errors.SetupError, match="UTF8"):
            await schema.apply(conn)
    finally:
        await conn.close()
        await pool.execute("DROP DATABASE latin")


async def test_units_whose_expiry_is_retried_are_not_called_sold_out(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], database_url: str, redis_url: str
) -> None:
    """Busy while the expiry of an overdue hold is tried again; sold once that has succeeded."""
    await expiry.declare(conn, "r0", tenant_id=TENANT, capacity=1)
    await overdue(pool, 1)
    await conn.execute(REFUSE_EXPIRY)
    sweep = sweep_of(pool, settings_for(database_url, redis_url, sweep_grace_s=0))
    await sweep.permits.publish()
    assert (await sweep.one_pass())["failed"] == 1
    with pytest.raises(errors.BusyError):
        await holds.place(conn, tenant_id=TENANT, items=[Item("r0")], ttl_s=60)
    await conn.execute("DROP TRIGGER refuse ON holds; UPDATE holds SET next_attempt_at = clock_timestamp()")
    assert (await sweep.one_pass())["expired"] == 1
    assert await holds.place(conn, tenant_id=TENANT, items=[Item("r0")], ttl_s=60)
