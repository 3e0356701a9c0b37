"""Cases B of the public bug reports: stale wake-ups, and confirm and renew against expire."""

from __future__ import annotations

from collections import Counter as Tally
from datetime import timedelta

import pytest

from expiry import errors, holds
from expiry.holds import Conn, Hold
from expiry.wanted import Item, Wanted
from tests import scene
from tests.scene import TENANT, Pool

RUNS = 500
SPREAD_MS = 5  # the races happen this close to the deadline, on either side


async def test_b1_late_wake_ups_of_a_confirmed_hold(conn: Conn) -> None:
    """Placed, renewed, confirmed; then the first wake-up three times: confirmed, no expiry, no unit back."""
    await scene.declare(conn, "room", 5)
    hold = await scene.place(conn, Item("room", 2))
    await holds.renew(conn, hold.id, tenant_id=TENANT, ttl_s=60)
    await holds.confirm(conn, hold.id, tenant_id=TENANT, generation=2)
    await scene.pass_time(conn, 120, hold)
    assert await scene.expire_now(conn, *[scene.wake(hold, 1)] * 3) == ["ended"] * 3
    assert await scene.state(conn, hold) == "confirmed"
    assert await scene.events(conn, hold) == ["place::1", "renew::2", "confirm::2"]
    assert await scene.units(conn, "room") == (0, 2)
    await scene.audit(conn)


async def test_b2_renewed_a_second_before_the_deadline(conn: Conn) -> None:
    """The wake-up of the old deadline finds the hold held; it expires once, at the new one."""
    hold = await scene.place(conn, "room", ttl_s=60)
    await scene.pass_time(conn, 59, hold)
    await holds.renew(conn, hold.id, tenant_id=TENANT, ttl_s=60)
    await scene.pass_time(conn, 2, hold)
    assert await scene.expire_now(conn, scene.wake(hold, 1)) == ["stale"]
    assert await scene.state(conn, hold) == "held"
    await scene.pass_time(conn, 59, hold)
    assert await scene.expire_now(conn, scene.wake(hold, 1)) == ["stale"]
    assert await scene.expire_now(conn, scene.wake(hold, 2)) == ["expired"]
    assert await scene.expire_now(conn, *(scene.wake(hold, g) for g in (1, 2))) == ["ended"] * 2
    assert await scene.events(conn, hold) == ["place::1", "renew::2", "expire::2"]


async def place_runs(conn: Conn) -> list[Hold]:
    """Place a hold for each run, on a resource that is then full."""
    await scene.declare(conn, "room", RUNS)
    wanted = [Wanted(items=[Item("room")], ttl_s=3600) for _ in range(RUNS)]
    return (await holds.place_many(conn, wanted, tenant_id=TENANT)).holds


async def race(confirmer: Conn, worker: Conn, hold: Hold, *, left_ms: float, confirm_first: bool) -> str:
    """Bring the deadline to left_ms from now, confirm and expire at once; answer both outcomes."""
    await worker.execute(
        "UPDATE holds SET expires_at = clock_timestamp() + $1 * interval '1 ms' WHERE id = $2",
        left_ms,
        hold.id,
    )
    confirm = scene.outcome(holds.confirm(confirmer, hold.id, tenant_id=TENANT))
    expire = scene.expire_now(worker, hold)
    if confirm_first:
        confirmed, expired = await scene.together(confirm, expire)
    else:
        expired, confirmed = await scene.together(expire, confirm)
    return f"{confirmed}/{expired[0]}"


@pytest.mark.parametrize("confirm_first", [True, False], ids=["confirm-first", "expire-first"])
async def test_b4_confirm_against_expire_at_the_deadline(pool: Pool, *, confirm_first: bool) -> None:
    """Within 5 ms of the deadline, 500 runs an order: one end, one event, and the loser is told so."""
    said: Tally[str] = Tally()
    async with pool.acquire() as confirmer, pool.acquire() as worker:
        runs = await place_runs(worker)
        for run, hold in enumerate(runs):
            left_ms = SPREAD_MS * (2 * run / RUNS - 1)
            said[await race(confirmer, worker, hold, left_ms=left_ms, confirm_first=confirm_first)] += 1
        await scene.expire_now(worker, *runs)  # whoever looked too early comes again
    assert said.total() == RUNS
    assert set(said) <= {
        f"{confirm}/{expire}"
        for confirm in ("done", "hold_expired")
        for expire in ("early", "contended", "ended", "expired")
    }
    assert said["done/expired"] == 0
    assert said["hold_expired/ended"] == 0
    states = Tally([row["state"] for row in await pool.fetch("SELECT state FROM holds")])
    won = sum(n for outcome, n in said.items() if outcome.startswith("done"))
    assert states == Tally(confirmed=won, expired=RUNS - won)
    assert 0 < won < RUNS, "one side won every race: nothing was tested"
    await scene.audit(pool)


