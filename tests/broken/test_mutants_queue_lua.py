"""The scripts, each broken in one place: a check that the right one passes finds it out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any, NamedTuple, TypeAlias

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from expiry.wakeups import Again, Wakeups
from governor import bucket_library
from tests.fleet import Counted, settings_for, wakeups_on
from tests.wakes import FROZEN, fill, scores, some

LEASE_S = 2.0


async def a_claim_hides(wakeups: Wakeups, _redis: Redis) -> None:
    """What is claimed is not claimed again before its lease is over, however late it was."""
    await wakeups.enqueue_due(some(3, due_in_s=-60))
    await fill(wakeups)
    assert len((await wakeups.claim(10, skew_ms=0)).ids) == 3
    assert (await wakeups.claim(10, skew_ms=0)).ids == []


async def a_lease_ends(wakeups: Wakeups, _redis: Redis) -> None:
    """What was claimed and never settled comes again, and is known to."""
    await wakeups.enqueue_due(some(3))
    await fill(wakeups)
    counted = Counted()
    claim = await wakeups.claim(10, skew_ms=0)
    again = await wakeups.claim(10, skew_ms=LEASE_S * 1000 + 5)
    assert sorted(again.ids) == sorted(claim.ids)
    assert len(claim.ids) == counted("expiry_leases_expired_total") == 3


async def foreign_jobs_survive(wakeups: Wakeups, redis: Redis) -> None:
    """A foreign job is moved aside once, with its score, and its body does not expire."""
    await redis.zadd(wakeups.queue, {"foreign": 5})
    await redis.set("arq:job:foreign", b"body", px=60_000)
    counted = Counted()
    for _ in range(2):
        assert (await wakeups.claim(10, skew_ms=0)).ids == []
    assert await scores(redis, wakeups.aside) == {b"foreign": 5.0}
    assert await redis.pttl("arq:job:foreign") == -1
    assert counted("expiry_wakeups_unknown_total") == 1
    assert await wakeups.depth() == 0


async def claimed_is_paid_for(wakeups: Wakeups, _redis: Redis) -> None:
    """As many permits as wake-ups: neither more nor fewer."""
    await wakeups.enqueue_due(some(120))
    bucket = await fill(wakeups, allowance_per_s=1000)
    started_s = time.monotonic()
    assert len((await wakeups.claim(240, skew_ms=0)).ids) == 120
    left = (await bucket.read()).permits
    assert 130 <= left <= 131 + 1000 * (time.monotonic() - started_s)


async def no_permit_no_claim(wakeups: Wakeups, redis: Redis) -> None:
    """Beyond the permits nothing is claimed."""
    await wakeups.enqueue_due(some(3))
    await fill(wakeups, allowance_per_s=0.01)
    claim = await wakeups.claim(10, skew_ms=0)
    assert len(claim.ids) == 1
    assert sum(s % 1 == 0.5 for s in (await scores(redis)).values()) == 1


async def clocks_are_corrected(wakeups: Wakeups, _redis: Redis) -> None:
    """A claim goes by the database's clock."""
    await wakeups.enqueue_due(some(1, due_in_s=60))
    await fill(wakeups)
    assert len((await wakeups.claim(10, skew_ms=61_000)).ids) == 1


async def duplicates_keep_their_score(wakeups: Wakeups, redis: Redis) -> None:
    """Enqueuing again does not end a lease."""
    wakes = some(1)
    await wakeups.enqueue_due(wakes)
    await fill(wakeups)
    await wakeups.claim(10, skew_ms=0)
    leased = await scores(redis)
    await wakeups.enqueue_due(wakes)
    assert await scores(redis) == leased


async def old_deadlines_are_enqueued(wakeups: Wakeups, redis: Redis) -> None:
    """25 hours past is no error, and leaves a body."""
    assert (await wakeups.enqueue_due(some(1, due_in_s=-25 * 3600))).queued == 1
    assert len(await redis.keys("arq:job:*")) == 1


async def settled_is_gone(wakeups: Wakeups, redis: Redis) -> None:
    """Done leaves no member and no body, and a late retry does not bring it back."""
    await wakeups.enqueue_due(some(2))
    await fill(wakeups)
    claim = await wakeups.claim(10, skew_ms=0)
    await wakeups.settle(done=claim.ids)
    assert await redis.keys("arq:job:*") == []
    assert await wakeups.depth() == 0
    await wakeups.settle(done=[], again=[Again(claim.ids[0], 1)])
    assert await wakeups.depth() == 0


