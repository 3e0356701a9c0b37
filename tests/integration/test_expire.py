"""The one transition that ends holds by time: an outcome for every wake-up, an effect for one."""

from __future__ import annotations

import asyncio
import time

import asyncpg
import pytest

from expiry import deadletters, holds
from expiry.expire import Wake
from expiry.holds import Conn, Hold
from expiry.settings import Settings
from expiry.wanted import Item, uuid7
from tests import scene
from tests.scene import TENANT, Pool

SETTINGS = Settings(attempts_max=2, retry_base_s=7)
BLOCKED_S_MAX = 2  # a transition that waits this long waits for ever


async def test_p1_no_hold_ends_before_its_deadline(conn: Conn) -> None:
    """A wake-up that comes early changes nothing and learns how long is left."""
    await scene.declare(conn, "room", 5)
    hold = await scene.place(conn, "room", ttl_s=60)
    before = await scene.everything(conn)
    [early] = await scene.outcomes(conn, hold)
    assert early.kind == "early"
    assert 50_000 < early.ms < 60_000
    assert await scene.everything(conn) == before


async def test_p1_the_row_decides_to_the_microsecond(conn: Conn) -> None:
    """Tried again and again across the deadline, the hold ends on the first try past it."""
    hold = await scene.place(conn, "room", ttl_s=60)
    await scene.pass_time(conn, 59.8, hold)
    tries = 0
    while (await scene.outcomes(conn, hold))[0].kind == "early":
        tries += 1
    ended = await holds.get(conn, hold.id, tenant_id=TENANT)
    assert tries > 1
    assert ended.ended_at is not None
    assert ended.ended_at >= ended.expires_at


async def test_an_expired_hold_gives_its_units_back(conn: Conn) -> None:
    """The row says when and by whom it ended, the counters are down, the outcome tells the lag."""
    await scene.declare(conn, "room", 5)
    hold = await scene.overdue(conn, Item("room", 3), "undeclared")
    [expired] = await scene.outcomes(conn, hold)
    row = await holds.get(conn, hold.id, tenant_id=TENANT)
    assert (row.state, row.ended_by) == ("expired", "worker")
    assert row.ended_at is not None
    assert expired.ms == pytest.approx((row.ended_at - row.expires_at).total_seconds() * 1000, abs=0.01)
    assert expired.at_ms == pytest.approx(row.ended_at.timestamp() * 1000, abs=0.01)
    assert await scene.units(conn, "room") == (0, 0)


async def test_p2_delivered_twice_it_ends_once(conn: Conn) -> None:
    """A second delivery finds an ended hold and changes nothing."""
    await scene.declare(conn, "room", 5)
    hold = await scene.overdue(conn, "room")
    assert await scene.expire_now(conn, hold) == ["expired"]
    before = await scene.everything(conn)
    assert await scene.expire_now(conn, hold) == ["ended"]
    assert await scene.everything(conn) == before


async def test_p2_many_workers_end_it_once(pool: Pool) -> None:
    """Eight workers with the same hundred wake-ups end each hold once between them."""
    async with pool.acquire() as conn:
        await scene.declare(conn, "room", 100)
        late = [await scene.overdue(conn, "room") for _ in range(100)]
    said = await scene.together(*(scene.on(pool, scene.expire_now, *late) for _ in range(8)))
    assert sum(kinds.count("expired") for kinds in said) == 100
    assert {kind for kinds in said for kind in kinds} <= {"expired", "ended", "contended"}
    assert await pool.fetchval("SELECT count(*) FROM outbox WHERE type = 'hold.expired'") == 100
    await scene.audit(pool)


async def test_p4_a_renewal_outlives_every_older_wake_up(conn: Conn) -> None:
    """A wake-up of an older generation is a no-op, even past the new deadline."""
    hold = await scene.place(conn, "room")
    await holds.renew(conn, hold.id, tenant_id=TENANT, ttl_s=60)
    assert await scene.expire_now(conn, scene.wake(hold, 1)) == ["stale"]
    await scene.pass_time(conn, 61, hold)
    assert await scene.expire_now(conn, scene.wake(hold, 1)) == ["stale"]
    assert await scene.state(conn, hold) == "held"
    assert await scene.expire_now(conn, scene.wake(hold, 2)) == ["expired"]