async def test_b5_past_the_deadline_nobody_needs_to_run(conn: Conn) -> None:
    """With queue and sweep off, a renewal past the deadline is refused and another buyer takes the unit."""
    await scene.declare(conn, "room", 1)
    late = await scene.overdue(conn, "room", holder="ann")
    with pytest.raises(errors.HoldExpiredError):
        await holds.renew(conn, late.id, tenant_id=TENANT, ttl_s=60)
    taken = await scene.place(conn, "room", holder="bob")
    assert await scene.state(conn, taken) == "held"
    assert await scene.events(conn, late) == ["place::1", "expire::1"]
    await scene.audit(conn)


async def test_b7_past_the_deadline_the_old_hold_says_expired(conn: Conn) -> None:
    """With queue and sweep off, reading the old hold says expired before and after the unit is taken."""
    await scene.declare(conn, "room", 1)
    late = await scene.overdue(conn, "room")
    for _ in ("before", "after"):
        read = await holds.get(conn, late.id, tenant_id=TENANT)
        assert read.shown_state == "expired"
        assert await scene.outcome(scene.place(conn, "room")) in ("done", "insufficient_capacity")
    assert read.state == "expired"
    assert read.shown_state == "expired"
    await scene.audit(conn)


async def test_b10_the_same_holder_asks_for_the_last_unit_again(conn: Conn) -> None:
    """The refusal names the hold that this buyer already has, and only that one can be confirmed."""
    await scene.declare(conn, "room", 1)
    hold = await scene.place(conn, "room", holder="ann")
    for holder, known in (("ann", hold.id), ("bob", None)):
        with pytest.raises(errors.InsufficientCapacityError) as refused:
            await scene.place(conn, "room", holder=holder)
        assert refused.value.facts["hold_id"] == (None if known is None else str(known))
    await holds.confirm(conn, hold.id, tenant_id=TENANT)
    assert await conn.fetchval("SELECT count(*) FROM holds") == 1
    await scene.audit(conn)


async def test_b10_the_same_holder_at_once(pool: Pool) -> None:
    """Ten clicks at the same moment: one hold, and every refusal that names one names that one."""
    async with pool.acquire() as conn:
        await scene.declare(conn, "room", 1)
    clicks = [scene.on(pool, scene.place, "room", holder="ann") for _ in range(10)]
    said = Tally(await scene.together(*(scene.outcome(c) for c in clicks)))
    assert said["done"] == 1
    assert set(said) <= {"done", "insufficient_capacity", "busy"}
    await scene.audit(pool)


async def test_b12_a_refused_change_leaves_the_hold_as_it_was(conn: Conn) -> None:
    """Each kind of refused renewal leaves deadline, generation and events untouched."""
    hold = await scene.place(conn, "room", max_renewals=0)
    free = await scene.place(conn, "room", max_lifetime_s=60)
    before = await scene.everything(conn)
    refusals: list[tuple[Hold, dict[str, object], type[errors.ExpiryError]]] = [
        (hold, {"ttl_s": 60}, errors.LimitReachedError),
        (hold, {"ttl_s": 60, "generation": 2}, errors.GenerationMismatchError),
        (free, {"ttl_s": 61}, errors.LimitReachedError),
        (free, {"ttl_s": 0}, errors.OutOfRangeError),
        (free, {"expires_at": free.placed_at - timedelta(days=1)}, errors.OutOfRangeError),
        (free, {}, errors.OutOfRangeError),
    ]
    for which, asked, refusal in refusals:
        with pytest.raises(refusal):
            await holds.renew(conn, which.id, tenant_id=TENANT, **asked)  # type: ignore[arg-type]
        assert await scene.everything(conn) == before
