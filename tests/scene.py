"""A scene to test on: declare, place, let time pass, make connections wait, audit the books."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeAlias, TypeVar

import asyncpg
from asyncpg.transaction import Transaction

from expiry import errors, holds, resources
from expiry.expire import Outcome, Wake
from expiry.holds import Conn, Hold
from expiry.wanted import Item
from tests.helpers import eventually

Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"
Isolation: TypeAlias = Literal["read_committed", "repeatable_read", "serializable"]
T = TypeVar("T")

TENANT = "shop"

transition = importlib.import_module("expiry.expire")  # the package's own `expire` is the function


async def declare(conn: Conn, resource_id: str, capacity: int | None) -> None:
    """Declare the resource, or change its capacity."""
    await resources.declare(conn, resource_id, tenant_id=TENANT, capacity=capacity)


def items(*wanted: str | Item) -> list[Item]:
    """Read "room" as one unit of it."""
    return [w if isinstance(w, Item) else Item(w) for w in wanted]


async def place(conn: Conn, *wanted: str | Item, **overrides: Any) -> Hold:  # noqa: ANN401 - as holds.place
    """Place a hold for a minute, unless told otherwise."""
    given = {"tenant_id": TENANT, "items": items(*wanted)} | overrides
    if "expires_at" not in given:
        given.setdefault("ttl_s", 60)
    return await holds.place(conn, **given)


async def pass_time(conn: Conn | Pool, seconds: float, *which: Hold) -> None:
    """Let time pass for these holds: the database's clock stays, they move into the past."""
    await conn.execute(
        "UPDATE holds SET placed_at = placed_at - $1 * interval '1 s', expires_at = expires_at - $1 * interval '1 s',"
        " lifetime_ends_at = lifetime_ends_at - $1 * interval '1 s' WHERE id = ANY ($2)",
        float(seconds),
        [h.id for h in which],
    )


async def overdue(conn: Conn, *wanted: str | Item, **overrides: Any) -> Hold:  # noqa: ANN401 - as place
    """Place a hold whose deadline was a second ago."""
    hold = await place(conn, *wanted, **overrides)
    await pass_time(conn, (hold.expires_at - hold.placed_at).total_seconds() + 1, hold)
    return hold


def wake(hold: Hold, generation: int | None = None) -> Wake:
    """Answer the wake-up of this hold, of an older generation if asked."""
    return Wake(hold.id, hold.generation if generation is None else generation)


async def expire_now(conn: Conn, *which: Hold | Wake) -> list[str]:
    """Run the transition over these; answer the kinds of outcome."""
    return [o.kind for o in await outcomes(conn, *which)]


async def outcomes(conn: Conn, *which: Hold | Wake) -> list[Outcome]:
    """Run the transition over these; answer the outcomes."""
    wakes = [wake(w) if isinstance(w, Hold) else w for w in which]
    found: list[Outcome] = await transition.expire(conn, wakes, by="worker")
    return found


async def state(conn: Conn | Pool, hold: Hold) -> str:
    """Answer the state that the row has, whatever the clock says."""
    found: str = await conn.fetchval("SELECT state FROM holds WHERE id = $1", hold.id)
    return found


async def units(conn: Conn | Pool, resource_id: str) -> tuple[int, int]:
    """Answer the counters: units held, units confirmed."""
    row = await conn.fetchrow(
        "SELECT held, confirmed FROM resources WHERE tenant_id = $1 AND resource_id = $2", TENANT, resource_id
    )
    assert row is not None
    return row["held"], row["confirmed"]


async def events(conn: Conn | Pool, hold: Hold) -> list[str]:
    """Answer the keys of the hold's events, in the order they were written."""
    rows = await conn.fetch("SELECT key FROM outbox WHERE hold_id = $1 ORDER BY id", hold.id)
    return [str(r["key"]).replace(str(hold.id), "") for r in rows]


async def everything(conn: Conn | Pool) -> list[asyncpg.Record]:
    """Answer all rows that a verb may touch, to compare before and after."""
    return await conn.fetch("""
        SELECT 'hold' AS kind, h.id::text AS key, to_jsonb(h)::text AS row FROM holds h
        UNION ALL SELECT 'event', o.key, o.data::text FROM outbox o
        UNION ALL SELECT 'resource', r.resource_id, to_jsonb(r)::text FROM resources r
        UNION ALL SELECT 'key', k.key, k.response::text FROM idempotency_keys k
        ORDER BY 1, 2""")