async def test_each_wake_up_has_its_outcome_in_order(conn: Conn) -> None:
    """One batch of everything answers in the order it was asked, and ends only what is due."""
    late, later = [await scene.overdue(conn, "room") for _ in range(2)]
    early, renewed, confirmed = [await scene.place(conn, "room") for _ in range(3)]
    await holds.renew(conn, renewed.id, tenant_id=TENANT, ttl_s=60)
    await holds.confirm(conn, confirmed.id, tenant_id=TENANT)
    batch: list[Hold | Wake] = [
        early,
        late,
        Wake(uuid7(), 1),
        renewed,
        confirmed,
        later,
        Wake(early.id, 9),
    ]
    kinds = ["early", "expired", "missing", "stale", "ended", "expired", "early"]
    assert await scene.expire_now(conn, *batch) == kinds
    assert await scene.expire_now(conn) == []


async def test_p3_no_end_without_its_event(conn: Conn) -> None:
    """When the event cannot be written the hold has not ended and its units are not back."""
    await scene.declare(conn, "room", 5)
    hold = await scene.overdue(conn, "room")
    before = await scene.everything(conn)
    await scene.break_events(conn)
    with pytest.raises(asyncpg.RaiseError):
        await scene.expire_now(conn, hold)
    assert await scene.everything(conn) == before
    await scene.mend(conn)
    assert await scene.expire_now(conn, hold) == ["expired"]
    assert await scene.events(conn, hold) == ["place::1", "expire::1"]


async def test_p3_a_second_end_cannot_be_written(conn: Conn) -> None:
    """Should a row ever be wound back by hand, its second expiry fails at the outbox."""
    hold = await scene.overdue(conn, "room")
    await scene.expire_now(conn, hold)
    await conn.execute("UPDATE holds SET state = 'held', ended_at = NULL, ended_by = NULL")
    with pytest.raises(asyncpg.UniqueViolationError):
        await scene.expire_now(conn, hold)


async def test_a_locked_hold_is_contended_at_once(pool: Pool) -> None:
    """What another transaction has locked is left for later, the rest of the batch ends."""
    async with pool.acquire() as buyer, pool.acquire() as worker:
        locked, free = [await scene.overdue(worker, "room") for _ in range(2)]
        async with scene.unfinished(buyer), asyncio.timeout(BLOCKED_S_MAX):
            await buyer.execute("UPDATE holds SET holder = 'x' WHERE id = $1", locked.id)
            assert await scene.expire_now(worker, locked, free) == ["contended", "expired"]
        assert await scene.expire_now(worker, locked, free) == ["expired", "ended"]


async def test_a_slow_checkout_delays_only_what_it_holds(pool: Pool) -> None:
    """Holds that need a resource which a slow transaction keeps are contended; the others end in about 50 ms."""
    async with pool.acquire() as checkout, pool.acquire() as worker:
        for name in ("slow", "quick"):
            await scene.declare(worker, name, 100)
        slow = [await scene.overdue(worker, *names) for names in (["slow"], ["quick", "slow"])]
        quick = [await scene.overdue(worker, "quick") for _ in range(50)]
        async with scene.unfinished(checkout), asyncio.timeout(BLOCKED_S_MAX):
            await scene.place(checkout, "slow")
            started_s = time.monotonic()
            kinds = await scene.expire_now(worker, *quick[:25], *slow, *quick[25:])
            took_s = time.monotonic() - started_s
        assert kinds == ["expired"] * 25 + ["contended"] * 2 + ["expired"] * 25
        assert 0.05 <= took_s < 1
        assert await scene.expire_now(worker, *slow) == ["expired"] * 2
    await scene.audit(pool)


