"""The doctor passes a healthy history and names each kind of damage."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import TypeAlias

import asyncpg
import pytest
from redis.asyncio import Redis
from rich.console import Console

from expiry import doctor, holds, schema
from expiry.expire import Wake, expire
from expiry.holds import Hold
from expiry.promises import CHECKS
from expiry.settings import Settings
from expiry.wanted import Item
from governor import GovernorSettings

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

TENANT = "shop"
SETTINGS = Settings()


async def place(conn: Connection, *items: Item, ttl_s: int = 900) -> Hold:
    """Place a hold of the one tenant."""
    return await holds.place(conn, tenant_id=TENANT, items=items, ttl_s=ttl_s)


async def age(conn: Connection, *aged: Hold) -> None:
    """Let these holds have been placed an hour earlier, deadline and events included."""
    ids, hour = [h.id for h in aged], timedelta(hours=1)
    await conn.execute(
        "UPDATE holds SET placed_at = placed_at - $2::interval, expires_at = expires_at - $2::interval "
        "WHERE id = ANY ($1)",
        ids,
        hour,
    )
    await conn.execute(
        "UPDATE outbox SET occurred_at = occurred_at - $2::interval WHERE hold_id = ANY ($1)", ids, hour
    )


@pytest.fixture
async def history(conn: Connection) -> dict[str, Hold]:
    """Live through every verb: declared, undeclared and several resources, with a failing row."""
    for resource_id, capacity in (("room", 10), ("seat", 100)):
        await conn.execute("SELECT expiry_declare($1, $2, $3)", TENANT, resource_id, capacity)
    room, seat, free = Item("room"), Item("seat", 2), Item("undeclared", 7)
    made = {
        "held": await place(conn, room),
        "renewed": await place(conn, room, seat, free),
        "confirmed": await place(conn, seat, free),
        "released": await place(conn, free, room),
        "returned": await place(conn, seat),
        "expired": await place(conn, room, seat),
        "failing": await place(conn, room),
    }
    for _ in range(2):
        await holds.renew(conn, made["renewed"].id, tenant_id=TENANT, ttl_s=900)
    for name in ("confirmed", "returned"):
        await holds.confirm(conn, made[name].id, tenant_id=TENANT)
    await holds.release(conn, made["released"].id, tenant_id=TENANT)
    await holds.return_(conn, made["returned"].id, tenant_id=TENANT)
    await age(conn, made["expired"], made["failing"])
    [outcome] = await expire(conn, [Wake(made["expired"].id, 1)], by="worker")
    assert outcome.kind == "expired"
    await conn.execute(
        "UPDATE holds SET attempts = 5, next_attempt_at = 'infinity' WHERE id = $1", made["failing"].id
    )
    await conn.execute(
        "INSERT INTO dead_letters (tenant_id, kind, hold_id, generation, reason, attempts, first_error, "
        "last_error, first_failed_at, last_failed_at, state) "
        "VALUES ($1, 'expire', $2, 1, '22003', 5, 'first', 'last', now(), now(), 'open')",
        TENANT,
        made["failing"].id,
    )
    return made


async def failed(conn: Connection) -> dict[str, doctor.Finding]:
    """Answer the checks that fail, by name."""
    findings = await doctor.examine(conn, since=None, settings=SETTINGS)
    assert doctor.healthy(findings) == all(f.ok for f in findings)
    return {f.check.name: f for f in findings if not f.ok}


@pytest.mark.usefixtures("history")
async def test_a_healthy_history_passes(conn: Connection) -> None:
    """Every verb leaves rows that every check looks at and accepts."""
    findings = await doctor.examine(conn, since=None, settings=SETTINGS)
    assert {f.check.name: f.examples for f in findings if not f.ok} == {}
    looked_at = {f.check.name: f.note for f in findings if f.check.promise}
    assert looked_at == {
        "not_early": "7 holds",
        "one_end": "7 holds",
        "whole_history": "7 holds",
        "keys": "14 events",
        "current": "1 expiries",
        "not_forgotten": "0 overdue holds",
        "backed_off": "1 failing holds",
        "in_time": "2 purchases",
        "counters": "2 resources",
        "not_oversold": "2 resources",
        "dead_letters": "1 dead letters",
    }


async def test_an_empty_store_passes(conn: Connection) -> None:
    """Nothing was promised yet."""
    assert await failed(conn) == {}


# Constraints that forbid the damage go first: the doctor is for what went past them.
OFF = (
    "ALTER TABLE holds DROP CONSTRAINT holds_not_early",
    "ALTER TABLE resources DROP CONSTRAINT resources_held_check",
    "DROP INDEX outbox_once",
)
COPY = (
    "INSERT INTO outbox (epoch, key, tenant_id, type, hold_id, generation, occurred_at, data) "
    "SELECT epoch, {}, tenant_id, {}, hold_id, {}, occurred_at, data FROM outbox WHERE hold_id = $1 AND type = {}"
)
DAMAGE = [
    ("not_early", "expired", "UPDATE holds SET ended_at = expires_at - interval '5 ms' WHERE id = $1"),
    (
        "not_early",
        "expired",
        """UPDATE outbox SET data = data || '{"expires_at": "2999-01-01T00:00:00Z"}'
            WHERE hold_id = $1 AND type = 'hold.expired'""",
    ),
    ("one_end", "expired", "DELETE FROM outbox WHERE hold_id = $1 AND type = 'hold.expired'"),
    (
        "one_end",
        "expired",
        COPY.format("'release:' || hold_id || ':1'", "'hold.released'", "1", "'hold.expired'"),
    ),
    ("one_end", "expired", COPY.format("key", "type", "generation", "'hold.expired'")),
    (
        "one_end",
        "held",
        COPY.format("'release:' || hold_id || ':1'", "'hold.released'", "1", "'hold.placed'"),
    ),
    ("one_end", "released", "UPDATE holds SET state = 'expired', ended_at = expires_at WHERE id = $1"),
    ("one_end", "returned", "DELETE FROM outbox WHERE hold_id = $1 AND type = 'hold.returned'"),
    ("whole_history", "held", "DELETE FROM outbox WHERE hold_id = $1"),
    ("whole_history", "renewed", "DELETE FROM outbox WHERE hold_id = $1 AND generation = 2"),
    ("whole_history", "renewed", "UPDATE holds SET generation = 2 WHERE id = $1"),
    ("keys", "held", "UPDATE outbox SET key = 'place:' || hold_id || ':2' WHERE hold_id = $1"),
    ("keys", "expired", "UPDATE outbox SET key = 'place:' || hold_id || ':1' WHERE hold_id = $1"),
    ("current", "expired", "UPDATE holds SET generation = 2 WHERE id = $1"),
    ("not_forgotten", "held", "UPDATE holds SET expires_at = now() - interval '1 minute' WHERE id = $1"),
    ("backed_off", "failing", "DELETE FROM dead_letters WHERE hold_id = $1"),
    (
        "backed_off",
        "held",
        "UPDATE holds SET expires_at = now() - interval '1 s', attempts = 1 WHERE id = $1",
    ),
    ("in_time", "confirmed", "UPDATE holds SET expires_at = ended_at - interval '1 ms' WHERE id = $1"),
    ("in_time", "returned", "UPDATE holds SET expires_at = ended_at - interval '1 ms' WHERE id = $1"),
    (
        "counters",
        "held",
        "UPDATE resources SET held = held + 1 FROM holds h WHERE h.id = $1 AND resource_id = 'room'",
    ),
    ("counters", "renewed", "UPDATE holds SET quantities = '{1,3,7}' WHERE id = $1"),
    ("counters", "renewed", "UPDATE holds SET counted = '{t,f,f}' WHERE id = $1"),
    ("counters", "confirmed", "DELETE FROM holds WHERE id = $1"),
    (
        "not_oversold",
        "held",
        "UPDATE resources SET capacity = 1 FROM holds h WHERE h.id = $1 AND resource_id = 'room'",
    ),
    ("dead_letters", "failing", "UPDATE dead_letters SET attempts = 0 WHERE hold_id = $1"),
    ("dead_letters", "failing", "UPDATE dead_letters SET first_error = '' WHERE hold_id = $1"),
    ("dead_letters", "expired", "UPDATE dead_letters SET hold_id = $1"),
]


@pytest.mark.parametrize(("check", "victim", "damage"), DAMAGE)
async def test_each_damage_is_found(
    conn: Connection, history: dict[str, Hold], check: str, victim: str, damage: str
) -> None:
    """The check of the promise fails and its example names the hold, its key or its resource."""
    hold = history[victim]
    for statement in OFF:
        await conn.execute(statement)
    await conn.execute(damage, hold.id)
    finding = (await failed(conn))[check]
    assert finding.count >= 1
    named = [str(hold.id), *(i.resource_id for i in hold.items), "dead letter"]
    assert all(any(name in example for name in named) for example in finding.examples)


async def test_every_check_has_a_damage() -> None:
    """No check is there that nothing can fail."""
    assert {check for check, _, _ in DAMAGE} == {c.name for c in CHECKS}


async def test_what_a_person_decided_is_no_damage(conn: Connection, history: dict[str, Hold]) -> None:
    """A lowered capacity and a discarded dead letter are on record, so they pass."""
    await conn.execute("SELECT expiry_declare($1, 'room', 1)", TENANT)
    await conn.execute(
        "UPDATE dead_letters SET state = 'discarded', resolved_at = now() WHERE hold_id = $1",
        history["failing"].id,
    )
    assert await failed(conn) == {}


async def test_pruned_confirmed_holds_are_in_the_base(conn: Connection, history: dict[str, Hold]) -> None:
    """A confirmed hold may go when its units were folded into the base."""
    await conn.execute("DELETE FROM outbox WHERE hold_id = $1", history["confirmed"].id)
    await conn.execute("DELETE FROM holds WHERE id = $1", history["confirmed"].id)
    await conn.execute("UPDATE resources SET confirmed_base = 2 WHERE resource_id = 'seat'")
    assert await failed(conn) == {}


async def test_no_more_than_so_many_rows_are_looked_at(conn: Connection, history: dict[str, Hold]) -> None:
    """Behind the bound lies what was not looked at; the note says that it was the newest."""
    await conn.execute("DELETE FROM outbox WHERE hold_id = $1", history["held"].id)
    found = await doctor.examine(conn, since=None, settings=SETTINGS, rows_max=1)
    notes = {f.check.name: f.note for f in found}
    assert notes["whole_history"] == "newest 2 holds"
    assert notes["counters"] == "sample of 1 resources"
    assert doctor.healthy(found)


async def test_only_what_changed_since_is_looked_at(conn: Connection, history: dict[str, Hold]) -> None:
    """Damage before `since` is not looked for; nothing is before the hour of the history."""
    await conn.execute("DELETE FROM outbox WHERE hold_id = $1", history["held"].id)
    now = await conn.fetchval("SELECT clock_timestamp() + interval '1 minute'")
    later = await doctor.examine(conn, since=now, settings=SETTINGS)
    assert {f.check.name for f in later if not f.ok} == set()
    before = await doctor.examine(conn, since=now - timedelta(hours=2), settings=SETTINGS)
    assert {f.check.name for f in before if not f.ok} == {"whole_history"}


async def test_a_check_that_takes_too_long_has_failed(database_url: str, conn: Connection) -> None:
    """Nobody can vouch for what was not looked at; the other checks still run."""
    other = await asyncpg.connect(database_url)
    async with other.transaction():
        await other.execute("LOCK TABLE dead_letters")
        findings = await doctor.examine(conn, since=None, settings=Settings(statement_timeout_s=0.2))
    await other.close()
    unfinished = {f.check.name: f.note for f in findings if not f.ok}
    assert set(unfinished) == {"not_forgotten", "backed_off", "dead_letters"}
    assert "not finished" in unfinished["dead_letters"]


async def test_another_schema_is_told_and_nothing_else_tried(conn: Connection) -> None:
    """A database without our tables is no crash."""
    await conn.execute("DROP TABLE expiry_schema, holds CASCADE")
    [finding] = await doctor.examine(conn, since=None, settings=SETTINGS)
    assert not finding.ok
    assert finding.note == f"version None, needed {schema.VERSION}"


async def test_redis_is_told_not_judged(conn: Connection, history: dict[str, Hold], redis: Redis) -> None:
    """Wake-ups are counted against the holds that are due soon; without Redis that is said."""
    held = history["held"]
    await redis.zadd(SETTINGS.queue, {f"expire:{held.id}:1": held.expires_at.timestamp() * 1000})
    await redis.zadd(f"{SETTINGS.queue}:unknown", {"foreign": 1})
    findings = await doctor.examine(conn, since=None, settings=SETTINGS, redis=redis)
    assert findings[-1].note == "1 for 2 holds due within 900 s, 1 moved aside"
    async with Redis(host="127.0.0.1", port=1) as away:
        findings = await doctor.examine(conn, since=None, settings=SETTINGS, redis=away)
    assert doctor.healthy(findings)
    assert "does not answer" in findings[-1].note


async def test_the_table_says_it_in_plain_words(conn: Connection, history: dict[str, Hold]) -> None:
    """A failed check is marked and its examples follow, within 80 columns."""
    await conn.execute("DELETE FROM outbox WHERE hold_id = $1", history["held"].id)
    findings = await doctor.examine(conn, since=None, settings=SETTINGS)
    text = StringIO()
    Console(file=text, width=80).print(doctor.render(findings))
    assert "✗   P3   each placing and renewal wrote one event" in text.getvalue()
    assert "1 wrong of 7 holds" in text.getvalue()
    assert f"✗ P3  {history['held'].id} has generation 1 but 0 placed" in text.getvalue()
    assert max(len(line) for line in text.getvalue().splitlines()) <= 80


async def test_the_doctor_explains_the_rate(conn: asyncpg.Connection[asyncpg.Record]) -> None:
    """In one sentence, with the grant that is missing where the role may not measure."""
    await conn.execute(
        "DO $$ BEGIN CREATE ROLE blind; EXCEPTION WHEN duplicate_object THEN NULL; END $$;"
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO blind"
    )

    async def note() -> str:
        settings = Settings(mode="sweep")
        found = await doctor.examine(conn, since=None, settings=settings, governor=GovernorSettings())
        [finding] = [f for f in found if f.check is doctor.GOVERNOR]
        return finding.note

    assert await note() == (
        "5/s, the floor: nobody has led yet; start a worker, or see why none gets the lease."
    )
    await conn.execute("SET ROLE blind")
    assert (await note()).endswith("limit the rate: GRANT pg_read_all_stats TO blind.")
    await conn.execute("RESET ROLE")
