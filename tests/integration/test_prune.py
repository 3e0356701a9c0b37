"""Pruning: what has outlived its retention leaves, in bounded batches, and the promises stay provable."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TypeAlias
from uuid import UUID

import asyncpg
import pytest

from expiry import doctor, holds, prune
from expiry.expire import Wake, expire
from expiry.holds import Hold
from expiry.permits import Permits
from expiry.prune import Prune
from expiry.settings import Settings
from expiry.wanted import Item
from governor import GovernorSettings, LocalBucket
from tests.fleet import PLENTY, TENANT, Counted, Pool, permits_of, placed

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

SETTINGS = Settings(retention_s=86_400)
OLD = timedelta(days=3)


def pruning(pool: Pool, permits: Permits | None = None, *, paused: bool = False) -> Prune:
    """Return pruning with plenty of permits, or those given."""
    return Prune(pool, permits or permits_of(pool, None), SETTINGS, asyncio.Event(), lambda: paused)


async def plenty(pool: Pool) -> None:
    """Fill the bucket."""
    permits = permits_of(pool, None)
    await permits.publish()
    await permits.refund(int(PLENTY.ceiling_per_s))


def earlier(hold_id: UUID) -> UUID:
    """Return the id that the hold would have, had it been placed so much earlier."""
    return UUID(int=hold_id.int - (int(OLD.total_seconds() * 1000) << 80))


AGE = """
UPDATE holds h SET id = w.old_id, placed_at = placed_at - $3::interval,
       ended_at = ended_at - $3::interval, returned_at = returned_at - $3::interval,
       expires_at = expires_at - CASE WHEN state = 'held' THEN interval '0' ELSE $3::interval END
  FROM unnest($1::uuid[], $2::uuid[]) AS w (id, old_id) WHERE h.id = w.id
"""
AGE_OUTBOX = """
UPDATE outbox o SET hold_id = w.old_id, occurred_at = occurred_at - $3::interval,
       key = replace(key, w.id::text, w.old_id::text)
  FROM unnest($1::uuid[], $2::uuid[]) AS w (id, old_id) WHERE o.hold_id = w.id
"""


async def age(conn: Connection, *aged: Hold) -> None:
    """Let these holds and their events be three days older; what is held stays held."""
    ids = [h.id for h in aged]
    for statement in (AGE, AGE_OUTBOX):
        await conn.execute(statement, ids, [earlier(i) for i in ids], OLD)


async def ids(conn: Connection) -> set[UUID]:
    """Return the holds that are there."""
    return {row["id"] for row in await conn.fetch("SELECT id FROM holds")}


async def place(conn: Connection, *items: Item) -> Hold:
    """Place a hold of the one tenant."""
    return await holds.place(conn, tenant_id=TENANT, items=items, ttl_s=900)


@pytest.fixture
async def history(conn: Connection, pool: Pool) -> dict[str, Hold]:
    """Live through every end, three days ago and just now, on a resource that is counted."""
    await plenty(pool)
    await conn.execute("SELECT expiry_declare($1, 'room', 100)", TENANT)
    names = ("held", "expired", "released", "confirmed", "returned", "returned lately")
    made = {f"{when} {name}": await place(conn, Item("room", 2)) for when in ("old", "new") for name in names}
    for name, hold in made.items():
        if "released" in name:
            await holds.release(conn, hold.id, tenant_id=TENANT)
        if "confirmed" in name or "returned" in name:
            await holds.confirm(conn, hold.id, tenant_id=TENANT)
        if "returned" in name and "lately" not in name:
            await holds.return_(conn, hold.id, tenant_id=TENANT)
        if "expired" in name:
            late = (
                "UPDATE holds SET placed_at = placed_at - $2::interval, expires_at = placed_at WHERE id = $1"
            )
            await conn.execute(late, hold.id, timedelta(hours=1))
            assert [o.kind for o in await expire(conn, [Wake(hold.id, 1)], by="worker")] == ["expired"]
    await age(conn, *(hold for name, hold in made.items() if name.startswith("old")))
    for name in ("old returned lately", "new returned lately"):
        id_ = earlier(made[name].id) if name.startswith("old") else made[name].id
        await holds.return_(conn, id_, tenant_id=TENANT)
    return made


async def test_ended_holds_leave_after_their_retention(
    conn: Connection, pool: Pool, history: dict[str, Hold]
) -> None:
    """What is held, ended lately or was given back lately stays; the promises still hold for what is left."""
    counted = Counted()
    await pruning(pool).one_pass()
    kept = {hold.id for name, hold in history.items() if name.startswith("new")}
    kept |= {earlier(history[name].id) for name in ("old held", "old returned lately")}
    assert await ids(conn) == kept
    assert counted("expiry_pruned_rows_total", table="holds") == 4
    findings = await doctor.examine(conn, since=None, settings=SETTINGS)
    assert [f.examples for f in findings if not f.ok] == []


@pytest.mark.usefixtures("history")
async def test_units_that_were_confirmed_stay_sold(conn: Connection, pool: Pool) -> None:
    """They are folded into the base: the counters say what they said before."""
    read = "SELECT held, confirmed, confirmed_base FROM resources"
    before = await conn.fetchrow(read)
    assert before is not None
    assert tuple(before) == (4, 4, 0)  # two holds each, of two units
    await pruning(pool).one_pass()
    after = await conn.fetchrow(read)
    assert after is not None
    assert tuple(after) == (4, 4, 2)


@pytest.mark.usefixtures("history")
async def test_a_second_pass_finds_nothing(pool: Pool) -> None:
    """What may go has gone at the first one."""
    assert await pruning(pool).one_pass() > 0
    assert await pruning(pool).one_pass() == 0


# --- the other tables

LETTER = """
INSERT INTO dead_letters (tenant_id, kind, hold_id, generation, reason, attempts, first_error, last_error,
                          first_failed_at, last_failed_at, state, resolved_at)
