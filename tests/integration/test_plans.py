"""Statements on the path of a hold use the index they name, whatever the planner knows of the table."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from expiry import errors, history, holds, listing, outbox, overview, promoter, prune, resources, sweep
from expiry.group import ask, place_group
from expiry.holds import Conn, Hold
from expiry.wanted import Item, Wanted
from tests import scene
from tests.scene import TENANT

# A statement's text and what its plan reads: (node, relation or index).
Plans: TypeAlias = list[tuple[str, set[tuple[str, str]]]]

ROWS = 120_000
RESOURCES = 3_000
BIG = {"holds", "resources", "outbox"}
WALKED = {"holds_due", "holds_backed_off", "dead_letters_unresolved"}  # in order, from the beginning

# The planner is to know what the test lets it know.
QUIET = """
ALTER TABLE holds SET (autovacuum_enabled = off);
ALTER TABLE resources SET (autovacuum_enabled = off);
ALTER TABLE outbox SET (autovacuum_enabled = off);
"""
# What a busy shop holds: one row in six ended, one in twelve overdue, one in four of several resources; one
# row in 300 backs off.
GROW = f"""
INSERT INTO resources (tenant_id, resource_id, capacity)
SELECT '{TENANT}', 'r' || i, 1000000 FROM generate_series(1, {RESOURCES}) i
    ON CONFLICT DO NOTHING;
INSERT INTO holds (id, tenant_id, state, resource_ids, quantities, counted, placed_at, expires_at, ended_at,
                   ended_by, holder, external_ref, attempts, next_attempt_at)