async def unused_permits_come_back(wakeups: Wakeups, _redis: Redis) -> None:
    """A refund is there to be taken."""
    bucket = await fill(wakeups, allowance_per_s=100)
    assert (await bucket.take(100)).granted >= 25
    await wakeups.settle(done=[], refund=10)
    assert (await bucket.read()).permits >= 10


Check: TypeAlias = Callable[[Wakeups, Redis], Awaitable[None]]


class Mutant(NamedTuple):
    """One place of one script, what stands there instead, and who finds out."""

    script: str
    find: str
    replace: str
    check: Check
    fails_with: type[Exception] = AssertionError


LEASE = "redis.call('ZADD', KEYS[1], 'XX', unpack(moves))"
TAKE = "local granted, wait_us, state = bucket.take(KEYS[2], #ids, ARGV[4], now_us)"
MUTANTS = {
    "claims without a lease": Mutant("claim", LEASE, "", a_claim_hides),
    "leases from the deadline": Mutant("claim", "now_ms + ARGV[2])", "due[2] + ARGV[2])", a_claim_hides),
    "claims by removing": Mutant(
        "claim", LEASE, "for i = 2, #moves, 2 do redis.call('ZREM', KEYS[1], moves[i]) end", a_lease_ends
    ),
    "does not mark leases": Mutant("claim", "'%.0f.5'", "'%.0f'", a_lease_ends),
    "deletes foreign jobs": Mutant(
        "claim", "redis.call('ZADD', KEYS[3], due[i + 1], due[i])", "", foreign_jobs_survive
    ),
    "leaves foreign jobs at the head": Mutant(
        "claim", "redis.call('ZREM', KEYS[1], due[i])", "", foreign_jobs_survive
    ),
    "lets foreign bodies expire": Mutant(
        "claim", "redis.call('PERSIST', 'arq:job:' .. due[i])", "", foreign_jobs_survive
    ),
    "pays for what it wants": Mutant("claim", TAKE, TAKE.replace("#ids", "ARGV[1]"), claimed_is_paid_for),
    "claims for nothing": Mutant(
        "claim",
        TAKE,
        "local granted, wait_us, state = bucket.read(KEYS[2], ARGV[4], now_us)\ngranted = #ids",
        claimed_is_paid_for,
    ),
    "claims beyond its permits": Mutant("claim", TAKE, TAKE + "\ngranted = #ids", no_permit_no_claim),
    "goes by the wrong clock": Mutant("claim", " + ARGV[3]", "", clocks_are_corrected),
    "moves duplicates": Mutant("enqueue", "KEYS[1], 'NX', ", "KEYS[1], ", duplicates_keep_their_score),
    "cannot enqueue the past": Mutant(
        "enqueue",
        "math.max(ARGV[i] - now_ms, 0)",
        "(ARGV[i] - now_ms)",
        old_deadlines_are_enqueued,
        ResponseError,
    ),
    "resurrects": Mutant("settle", "'XX', ", "", settled_is_gone),
    "leaves bodies": Mutant("settle", "redis.call('UNLINK', unpack(bodies))", "", settled_is_gone),
    "keeps unused permits": Mutant(
        "settle",
        "bucket.refund(KEYS[2], tonumber(ARGV[2]), tonumber(ARGV[1]))",
        "",
        unused_permits_come_back,
    ),
}


def break_it(wakeups: Wakeups, mutant: Mutant) -> None:
    """Put the broken script in the place of the right one."""
    text = files("expiry").joinpath(f"wakeups_{mutant.script}.lua").read_text(encoding="utf-8")
    assert text.count(mutant.find) == 1, "the script has changed: so must the mutant"
    broken: Any = wakeups.redis.register_script(bucket_library() + text.replace(mutant.find, mutant.replace))
    assert hasattr(wakeups, f"_{mutant.script}")
    setattr(wakeups, f"_{mutant.script}", broken)


@pytest.mark.parametrize("check", dict.fromkeys(m.check for m in MUTANTS.values()))
async def test_the_right_scripts_pass(redis: Redis, redis_url: str, check: Check) -> None:
    """Each check holds for the scripts as they are."""
    async with wakeups_on(settings_for("postgresql://unused", redis_url, lease_s=LEASE_S), FROZEN) as wakeups:
        await check(wakeups, redis)


@pytest.mark.parametrize("name", MUTANTS)
async def test_a_broken_script_is_found_out(redis: Redis, redis_url: str, name: str) -> None:
    """The same check fails for the script that is broken in one place."""
    mutant = MUTANTS[name]
    async with wakeups_on(settings_for("postgresql://unused", redis_url, lease_s=LEASE_S), FROZEN) as wakeups:
        break_it(wakeups, mutant)
        with pytest.raises(mutant.fails_with):
            await mutant.check(wakeups, redis)