async def on(pool: Pool, verb: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:  # noqa: ANN401
    """Run the verb on a connection of its own."""
    async with pool.acquire() as conn:
        return await verb(conn, *args, **kwargs)


async def outcome(verb: Awaitable[object]) -> str:
    """Say what came of it in one word: "done" or the error's code; a deadlock is one of its own."""
    try:
        await verb
    except errors.ExpiryError as error:
        return "deadlock" if isinstance(error.__cause__, asyncpg.DeadlockDetectedError) else error.code
    return "done"


@asynccontextmanager
async def unfinished(conn: Conn, *, isolation: Isolation | None = None) -> AsyncIterator[Transaction]:
    """Open a transaction for the test to commit; what it leaves open is rolled back."""
    transaction = conn.transaction(isolation=isolation)
    await transaction.start()
    try:
        yield transaction
    finally:
        if conn.is_in_transaction():
            await transaction.rollback()


@asynccontextmanager
async def blocked(
    observer: Conn | Pool, conn: Conn, verb: Coroutine[Any, Any, T]
) -> AsyncIterator[asyncio.Task[T]]:
    """Run the verb on conn and go on once it waits for a lock; fail if it ends without having waited."""
    task = asyncio.create_task(verb)

    async def waits() -> bool:
        assert not task.done(), f"did not wait: {task}"
        pid = conn.get_server_pid()
        return bool(await observer.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", pid))

    try:
        await eventually(waits)
        yield task
    finally:
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def together(*verbs: Awaitable[T]) -> list[T]:
    """Run these at once, and all to their end; then raise the first error there was."""
    results = await asyncio.gather(*verbs, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


# Stands for whatever goes wrong in a statement of ours: a trigger of the shop's, a full disk.
BREAK = """
CREATE OR REPLACE FUNCTION break() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_TABLE_NAME = 'outbox' OR to_jsonb(NEW) @> '{"state": "expired", "holder": "bad"}' THEN
        RAISE 'broken' USING ERRCODE = TG_ARGV[0];
    END IF;
    RETURN NEW;
END $$;
"""


async def break_bad_holds(conn: Conn, sqlstate: str) -> None:
    """Let every expiry of a hold whose holder is "bad" fail with this SQLSTATE."""
    await conn.execute(BREAK)
    trigger = "CREATE TRIGGER break BEFORE UPDATE ON holds FOR EACH ROW EXECUTE FUNCTION break"
    await conn.execute(f"{trigger}('{sqlstate}')")


async def break_events(conn: Conn) -> None:
    """Let every event fail to be written."""
    await conn.execute(BREAK)
    trigger = "CREATE TRIGGER break BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION break"
    await conn.execute(f"{trigger}('P0001')")


async def mend(conn: Conn) -> None:
    """Take back what break_bad_holds or break_events did."""
    await conn.execute("DROP FUNCTION break CASCADE")


# Counters against rows, for every resource; a held hold must be counted once its resource is declared.
BOOKS = """
SELECT r.tenant_id, r.resource_id, r.capacity, r.held, r.confirmed - r.confirmed_base AS confirmed, r.lowered_at,
       coalesce(sum(i.quantity) FILTER (WHERE h.state = 'held'), 0) AS held_units,
       coalesce(sum(i.quantity) FILTER (WHERE h.state = 'confirmed' AND i.counted), 0) AS confirmed_units
  FROM resources r
  LEFT JOIN (holds h CROSS JOIN LATERAL unnest(h.resource_ids, h.quantities, h.counted)
                 AS i (resource_id, quantity, counted))
    ON h.tenant_id = r.tenant_id AND i.resource_id = r.resource_id
 WHERE $1::text IS NULL OR r.tenant_id = $1
 GROUP BY r.tenant_id, r.resource_id
"""
# Each hold's events against its state: placed once, renewed once a generation, ended at most once.
HISTORIES = """
SELECT h.id, h.state, h.generation, array_agg(o.type ORDER BY o.id) AS types, array_agg(o.key ORDER BY o.id) AS keys
  FROM holds h LEFT JOIN outbox o ON o.hold_id = h.id
 WHERE $1::text IS NULL OR h.tenant_id = $1 GROUP BY h.id
"""


async def audit(conn: Conn | Pool, *, tenant_id: str | None = None) -> None:
    """Fail unless counters equal the sum over rows, nothing is oversold and every history is whole."""
    for book in await conn.fetch(BOOKS, tenant_id):
        assert (book["held"], book["confirmed"]) == (book["held_units"], book["confirmed_units"]), dict(book)
        sold = book["held"] + book["confirmed"]
        assert book["capacity"] is None or sold <= book["capacity"] or book["lowered_at"], dict(book)
    for history in await conn.fetch(HISTORIES, tenant_id):
        ends = {"held": [], "returned": ["hold.confirmed", "hold.returned"]}
        expected = ["hold.placed"] + ["hold.renewed"] * (history["generation"] - 1)
        expected += ends.get(history["state"], [f"hold.{history['state']}"])
        assert history["types"] == expected, dict(history)
        assert len(set(history["keys"])) == len(expected), dict(history)
