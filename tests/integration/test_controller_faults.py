"""Leaders that are paused, cut off, killed or robbed of their rows raise nothing; P9 holds over every window."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from governor import Controller, Published, RedisBucket
from governor import lease as leases
from tests.fleet import said
from tests.governing import (
    FLEET,
    INTERVAL_S,
    KEY,
    SETTINGS,
    Fleet,
    Pool,
    Probes,
    decided,
    running,
    taking,
    until,
)
from tests.helpers import eventually
from tests.proxy import Proxy, proxy_to

FLOOR = SETTINGS.floor_per_s
# Quick at the ceiling: what the bound is tested with. Decisions are what the law makes of that.
FAST = SETTINGS.model_copy(update={"start_per_s": 1000.0})


@pytest.fixture
def fleet(pool: Pool, redis: Redis) -> Fleet:
    """Give a fleet with both stores."""
    return Fleet(pool, redis)


@pytest.fixture
async def redis_proxy(redis_url: str) -> AsyncIterator[Proxy]:
    """Give a way to Redis that can be cut."""
    async with proxy_to(redis_url) as proxy:
        yield proxy


@asynccontextmanager
async def by_way_of(proxy: Proxy, pool: Pool) -> AsyncIterator[Fleet]:
    """Give a fleet that reaches Redis through the proxy."""
    async with Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 0)) as client:
        yield Fleet(pool, client)


async def allowance(fleet: Fleet) -> float:
    """Return what is in force in Redis."""
    return (await fleet.primary().read()).allowance_per_s


async def row_allowance(fleet: Fleet) -> float:
    """Return what is in force in PostgreSQL."""
    return (await fleet.row().read()).allowance_per_s


# --- leaders


class Gated(RedisBucket):
    """A bucket whose publications leave when the gate is opened: the leader is stopped right before."""

    gate: asyncio.Event
    reached: asyncio.Event

    async def publish(self, **asked: Any) -> Published:  # noqa: ANN401 - its own keywords
        """Wait, then publish."""
        self.reached.set()
        await self.gate.wait()
        return await super().publish(**asked)


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("successor", [False, True])
async def test_a_leader_paused_before_it_publishes_comes_too_late(
    fleet: Fleet, *, emptied: bool, successor: bool
) -> None:
    """Whoever leads by then, and even if the bucket has forgotten every epoch: refused by the bucket's clock."""
    assert fleet.redis is not None
    bucket = Gated(fleet.redis, KEY, floor_per_s=FLOOR)
    bucket.gate, bucket.reached = asyncio.Event(), asyncio.Event()
    one, two = fleet.controller("one", primary=bucket), fleet.controller("two", settings=FAST)
    late = asyncio.create_task(decided(one))
    await bucket.reached.wait()
    expected = FLOOR
    if successor:
        await eventually(lambda: _leads(two))
    if emptied:
        await fleet.redis.flushall()
    if successor:
        expected = (await decided(two)).allowance_per_s
    else:
        await asyncio.sleep(2 * INTERVAL_S)
    bucket.gate.set()
    await late
    assert await allowance(fleet) in (expected, FLOOR)
    await one.tick()
    assert one.leads is not successor


async def test_a_deposed_leader_is_fenced_by_its_epoch(fleet: Fleet) -> None:
    """In time by the clock, but another leads and has published: the higher epoch counts."""
    assert fleet.redis is not None
    bucket = Gated(fleet.redis, KEY, floor_per_s=FLOOR)
    bucket.gate, bucket.reached = asyncio.Event(), asyncio.Event()
    slow = SETTINGS.model_copy(
        update={"interval_s": 5.0, "start_per_s": 900.0}
    )  # seconds in which it is in time
    late = asyncio.create_task(decided(fleet.controller("one", primary=bucket, settings=slow)))
    await bucket.reached.wait()
    await fleet.pool.execute("UPDATE governor_lease SET until = clock_timestamp()")
    two = fleet.controller("two")
    decision = await decided(two)
    bucket.gate.set()
    await late
    state = await fleet.primary().read()
    assert (state.epoch, state.allowance_per_s) == (two.epoch, decision.allowance_per_s)