SELECT 'shop', $1, gen_random_uuid(), 1, '22003', 5, 'first', 'last', now() - $2::interval, now() - $2::interval,
       $1, CASE WHEN $1 <> 'open' THEN now() - $2::interval END
"""
ANSWER = """
INSERT INTO idempotency_keys (tenant_id, route, key, body_hash, response, created_at)
VALUES ('shop', 'place', $1, '', '{}', now() - $2::interval)
"""


async def test_events_leave_by_age(conn: Connection, pool: Pool) -> None:
    """Those of a hold that is still held too; the recent ones stay."""
    await plenty(pool)
    old, new = await placed(pool, 2, ttl_s=900)
    await age(conn, old)
    assert await pruning(pool).one_pass() == 1
    assert [row["hold_id"] for row in await conn.fetch("SELECT hold_id FROM outbox")] == [new.id]
    assert len(await ids(conn)) == 2


async def test_resolved_dead_letters_leave_and_open_ones_stay(conn: Connection, pool: Pool) -> None:
    """However old: it waits for a person."""
    await plenty(pool)
    for state, days in (("open", 300), ("discarded", 3), ("replayed", 3), ("discarded", 0)):
        await conn.execute(LETTER, state, timedelta(days=days))
    assert await pruning(pool).one_pass() == 2
    left = await conn.fetch("SELECT state FROM dead_letters ORDER BY id")
    assert [row["state"] for row in left] == ["open", "discarded"]


async def test_idempotency_keys_leave_after_two_days(conn: Connection, pool: Pool) -> None:
    """The contract promises one, whatever the retention of holds."""
    await plenty(pool)
    for hours in (1, 25, 47, 49, 72):
        await conn.execute(ANSWER, str(hours), timedelta(hours=hours))
    assert await pruning(pool).one_pass() == 2
    left = await conn.fetch("SELECT key FROM idempotency_keys ORDER BY created_at DESC")
    assert [row["key"] for row in left] == ["1", "25", "47"]


# --- bounds


async def test_a_pass_is_bounded_and_the_next_goes_on(
    conn: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even past old holds that are still held, however many: they must not hide what is behind them."""
    monkeypatch.setattr(prune, "BATCH_MAX", 2)
    now_us = [0]
    # 13 permits, of which pruning gets 4, once a quarter of a second.
    bucket = LocalBucket(floor_per_s=52, clock_us=lambda: now_us[0])
    held = await placed(pool, 6, ttl_s=900)
    ended = await placed(pool, 5, ttl_s=900)
    for hold in ended:
        await holds.release(conn, hold.id, tenant_id=TENANT)
    await age(conn, *held, *ended)
    passes = pruning(pool, Permits(None, bucket, GovernorSettings(floor_per_s=52)))
    left = []
    for _ in range(4):
        now_us[0] += 250_000
        await passes.one_pass()
        left.append(len(await ids(conn)))
    assert left == [11, 9, 6, 6]


@pytest.mark.usefixtures("history")
async def test_nothing_leaves_without_permits(conn: Connection, pool: Pool) -> None:
    """What expiry needs is not taken from it: an empty bucket ends the pass at once."""
    before = await ids(conn)
    empty = LocalBucket(floor_per_s=0.001)
    assert await pruning(pool, Permits(None, empty, GovernorSettings(floor_per_s=0.001))).one_pass() == 0
    assert await ids(conn) == before


async def test_a_pass_that_finds_nothing_costs_nothing(pool: Pool) -> None:
    """An idle shop's expiry finds the bucket as full as it was."""
    bucket = LocalBucket(floor_per_s=100, clock_us=lambda: 0)
    await bucket.refund(20)
    await placed(pool, 3, ttl_s=900)
    assert await pruning(pool, Permits(None, bucket, GovernorSettings(floor_per_s=100))).one_pass() == 0
    assert (await bucket.read()).permits == 20


@pytest.mark.usefixtures("history")
async def test_nothing_leaves_while_paused_or_stopping(conn: Connection, pool: Pool) -> None:
    """A pass that runs ends with its batch."""
    before = await ids(conn)
    assert await pruning(pool, paused=True).one_pass() == 0
    stopping = pruning(pool)
    stopping.stop.set()
    assert await stopping.one_pass() == 0
    assert await ids(conn) == before
