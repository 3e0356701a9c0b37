"""The verbs in a caller's own transaction, on a caller's own connection: they leave nothing behind."""

from __future__ import annotations

import json

import pytest

from expiry import errors, holds, schema
from expiry.holds import Conn, Hold
from expiry.wanted import Item
from tests import scene
from tests.scene import TENANT

SETTINGS = ("lock_timeout", "statement_timeout", "enable_hashjoin", "enable_mergejoin", "search_path")


async def settings_of(conn: Conn) -> dict[str, str]:
    """Answer what a careless verb might leave behind on the connection."""
    return {name: await conn.fetchval("SELECT current_setting($1)", name) for name in SETTINGS}


async def every_verb(conn: Conn) -> list[Hold]:
    """Run each verb once, reclaim and expiry included."""
    await scene.declare(conn, "room", 4)
    late = [await scene.overdue(conn, "room") for _ in range(2)]
    await scene.expire_now(conn, late[0])
    kept = await scene.place(conn, Item("room", 4))
    await holds.renew(conn, kept.id, tenant_id=TENANT, ttl_s=60)
    await holds.confirm(conn, kept.id, tenant_id=TENANT)
    await holds.return_(conn, kept.id, tenant_id=TENANT)
    given_back = await scene.place(conn, "room")
    await holds.release(conn, given_back.id, tenant_id=TENANT)
    return [*late, kept, given_back]


async def test_every_verb_writes_its_one_event(conn: Conn) -> None:
    """P3: each verb writes one event, keyed by verb, hold and generation, whoever calls it."""
    late, reclaimed, kept, given_back = await every_verb(conn)
    assert await scene.events(conn, late) == ["place::1", "expire::1"]
    assert await scene.events(conn, reclaimed) == ["place::1", "expire::1"]
    assert await scene.events(conn, kept) == ["place::1", "renew::2", "confirm::2", "return::2"]
    assert await scene.events(conn, given_back) == ["place::1", "release::1"]
    await scene.audit(conn)


async def test_a_rollback_leaves_nothing(conn: Conn) -> None:
    """After the caller's rollback there is no hold, no event, no counter and no key."""
    await scene.declare(conn, "room", 4)
    before = await scene.everything(conn)
    async with scene.unfinished(conn) as order:
        await every_verb(conn)
        await scene.place(conn, "room", idempotency_key="k")
        assert await scene.everything(conn) != before
        await order.rollback()
    assert await scene.everything(conn) == before


async def test_a_refusal_leaves_the_transaction_usable(conn: Conn) -> None:
    """A caller may catch a refusal and commit what else the transaction did."""
    await scene.declare(conn, "room", 1)
    async with scene.unfinished(conn) as order:
        hold = await scene.place(conn, "room")
        with pytest.raises(errors.InsufficientCapacityError):
            await scene.place(conn, "room")
        with pytest.raises(errors.GenerationMismatchError):
            await holds.confirm(conn, hold.id, tenant_id=TENANT, generation=7)
        await order.commit()
    assert await scene.state(conn, hold) == "held"


@pytest.mark.parametrize("own", ["transaction", "connection"])
async def test_settings_of_the_connection_stay(conn: Conn, own: str) -> None:
    """Timeouts, planner settings and search_path of the caller are after every verb what they were."""
    async with scene.unfinished(conn) as order:
        for name, value in (
            ("lock_timeout", "1234ms"),
            ("statement_timeout", "56s"),
            ("enable_hashjoin", "on"),
        ):
            await conn.execute(f"SET {'LOCAL' if own == 'transaction' else ''} {name} = '{value}'")
        before = await settings_of(conn)
        assert before["lock_timeout"] == "1234ms"
        await every_verb(conn)
        with pytest.raises(errors.InsufficientCapacityError):
            await scene.place(conn, Item("room", 5))
        assert await settings_of(conn) == before
        await order.commit()
    assert (await settings_of(conn) == before) == (own == "connection")


async def test_a_hold_starts_with_its_statement(conn: Conn) -> None:
    """In a long transaction a hold lasts from when it was asked for, not from BEGIN."""
    async with scene.unfinished(conn):
        began_at = await conn.fetchval("SELECT now()")
        hold = await scene.place(conn, "room", ttl_s=60)
        later = await conn.fetchval("SELECT statement_timestamp()")
        assert began_at < hold.placed_at < later
        assert hold == await holds.get(conn, hold.id, tenant_id=TENANT)


async def test_codecs_of_the_connection_do_not_matter(conn: Conn) -> None:
    """With a jsonb codec on the connection every verb works and metadata comes back as it went."""
    for name in ("json", "jsonb"):
        await conn.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    await every_verb(conn)
    hold = await scene.place(conn, "room", metadata={"a": [1]}, idempotency_key="k")
    assert await scene.place(conn, "room", metadata={"a": [1]}, idempotency_key="k") == hold
    renewed = await holds.renew(conn, hold.id, tenant_id=TENANT, ttl_s=60)
    assert renewed.metadata == {"a": [1]}


async def test_the_schema_lives_where_search_path_begins(conn: Conn) -> None:
    """The whole store may live in a schema of its own, beside the caller's tables of the same names."""
    await conn.execute("CREATE SCHEMA booking; CREATE SCHEMA app; SET search_path = booking")
    await schema.apply(conn)
    await conn.execute("SET search_path = app, booking, public")
    await every_verb(conn)
    assert await conn.fetchval("SELECT count(*) FROM booking.holds") == 4
    assert await conn.fetchval("SELECT count(*) FROM public.holds") == 0
