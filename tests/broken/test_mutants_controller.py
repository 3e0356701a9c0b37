"""The controller, its lease and its fence, each broken in one place: a test that the right one passes finds it out."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest
from redis.asyncio import Redis

from governor import Bucket, Controller, bucket_library, bucket_redis, controller, lease
from tests.governing import Fleet, Pool
from tests.integration import test_controller_faults as faults
from tests.proxy import Proxy, proxy_to


class Mutant(NamedTuple):
    """A change, and the test that must fail with it."""

    change: Callable[[pytest.MonkeyPatch], None]
    caught_by: Callable[[Fleet, Proxy], Awaitable[None]]


def statement(name: str, find: str, put: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Change a statement of the lease."""

    def change(patch: pytest.MonkeyPatch) -> None:
        text = getattr(lease, name)
        assert find in text, "the statement has changed: so must the mutant"
        patch.setattr(lease, name, text.replace(find, put))

    return change


def script(find: str, put: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Change the bucket in Redis."""

    def change(patch: pytest.MonkeyPatch) -> None:
        text = bucket_library()
        assert text.count(find) == 1, "the script has changed: so must the mutant"
        patch.setattr(bucket_redis, "bucket_library", lambda: text.replace(find, put))

    return change


async def _lowered_by_faith(_self: Controller, _bucket: Bucket, _to_per_s: float) -> bool:
    return True


def never_lowers(patch: pytest.MonkeyPatch) -> None:
    """Believe that the row is at the floor."""
    replaced = inspect.signature(Controller._lowered)  # noqa: SLF001 - what is broken
    assert len(replaced.parameters) == len(inspect.signature(_lowered_by_faith).parameters), (
        "so must the mutant"
    )
    patch.setattr(Controller, "_lowered", _lowered_by_faith)


def never_makes_way(patch: pytest.MonkeyPatch) -> None:
    """Keep the lease, whoever else reaches Redis."""
    patch.setattr(controller, "AWAY_MAX", 10**9)


async def paused(fleet: Fleet, _proxy: Proxy) -> None:
    """A publication that comes late, at a bucket that forgot its epochs."""
    await faults.test_a_leader_paused_before_it_publishes_comes_too_late(fleet, emptied=True, successor=False)


async def deposed(fleet: Fleet, _proxy: Proxy) -> None:
    """A publication that comes in time, of a leader that was succeeded."""
    await faults.test_a_deposed_leader_is_fenced_by_its_epoch(fleet)


async def deleted(fleet: Fleet, _proxy: Proxy) -> None:
    """The lease row is gone."""
    await faults.test_a_deleted_lease_row_does_not_reset_the_epoch(fleet)


async def waits(fleet: Fleet, _proxy: Proxy) -> None:
    """Redis is gone for the next leader."""
    await faults.test_a_new_leader_waits_out_what_the_last_one_published(fleet)


async def moves(fleet: Fleet, proxy: Proxy) -> None:
    """Redis goes and comes back."""
    await faults.test_the_row_takes_over_once_the_published_allowance_has_lapsed(fleet, proxy)


async def makes_way(fleet: Fleet, proxy: Proxy) -> None:
    """Redis is gone for the leader alone."""
    await faults.test_who_reaches_redis_leads(fleet, proxy)


MUTANTS = {
    "opens a second bucket": Mutant(
        statement("RENEW", "OR l.home_until <= clock_timestamp())", "OR true)"), waits
    ),
    "comes too late": Mutant(script(" or (by_us > 0 and s.micros > by_us)", ""), paused),
    "has no fence": Mutant(script("if epoch < s.epoch or", "if"), deposed),
    "counts epochs anew": Mutant(
        statement("ACQUIRE", "$3::bigint + 1, clock", "$3::bigint * 0 + 1, clock"), deleted
    ),
    "leaves the row as it is": Mutant(never_lowers, moves),
    "never makes way": Mutant(never_makes_way, makes_way),
}


@pytest.mark.parametrize("name", MUTANTS)
async def test_a_broken_controller_is_found_out(
    pool: Pool, redis: Redis, redis_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test fails for the one that is broken in one place."""
    mutant = MUTANTS[name]
    mutant.change(monkeypatch)
    async with proxy_to(redis_url) as proxy:
        with pytest.raises((AssertionError, BaseExceptionGroup)):
            await mutant.caught_by(Fleet(pool, redis), proxy)