async def _leads(controller: Controller) -> bool:
    await controller.tick()
    return controller.leads


@asynccontextmanager
async def child(database_url: str, redis_url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a leader in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.child_controller", database_url, redis_url),
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await said(process, "leads")
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.communicate()


async def test_a_stopped_process_is_succeeded_and_raises_nothing(
    fleet: Fleet, database_url: str, redis_url: str
) -> None:
    """SIGSTOP for longer than the lease; when it goes on it leads no longer, and decided nothing since."""
    async with taking(fleet), child(database_url, redis_url) as process:
        process.send_signal(signal.SIGSTOP)
        one = fleet.controller("one")
        async with running(one):
            await eventually(until(lambda: one.leads))
            process.send_signal(signal.SIGCONT)
            await said(process, "leads no longer")
            await asyncio.sleep(5 * INTERVAL_S)
            assert one.leads
        entries = await fleet.journal()
        mine = [entry.id for entry in entries if entry.holder == "one"]
        assert mine
        assert all(entry.id < min(mine) for entry in entries if entry.holder == "child")
    assert (await fleet.primary().read()).epoch == one.epoch == 2


async def test_a_killed_leader_is_succeeded_before_its_allowance_lapses(
    fleet: Fleet, database_url: str, redis_url: str
) -> None:
    """SIGKILL: within lease and interval the next one leads; the allowance never fell to the floor."""
    async with child(database_url, redis_url) as process:
        one = fleet.controller("one")
        await eventually(lambda: _above(fleet, FLOOR))
        process.kill()
        seen = []
        async with running(one):
            while not one.leads:
                seen.append(await allowance(fleet))
                await asyncio.sleep(INTERVAL_S / 10)
    assert min(seen) > FLOOR
    assert one.epoch == 2


async def _above(fleet: Fleet, rate_per_s: float) -> bool:
    return await allowance(fleet) > rate_per_s


async def test_a_leader_cut_off_from_postgresql_stops_publishing(fleet: Fleet, database_url: str) -> None:
    """It sees Redis and publishes nothing: its allowance lapses, and it leads no longer once its lease is over."""
    async with proxy_to(database_url) as proxy, asyncpg.create_pool(proxy.url, min_size=1) as cut_off:
        async with taking(fleet):
            one = Fleet(cut_off, fleet.redis).controller("one")
            async with running(one):
                await eventually(lambda: _above(fleet, FLOOR))
                proxy.refuse()
                until_us = (await fleet.primary().read()).until
                await eventually(until(lambda: not one.leads))
                await eventually(lambda: _at(fleet, FLOOR))
                state = await fleet.primary().read()
                assert state.until - until_us <= 2 * INTERVAL_S * 1_000_000
                proxy.refuse(refusing=False)
                await eventually(until(lambda: one.leads))
                await eventually(lambda: _above(fleet, FLOOR))
        assert (await fleet.journal(1))[0].epoch == 2


async def _at(fleet: Fleet, rate_per_s: float) -> bool:
    return await allowance(fleet) == rate_per_s


async def test_a_blocked_event_loop_raises_nothing(fleet: Fleet) -> None:
    """A leader whose loop stood still for longer than its lease finds that it leads no longer."""
    one = fleet.controller("one")
    await decided(one)
    time.sleep(6 * INTERVAL_S)  # noqa: ASYNC251 - that is what a blocked loop is
    two = fleet.controller("two")
    await eventually(lambda: _leads(two))
    await one.tick()
    assert (one.leads, two.leads) == (False, True)
    assert {entry.holder for entry in await fleet.journal(1)} == {"one"}


# --- rows and stores that are lost


async def test_a_deleted_lease_row_does_not_reset_the_epoch(fleet: Fleet) -> None:
    """Two leaders never publish under one epoch, and the next one is not fenced off by the last."""
    one, two = fleet.controller("one"), fleet.controller("two")
    await decided(one)
    await two.tick()
    await fleet.pool.execute("DELETE FROM governor_lease")
    await eventually(lambda: _leads(two))
    await one.tick()
    assert (one.leads, two.leads, two.epoch) == (False, True, 2)
    await decided(two)
    assert (await fleet.primary().read()).epoch == 2


@pytest.mark.parametrize("order", [("redis", "lease"), ("lease", "redis")])
async def test_redis_and_the_lease_are_lost_in_either_order(fleet: Fleet, order: tuple[str, str]) -> None:
    """Emptied and deleted while all take what they can: one leads again, under an epoch of its own."""
    assert fleet.redis is not None
    one, two = fleet.controller("one", settings=FAST), fleet.controller("two", settings=FAST)
    async with taking(fleet), running(one, two):
        await eventually(lambda: _above(fleet, FLOOR))
        for what in order:
            if what == "redis":
                await fleet.redis.flushall()
            else:
                await fleet.pool.execute("DELETE FROM governor_lease")
            await asyncio.sleep(INTERVAL_S)
        await eventually(lambda: _above(fleet, FLOOR))
        assert [one.leads, two.leads].count(True) == 1
    epochs = [entry.epoch for entry in await fleet.journal()]
    assert epochs == sorted(epochs, reverse=True)


async def test_a_row_that_lost_its_epoch_learns_it_from_the_bucket(fleet: Fleet) -> None:
    """Journal and lease restored from before, the bucket not: the leader goes past the epoch that it sees."""
    await fleet.primary().publish(allowance_per_s=300, ttl_s=0.1, epoch=40)
    one = fleet.controller("one")
    await decided(one)
    assert (await fleet.primary().read()).epoch == one.epoch == 41


# --- Redis is away


async def test_one_lost_answer_does_not_drop_the_fleet_to_the_floor(fleet: Fleet, redis_proxy: Proxy) -> None:
    """The look that failed is missing; the next reading is whole again, of an interval twice as long."""
    async with by_way_of(redis_proxy, fleet.pool) as through:
        one = through.controller("one")
        await decided(one)
        await decided(one)
        redis_proxy.refuse()
        held = await decided(one)
        redis_proxy.refuse(refusing=False)
        decision = await decided(one)
    after, lost = (entry.read for entry in await fleet.journal(2))
    assert (lost.started, after.started) == (None, 0)
    assert min(held.allowance_per_s, decision.allowance_per_s) == 100


async def test_the_row_takes_over_once_the_published_allowance_has_lapsed(
    fleet: Fleet, redis_proxy: Proxy
) -> None:
    """Redis is cut off from the leader, not from the workers: never both buckets above the floor at once."""
    async with by_way_of(redis_proxy, fleet.pool) as through, taking(fleet):
        one = through.controller("one", settings=FAST)
        both = 0
        async with running(one):
            await eventually(lambda: _above(fleet, FLOOR))
            redis_proxy.refuse()
            await eventually(lambda: _row_above(fleet, FLOOR))
            for _ in range(20):
                both += await _both_above(fleet)
                await asyncio.sleep(INTERVAL_S / 10)
            assert one.home == "postgres"
            redis_proxy.refuse(refusing=False)
            while await allowance(fleet) <= FLOOR:
                both += await _both_above(fleet)
                await asyncio.sleep(INTERVAL_S / 10)
            assert await row_allowance(fleet) <= FLOOR
            assert one.home == "redis"
    assert both == 0


async def _row_above(fleet: Fleet, rate_per_s: float) -> bool:
    return await row_allowance(fleet) > rate_per_s


async def _both_above(fleet: Fleet) -> bool:
    return await allowance(fleet) > FLOOR and await row_allowance(fleet) > FLOOR


async def test_who_reaches_redis_leads(fleet: Fleet, redis_proxy: Proxy) -> None:
    """A leader that alone lost Redis makes way, so that the fleet is not left at the floor."""
    async with by_way_of(redis_proxy, fleet.pool) as through:
        one, two = through.controller("one"), fleet.controller("two")
        async with running(one):
            await eventually(until(lambda: one.leads))
            async with running(two):
                redis_proxy.refuse()
                await eventually(until(lambda: two.leads))
                await eventually(lambda: _above(fleet, FLOOR))
                assert (one.leads, two.home) == (False, "redis")


async def test_a_new_leader_waits_out_what_the_last_one_published(fleet: Fleet) -> None:
    """The lease says where the allowance is and until when: a leader without Redis opens no second bucket."""
    one = fleet.controller("one", settings=FAST)
    await decided(one)
    await one.close()
    async with Redis(port=1, retry=Retry(NoBackoff(), 0)) as nobody, taking(fleet):
        two = Fleet(fleet.pool, nobody).controller("two", settings=FAST)
        async with running(two):
            await eventually(lambda: _row_above(fleet, FLOOR))
            assert await allowance(fleet) == FLOOR


# --- orders


async def test_an_override_lowers_and_ends_by_itself(fleet: Fleet) -> None:
    """At most the ceiling, for its time; the journal says who and why."""
    one = fleet.controller("one", settings=FAST)
    await decided(one)
    with pytest.raises(ValueError, match="an override only lowers"):
        await orders_override(fleet, 1001)
    await orders_override(fleet, 40)
    decision = await decided(one)
    assert (decision.allowance_per_s, decision.limited_by) == (40, "override")
    [entry] = await fleet.journal(1)
    assert [(o["kind"], o["ordered_by"], o["reason"]) for o in entry.orders] == [("override", "ann", "sale")]
    await fleet.pool.execute("UPDATE governor_orders SET ends_at = clock_timestamp() + interval '0.2 s'")

    async def over() -> bool:
        return (await decided(one)).limited_by != "override"

    await eventually(over)
    assert (await fleet.journal(1))[0].read.ceiling_per_s is None


async def orders_override(fleet: Fleet, ceiling_per_s: float) -> None:
    """Lower the ceiling for a minute."""
    from governor import orders  # noqa: PLC0415 - the module's name is a word of this test's

    await orders.override(
        fleet.pool,
        FLEET,
        ceiling_per_s=ceiling_per_s,
        most_per_s=SETTINGS.ceiling_per_s,
        ttl_s=60,
        reason="sale",
        by="ann",
    )


async def test_a_pause_stops_the_fleet_until_it_is_resumed(fleet: Fleet) -> None:
    """Nothing flows, not even the floor; then at half the last good rate, or the start."""
    from governor import orders  # noqa: PLC0415

    one = fleet.controller("one")
    await decided(one)
    await orders.pause(fleet.pool, FLEET, reason="vacuum", by="ann")
    decision = await decided(one)
    assert (decision.allowance_per_s, decision.limited_by) == (0, "paused")
    assert (await fleet.primary().take(10)).granted == 0
    assert (await fleet.row().read()).allowance_per_s == 0  # whom a worker asks that cannot reach Redis
    assert await allowance(fleet) == 0
    await orders.resume(fleet.pool, FLEET)
    decision = await decided(one)
    assert 0 < decision.allowance_per_s <= 100
    assert "resumed" in decision.reason


async def test_who_cannot_read_orders_does_not_lead(fleet: Fleet) -> None:
    """Perhaps the fleet is paused."""
    one = fleet.controller("one")
    await fleet.pool.execute("ALTER TABLE governor_orders RENAME TO elsewhere")
    with pytest.raises(asyncpg.UndefinedTableError):
        await one.tick()
    assert not one.leads
    await fleet.pool.execute("ALTER TABLE elsewhere RENAME TO governor_orders")
    await decided(one)
    assert one.leads


async def test_stopping_probes_ends_with_the_leadership(fleet: Fleet) -> None:
    """A leader that lost its lease loads the database no longer."""
    probes = Probes({"cpu": 0.1})
    one = fleet.controller("one", probes=probes)
    await decided(one)
    await fleet.pool.execute("UPDATE governor_lease SET holder = 'somebody', epoch = epoch + 1")
    await one.tick()
    lease = await leases.read(fleet.pool, FLEET)
    assert lease is not None
    assert (one.leads, probes.running, lease.holder) == (False, False, "somebody")
