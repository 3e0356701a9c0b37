"""Faults that these tests found; each fails on the schema as it was."""

from __future__ import annotations

import asyncpg
import pytest

from expiry import holds
from tests import scene
from tests.scene import TENANT, Pool


async def test_p7_an_old_snapshot_cannot_oversell_a_new_resource(pool: Pool) -> None:
    """A place under REPEATABLE READ that cannot see the declaration is told to come again."""
    async with pool.acquire() as buyer, pool.acquire() as seller:
        async with scene.unfinished(buyer, isolation="repeatable_read") as order:
            await buyer.fetchval("SELECT count(*) FROM resources")
            await scene.declare(seller, "room", 1)
            await scene.place(seller, "room")
            assert await scene.outcome(scene.place(buyer, "room")) == "busy"
            await order.rollback()
        assert await scene.outcome(scene.place(buyer, "room")) == "insufficient_capacity"
    await scene.audit(pool)


async def test_an_old_snapshot_may_hold_what_is_undeclared(pool: Pool) -> None:
    """Under REPEATABLE READ an undeclared resource is placed as ever, and stays undeclared."""
    async with pool.acquire() as buyer, scene.unfinished(buyer, isolation="repeatable_read") as order:
        assert await scene.outcome(scene.place(buyer, "room", "bed")) == "done"
        await order.commit()
    assert await pool.fetchval("SELECT count(*) FROM resources") == 0


async def test_p7_a_declaration_needs_a_fresh_snapshot(pool: Pool) -> None:
    """A declaration that could not see what is placed meanwhile is refused."""
    async with pool.acquire() as seller, scene.unfinished(seller, isolation="repeatable_read"):
        with pytest.raises(asyncpg.FeatureNotSupportedError, match="READ COMMITTED"):
            await scene.declare(seller, "room", 1)


async def test_a_key_used_since_the_snapshot(pool: Pool) -> None:
    """Under REPEATABLE READ a key that another transaction used meanwhile means: come again."""
    async with (
        pool.acquire() as one,
        pool.acquire() as two,
        scene.unfinished(one, isolation="repeatable_read"),
    ):
        await one.fetchval("SELECT count(*) FROM resources")
        await scene.place(two, "room", idempotency_key="k")
        assert await scene.outcome(scene.place(one, "room", idempotency_key="k")) == "busy"


async def test_a_reclaiming_place_and_a_declaration_never_deadlock(pool: Pool) -> None:
    """A place has the overdue hold locked, a declaration counts that very hold: one waits for the other."""
    async with pool.acquire() as buyer, pool.acquire() as seller, pool.acquire() as other:
        await scene.declare(buyer, "full", 1)
        await scene.overdue(buyer, "full", "new")
        async with scene.unfinished(other) as pause:
            await other.execute("SELECT FROM resources WHERE resource_id = 'full' FOR UPDATE")
            async with (
                scene.blocked(pool, buyer, scene.outcome(scene.place(buyer, "full", "new"))) as place,
                scene.blocked(pool, seller, scene.declare(seller, "new", 5)) as declaration,
            ):
                await pause.rollback()
                await declaration
                assert await place == "done"
    await scene.audit(pool)


async def test_an_outcome_is_counted_once(pool: Pool) -> None:
    """Of the wake-ups of two generations of one hold in one batch, one expired it."""
    async with pool.acquire() as conn:
        hold = await scene.place(conn, "room")
        await holds.renew(conn, hold.id, tenant_id=TENANT, ttl_s=60)
        await scene.pass_time(conn, 61, hold)
        batch = [scene.wake(hold, g) for g in (1, 2)]
        assert await scene.expire_now(conn, *batch) == ["ended", "expired"]