async def test_a_short_checkout_is_waited_for(pool: Pool) -> None:
    """A resource that is free again within the bound costs a moment, not another attempt."""
    async with pool.acquire() as checkout, pool.acquire() as worker:
        await scene.declare(worker, "room", 100)
        late = await scene.overdue(worker, "room")
        async with scene.unfinished(checkout) as order:
            await scene.place(checkout, "room")
            async with scene.blocked(pool, worker, scene.expire_now(worker, late)) as batch:
                await order.commit()
                assert await batch == ["expired"]


async def test_one_bad_row_cannot_keep_the_others(conn: Conn) -> None:
    """A row that fails by its own fault is found and noted; the other 99 end in the same batch."""
    batch = [await scene.overdue(conn, "room", holder="bad" if i == 37 else None) for i in range(100)]
    await scene.break_bad_holds(conn, "P0001")
    wakes = [scene.wake(h) for h in batch]
    said = await scene.transition.expire_batch(conn, wakes, by="sweep", settings=SETTINGS)
    assert [o.kind for o in said] == ["expired"] * 37 + ["failed"] + ["expired"] * 62
    assert 7000 * 0.8 <= said[37].ms <= 7000 * 1.2
    [noted] = await deadletters.list_(conn, state="retrying")
    assert (noted["hold_id"], noted["attempts"], noted["reason"]) == (batch[37].id, 1, "P0001")
    assert await conn.fetchval("SELECT attempts FROM holds WHERE id = $1", batch[37].id) == 1


async def test_p8_what_fails_for_good_is_kept_and_may_be_replayed(conn: Conn) -> None:
    """After its last attempt a row is a dead letter; a replay gives it fresh attempts and it ends."""
    hold = await scene.overdue(conn, "room", holder="bad")
    await scene.break_bad_holds(conn, "23514")
    for kind in ("failed", "dead"):
        said = await scene.transition.expire_batch(conn, [scene.wake(hold)], by="sweep", settings=SETTINGS)
        assert [o.kind for o in said] == [kind]
    [dead] = await deadletters.list_(conn)
    assert (dead["hold_id"], dead["attempts"], dead["reason"]) == (hold.id, 2, "23514")
    assert "broken" in dead["first_error"]
    await scene.mend(conn)
    assert await deadletters.replay(conn, [dead["id"]], by="ann") == [dead["id"]]
    assert await conn.fetchval("SELECT next_attempt_at IS NULL AND attempts = 0 FROM holds")
    assert await scene.expire_now(conn, hold) == ["expired"]


async def test_p8_a_later_success_closes_the_failure(conn: Conn) -> None:
    """A hold that ends after a failed attempt leaves its failure marked as recovered."""
    hold = await scene.overdue(conn, "room", holder="bad")
    await scene.break_bad_holds(conn, "P0001")
    await scene.transition.expire_batch(conn, [scene.wake(hold)], by="sweep", settings=SETTINGS)
    await scene.mend(conn)
    assert await scene.expire_now(conn, hold) == ["expired"]
    [closed] = await deadletters.list_(conn, state="recovered")
    assert (closed["hold_id"], closed["resolved_by"]) == (hold.id, "worker")


@pytest.mark.parametrize("sqlstate", ["53100", "57014", "40001", "55000"])
async def test_p8_an_outage_counts_against_nobody(conn: Conn, sqlstate: str) -> None:
    """A full disk, a cancelled or a conflicting statement is raised; no row has an attempt less."""
    batch = [await scene.overdue(conn, "room", holder="bad") for _ in range(2)]
    await scene.break_bad_holds(conn, sqlstate)
    before = await scene.everything(conn)
    wakes = [scene.wake(h) for h in batch]
    with pytest.raises(asyncpg.PostgresError):
        await scene.transition.expire_batch(conn, wakes, by="sweep", settings=SETTINGS)
    assert await scene.everything(conn) == before
    assert await conn.fetchval("SELECT count(*) FROM dead_letters") == 0