SELECT gen_random_uuid(), '{TENANT}', CASE WHEN i % 6 = 0 THEN 'released' ELSE 'held' END,
       ARRAY['r' || i % {RESOURCES} + 1] || CASE WHEN i % 4 = 0 THEN ARRAY['x' || i % 1000] ELSE '{{}}' END,
       CASE WHEN i % 4 = 0 THEN '{{1,1}}' ELSE '{{1}}' END::int[],
       CASE WHEN i % 4 = 0 THEN '{{t,f}}' ELSE '{{t}}' END::boolean[],
       now() - interval '1 h', now() + (i - {ROWS // 12}) * interval '50 ms',
       CASE WHEN i % 6 = 0 THEN now() END, CASE WHEN i % 6 = 0 THEN 'x' END,
       CASE WHEN i % 3 = 0 THEN 'buyer-' || i % 5000 END, CASE WHEN i % 2 = 0 THEN 'cart-' || i % 9000 END,
       (i % 300 = 1)::int, CASE WHEN i % 300 = 1 AND i % 6 <> 0 THEN now() END
  FROM generate_series(1, {ROWS}) i;
INSERT INTO outbox (epoch, key, tenant_id, type, hold_id, generation, occurred_at, data)
SELECT expiry_epoch(), 'place:' || h.id || ':1', h.tenant_id, 'hold.placed', h.id, 1, h.placed_at, '{{}}' FROM holds h
    ON CONFLICT DO NOTHING;
UPDATE resources r SET held = h.units FROM (
    SELECT resource_ids[1] AS id, count(*) AS units FROM holds WHERE state = 'held' GROUP BY 1) h
 WHERE h.id = r.resource_id AND h.id LIKE 'r%';
"""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NO_ID = UUID(int=0)


def reads(node: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Walk a plan: which indexes are looked up, which relations or indexes are read from end to end."""
    cond = node.get("Index Cond", "")
    if "= ANY ('{}'" in cond:
        return  # nothing is looked up, by whichever index
    if name := node.get("Index Name"):
        # Of a tenant's resources one is looked up: the tenant alone is no condition.
        looked_up = "resource_id" in cond if name == "resources_pkey" else bool(cond) or name in WALKED
        yield ("index" if looked_up else "all of"), name
    elif node["Node Type"] == "Seq Scan":
        yield "seq", node["Relation Name"]
    for child in node.get("Plans", ()):
        yield from reads(child)


@asynccontextmanager
async def explained(conn: asyncpg.Connection[Any], plans: Plans) -> AsyncIterator[None]:
    """Collect the plan of every statement that runs meanwhile, those inside of functions too."""

    def listener(_conn: object, message: Any) -> None:  # noqa: ANN401 - asyncpg's
        if "plan:" in message.message:
            said = json.loads(message.message.split("plan:\n", 1)[1])
            text = " ".join(said["Query Text"].split())
            if not text.startswith("UPDATE holds SET placed_at"):  # a test's way to let time pass
                plans.append((text, set(reads(said["Plan"]))))

    await conn.execute(
        "LOAD 'auto_explain'; SET auto_explain.log_level = notice; SET auto_explain.log_format = json;"
        "SET auto_explain.log_nested_statements = on; SET auto_explain.log_min_duration = 0"
    )
    conn.add_log_listener(listener)
    try:
        yield
        await conn.execute("SET auto_explain.log_min_duration = -1")
    finally:
        conn.remove_log_listener(listener)


async def full(conn: Conn, resource_id: str) -> None:
    """Leave no unit of the resource, but those of its overdue holds."""
    await conn.execute(
        "UPDATE resources SET capacity = held + confirmed WHERE tenant_id = $1 AND resource_id = $2",
        TENANT,
        resource_id,
    )


async def every_statement(conn: Conn, number: int) -> list[Hold]:
    """Take the path of a hold once, over resources of its own each time."""
    first, further = f"r{number}", f"x{number}"
    for name in (first, further):
        await resources.declare(conn, name, tenant_id=TENANT, capacity=1_000_000)
    late = await scene.overdue(conn, first, holder="buyer-7")
    later = await scene.overdue(conn, "y", further)
    placed = [await scene.place(conn, first), await scene.place(conn, further, "y", holder="buyer-7")]
    asks = [
        ask(
            Wanted(items=[Item(name)], ttl_s=60),
            tenant_id=TENANT,
            by="x",
            route="place",
            key=f"{number}-{name}",
        )
        for name in (first, "y", further)
    ]
    found = await place_group(conn, [one for one in asks if one is not None], wait=True)
    assert all(isinstance(hold, Hold) for hold in found)
    for name in (first, further):
        await full(conn, name)
        placed.append(await scene.place(conn, name))  # reclaims
        await full(conn, name)
        with pytest.raises(errors.ExpiryError):
            await scene.place(conn, Item(name, 900_000), holder="buyer-7")
        await resources.get(conn, name, tenant_id=TENANT)
    placed.append(await scene.place(conn, first, replaces=placed[0].id))
    await holds.renew(conn, placed[1].id, tenant_id=TENANT, ttl_s=60)
    await holds.confirm(conn, placed[2].id, tenant_id=TENANT)
    await holds.return_(conn, placed[2].id, tenant_id=TENANT)
    await holds.get(conn, placed[3].id, tenant_id=TENANT)
    now = await conn.fetchval(sweep.CLOCK)
    due = await conn.fetch(sweep.DUE_PAGE, now, EPOCH, NO_ID, 500)
    await conn.fetch(sweep.BACKED_OFF_PAGE, now, EPOCH, NO_ID, 500)
    wakes = [scene.transition.Wake(r["id"], r["generation"]) for r in due]
    await scene.transition.expire(conn, [*wakes, scene.wake(placed[1])], by="x")  # one comes early
    await every_list(conn, first)
    now = await conn.fetchval(promoter.CLOCK)
    slice_ = (now, now + timedelta(seconds=60))
    await conn.fetch(promoter.HELD_BETWEEN, slice_[0], NO_ID, slice_[1], 5000)
    return [late, later]


async def every_list(conn: Conn, resource_id: str) -> None:
    """Ask each list once; tidy up."""
    held = {"resource_id": resource_id, "holder": "buyer-7"}
    for which in (
        {"external_ref": "cart-1"},
        {"state": "held"},
        {"overdue": True},
        {"overdue": True, **held},
    ):
        await listing.read(conn, listing.Filter(**which), tenant_id=TENANT)
    await listing.read(conn, listing.Filter(state="held", resource_id=resource_id), tenant_id=TENANT)
    await resources.list_(conn, tenant_id=TENANT, prefix="r1")
    some = await conn.fetchval("SELECT id FROM holds WHERE external_ref = 'cart-1' LIMIT 1") or NO_ID
    for type_, hold_id in ((None, None), ("hold.expired", None), (None, some)):
        await outbox.read(conn, tenant_id=TENANT, type_=type_, hold_id=hold_id)
    await conn.fetch(history.HISTORY, some, TENANT, 10)
    await conn.fetch(history.FAILURES, some, 10)
    await conn.fetch(overview.OVERVIEW, 1000, 500, 60.0)
    for tenant in await conn.fetch(prune.TENANTS_WITH_OLD_EVENTS, EPOCH, 10):
        raise AssertionError(tenant)
    await conn.fetchval(prune.PRUNE_OUTBOX, EPOCH, 10, TENANT)


# A piece of each statement's text, and the indexes that it uses.
EXPECTED = {
    sweep.DUE_PAGE: {"holds_due"},
    sweep.BACKED_OFF_PAGE: {"holds_backed_off"},
    promoter.HELD_BETWEEN: {"holds_due"},
    resources.RESOURCE: {"resources_pkey", "holds_by_resource", "holds_by_further_resource"},
    holds.GET: {"holds_pkey"},
    listing.BY_REFERENCE: {"holds_by_external_ref"},
    listing.BY_HOLDER: {"holds_by_holder"},
    listing.BY_DEADLINE: {"holds_by_tenant"},
    listing.BY_RESOURCE: {"holds_by_resource", "holds_by_further_resource"},
    resources.RESOURCES: {"resources_by_prefix", "holds_by_resource", "holds_by_further_resource"},
    history.HISTORY: {"outbox_once"},
    history.FAILURES: {"dead_letters_by_hold"},
    # expiry_feed: a tenant's events, a hold's events; expiry_recent
    "o.tenant_id = p_tenant AND (o.epoch": {"outbox_pkey"},
    "o.hold_id = p_hold": {"outbox_once"},
    "o.xid DESC": {"outbox_pkey"},
    "o.occurred_at >= p_since": {"outbox_by_time"},
    prune.TENANTS_WITH_OLD_EVENTS: {"outbox_pkey"},
    "SELECT p.ctid": {"outbox_pkey"},
    # expiry_place: what is short, who has it already, what is reclaimed or replaced, what is taken
    "SELECT x.capacity, x.held, x.confirmed FROM resources x WHERE x.tenant_id": {"resources_pkey"},
    "SELECT coalesce(sum(s.quantity), 0), coalesce(array_agg(s.id)": {
        "holds_by_resource",
        "holds_by_further_resource",
    },
    "EXCEPT SELECT r.resource_id": {"resources_pkey"},
    "'insufficient_capacity'": {"holds_by_holder"},
    "ORDER BY h.id FOR NO KEY UPDATE": {"holds_pkey"},
    "UPDATE resources r SET held = r.held + v_want": {"resources_pkey"},
    # expiry_place_group: which are declared, which keys are known and what there is, what is taken
    "row_number() OVER (PARTITION BY q.tenant": {"resources_pkey"},
    "SELECT DISTINCT q.tenant": {"resources_pkey"},
    "PARTITION BY q.tenant, q.resource_ids[1]": {"resources_pkey", "idempotency_keys_pkey"},
    "WITH wanted AS MATERIALIZED": {"resources_pkey"},
    # expiry_expire: what is due, its resources, its end, the outcomes
    "WHERE h.id = w.id AND h.state || '' = 'held'": {"holds_pkey"},
    "SELECT FROM unnest(v_tenants": {"resources_pkey"},
    "SET held = r.held - CASE": {"holds_pkey", "resources_pkey"},
    "WITH ended AS": {"holds_pkey"},
    "LEFT JOIN LATERAL (SELECT h.id, h.state": {"holds_pkey"},
    # expiry_declare, the other verbs
    "WITH mine AS": {"holds_by_resource", "holds_by_further_resource", "holds_pkey"},
    "SELECT h.* FROM holds h": {"holds_pkey"},
}
# A statement may look these up as well.
BESIDE = {
    "holds_pkey",
    "dead_letters_unresolved",
    "outbox_pruned_pkey",
    "outbox_epochs_pkey",
}


def reads_all(kind: str, name: str) -> bool:
    """Whether this reads a big table from end to end."""
    return (kind == "all of" and not name.startswith(("pg_", "outbox_epochs"))) or (
        kind == "seq" and name in BIG
    )


def judge(plans: Plans) -> list[str]:
    """Say which statement read a big table in sequence, or by another index than it names."""
    wrong = [f"{text[:200]} reads {used}" for text, used in plans if any(reads_all(*use) for use in used)]
    for piece, indexes in EXPECTED.items():
        found = [used for text, used in plans if " ".join(piece.split()) in text]
        if not found:
            wrong.append(f"{piece} did not run")
        for used in found:
            names = {name for kind, name in used if kind == "index"}
            if not indexes <= names <= indexes | BESIDE:
                wrong.append(f"{piece} uses {names}, not {indexes}")
    return wrong


async def plans_of(conn: asyncpg.Connection[Any], number: int) -> list[str]:
    """Run every statement; answer what is wrong with their plans."""
    plans: Plans = []
    async with explained(conn, plans):
        await every_statement(conn, number)
    return judge(plans)


async def test_the_indexes_serve_whatever_the_planner_knows(database_url: str) -> None:
    """Planned on an empty table, without statistics or with them: no big table is read from end to end."""
    found: dict[str, list[str]] = {}
    async with AsyncExitStack() as stack:

        async def connect(*settings: str) -> asyncpg.Connection[Any]:
            conn = await asyncpg.connect(database_url)
            stack.push_async_callback(conn.close)
            for setting in ("random_page_cost = 4", "jit = off", *settings):
                await conn.execute(f"SET {setting}")
            return conn

        first = await connect("plan_cache_mode = force_generic_plan")
        await first.execute(QUIET)
        for number in range(1, 4):
            await every_statement(first, number)
        await (await connect()).execute(GROW)
        found["cached when young"] = await plans_of(first, 8)
        found["never analyzed"] = await plans_of(await connect(), 9)
        found["never analyzed, generic"] = await plans_of(
            await connect("plan_cache_mode = force_generic_plan"), 10
        )
        await first.execute("ANALYZE holds, resources, outbox")
        found["analyzed"] = await plans_of(await connect(), 11)
        found["analyzed, generic"] = await plans_of(await connect("plan_cache_mode = force_generic_plan"), 12)
    wrong = [f"{name}: {what}" for name, them in found.items() for what in them]
    assert not wrong, "\n".join(wrong)
