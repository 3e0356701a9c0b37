"""Worker, sweep and promoter, each broken in one place: a check that the right one passes finds it out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest
from redis.asyncio import Redis

from expiry import sweep, wakeups, worker
from expiry.expire import NOT_STARTED
from expiry.promoter import Promoter
from expiry.settings import Settings
from expiry.wakeups import Again, Claim, Wakeups
from expiry.worker import GovernedWorker
from governor import GovernorSettings
from tests.crash import crash_everywhere
from tests.fleet import (
    BACKDATE,
    Pool,
    assert_kept,
    due,
    due_in,
    expired,
    overdue,
    placed,
    settings_for,
    states,
    sweep_of,
    wakeups_on,
    working,
)
from tests.helpers import eventually
from tests.proxy import Cut, proxy_to
from tests.wakes import scores


@dataclass
class Stage:
    """What a check plays on, and what plays: right or broken."""

    pool: Pool
    redis: Redis
    settings: Settings
    kind: type[GovernedWorker] = GovernedWorker
    wakeups: type[Wakeups] = Wakeups
    promoter: type[Promoter] = Promoter
    within_s: float = 5  # what the right one may take on a busy machine; the broken one never gets there


@pytest.fixture
def stage(pool: Pool, redis: Redis, database_url: str, redis_url: str) -> Stage:
    """Give a stage where everything is right."""
    return Stage(pool, redis, settings_for(database_url, redis_url, horizon_s=70))


Check: TypeAlias = Callable[[Stage], Awaitable[None]]
Break: TypeAlias = Callable[[Stage, pytest.MonkeyPatch], None]


# --- checks, and what breaks them


async def crashes_lose_nothing(stage: Stage) -> None:
    """A crash at any request loses no hold."""
    await crash_everywhere(stage.pool, stage.redis, stage.settings, Cut.BEFORE, stage.kind)


def acknowledges_first(stage: Stage, _patch: pytest.MonkeyPatch) -> None:
    """Settle before the commit."""

    class Broken(GovernedWorker):
        async def _finish(self, batch: Any) -> None:  # noqa: ANN401 - private to the worker
            await self._wakeups.settle(done=batch.claim.ids)
            await super()._finish(batch)

    assert "_finish" in vars(GovernedWorker)
    stage.kind = Broken


async def a_failed_statement_is_repeated(stage: Stage) -> None:
    """A statement that never reached the database is tried again, long before the lease is over."""
    holds = await overdue(stage.pool, 3)
    async with (
        wakeups_on(stage.settings) as wakes,
        proxy_to(stage.settings.database_url.get_secret_value()) as proxy,
    ):
        await wakes.enqueue(holds)
        async with asyncpg.create_pool(proxy.url, min_size=1) as cut_off:
            proxy.cut_at(b"expiry_expire(", Cut.BEFORE)
            async with working(cut_off, stage.settings, kind=stage.kind):
                await eventually(expired(stage.pool, 3), within_s=stage.within_s)
    assert proxy.cuts == 1


def gives_up_on_failure(stage: Stage, _patch: pytest.MonkeyPatch) -> None:
    """Settle a batch whose statement failed, as stock arq does with a job that raises."""

    class Broken(GovernedWorker):
        async def _come_again(self, claim: Claim, wait_ms: float, reason: str) -> None:  # noqa: ARG002
            await self._wakeups.settle(done=claim.ids)

    assert "_come_again" in vars(GovernedWorker)
    stage.kind = Broken


async def nothing_is_claimed_early(stage: Stage) -> None:
    """What is claimed is due to the microsecond: the row never has to refuse it."""
    holds = await placed(stage.pool, 100, ttl_s=60)
    now: datetime = await stage.pool.fetchval("SELECT date_trunc('milliseconds', clock_timestamp())")
    at = [now + timedelta(milliseconds=300 + 3 * i, microseconds=999) for i in range(100)]
    await stage.pool.execute(BACKDATE, [h.id for h in holds], at)
    deadlines = {h.id: t.timestamp() * 1000 for h, t in zip(holds, at, strict=True)}
    seen = 0
    async with wakeups_on(stage.settings) as wakes:
        await wakes.enqueue_due([(w, t) for (w, _), t in zip(due(holds), at, strict=True)])
        while seen < 100:
            claim = await wakes.claim(100, skew_ms=0)
            seen += len(claim.wakes)
            for wake in claim.wakes:
                assert claim.now_ms >= deadlines[wake.hold_id] - 0.0005  # what a float makes of it


def rounds_scores_down(_stage: Stage, patch: pytest.MonkeyPatch) -> None:
    """Score with the whole millisecond before the deadline."""
    right = wakeups.score_ms

    def broken(expires_at: datetime) -> int:
        return right(expires_at - timedelta(microseconds=999))

    patch.setattr(wakeups, "score_ms", broken)


async def the_rate_is_kept(stage: Stage) -> None:
    """So many holds take so long at this allowance."""
    slow = GovernorSettings(floor_per_s=100, ceiling_per_s=100)
    holds = await overdue(stage.pool, 150)
    async with wakeups_on(stage.settings, slow) as wakes:
        await wakes.enqueue(holds)
    started_s = time.monotonic()
    async with working(stage.pool, stage.settings, governor=slow, wakeups=stage.wakeups):
        await eventually(expired(stage.pool, 150))
    assert time.monotonic() - started_s > (150 - 25) / 100 - 0.1


def refunds_everything(stage: Stage, _patch: pytest.MonkeyPatch) -> None:
    """Give back the permits of holds that expired."""

    class Broken(Wakeups):
        async def settle(
            self, *, done: Sequence[bytes], again: Sequence[Again] = (), refund: int = 0
        ) -> None:
            await super().settle(done=done, again=again, refund=refund + len(done))

    stage.wakeups = Broken


def refunds_the_expired(_stage: Stage, patch: pytest.MonkeyPatch) -> None:
    """Take an expiry for something that did not start."""
    patch.setattr(worker, "NOT_STARTED", NOT_STARTED | {"expired"})


async def what_cannot_end_now_comes_again(stage: Stage) -> None:
    """An early and a contended one stay in the queue, and end without any sweep."""
    [locked] = await overdue(stage.pool, 1)
    early = await due_in(stage.pool, 0.6)
    async with wakeups_on(stage.settings) as wakes, stage.pool.acquire() as conn:
        await wakes.enqueue_due([(w, locked.expires_at) for w, _ in due([locked, early])])
        async with working(stage.pool, stage.settings):
            async with conn.transaction():
                await conn.execute("SELECT FROM holds WHERE id = $1 FOR UPDATE", locked.id)
                await eventually(expired(stage.pool, 1), within_s=0.6 + stage.within_s)
            await eventually(expired(stage.pool, 2), within_s=stage.within_s)
    await assert_kept(stage.pool)


def forgets(kind: str) -> Break:
    """Return what settles this outcome as if it were the end."""

    def break_it(_stage: Stage, patch: pytest.MonkeyPatch) -> None:
        right = worker._wait_ms  # noqa: SLF001 - the mutant's place
        patch.setattr(worker, "_wait_ms", lambda outcome: None if outcome.kind == kind else right(outcome))

    return break_it


async def a_pass_goes_past_what_it_cannot_end(stage: Stage) -> None:
    """A pass ends, though its oldest rows are locked, and takes what lies behind them."""
    holds = await overdue(stage.pool, 15)
    small = stage.settings.model_copy(update={"batch_max": 5})
    async with stage.pool.acquire() as conn, conn.transaction():
        await conn.execute("SELECT FROM holds WHERE id = ANY ($1) FOR UPDATE", [h.id for h in holds[:5]])
        async with asyncio.timeout(stage.within_s):
            tally = await sweep_of(stage.pool, small).one_pass()
    assert tally == {"contended": 5, "expired": 10}


def starts_at_the_head_each_time(_stage: Stage, patch: pytest.MonkeyPatch) -> None:
    """Ignore the cursor."""
    keyset = "(h.expires_at, h.id) > ($2, $3)"
    assert sweep.DUE_PAGE.count(keyset) == 1
    patch.setattr(
        sweep, "DUE_PAGE", sweep.DUE_PAGE.replace(keyset, "num_nonnulls($2::timestamptz, $3::uuid) = 2")
    )


async def sweeps_pay(stage: Stage) -> None:
    """A sweep without permits ends nothing."""
    await overdue(stage.pool, 5)
    nothing = GovernorSettings(floor_per_s=0.001, ceiling_per_s=0.001)
    one = sweep_of(stage.pool, stage.settings, governor=nothing)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.6):
            await one.one_pass()
    assert await states(stage.pool) == {"held": 5}


def takes_no_permits(_stage: Stage, patch: pytest.MonkeyPatch) -> None:
    """Start whatever is there."""

    async def take(_self: object, want: int, *, timeout_s: float) -> int:  # noqa: ARG001
        return want

    patch.setattr("expiry.permits.Permits.take", take)


async def slices_leave_no_gap(stage: Stage) -> None:
    """Two slices, one after the other, bring every deadline around the end of the first."""
    holds = await placed(stage.pool, 2000, ttl_s=100)
    start: datetime = await stage.pool.fetchval("SELECT clock_timestamp()") + timedelta(seconds=69.98)
    at = [start + timedelta(milliseconds=i) for i in range(2000)]
    await stage.pool.execute(BACKDATE, [h.id for h in holds], at)
    async with wakeups_on(stage.settings) as wakes:
        for horizon_s in (70, 72):  # beyond what is compared and mended
            await stage.redis.delete(f"{wakes.queue}:turn")
            horizon = stage.settings.model_copy(update={"horizon_s": horizon_s})
            await stage.promoter(stage.pool, wakes, horizon).tick()
    assert len(await scores(stage.redis)) == 2000


def remembers_too_much(stage: Stage, _patch: pytest.MonkeyPatch) -> None:
    """Note that the slice came further than it did."""

    class Broken(Promoter):
        async def _remember(self, until: datetime, run_id: str) -> None:
            await super()._remember(until + timedelta(milliseconds=3), run_id)

    assert "_remember" in vars(Promoter)
    stage.promoter = Broken


MUTANTS: dict[str, tuple[Break, Check]] = {
    "acknowledges before the commit": (acknowledges_first, crashes_lose_nothing),
    "gives up when a statement fails": (gives_up_on_failure, a_failed_statement_is_repeated),
    "rounds scores down": (rounds_scores_down, nothing_is_claimed_early),
    "refunds everything it settles": (refunds_everything, the_rate_is_kept),
    "refunds what expired": (refunds_the_expired, the_rate_is_kept),
    "forgets what is early": (forgets("early"), what_cannot_end_now_comes_again),
    "forgets what is contended": (forgets("contended"), what_cannot_end_now_comes_again),
    "sweeps from the head each time": (starts_at_the_head_each_time, a_pass_goes_past_what_it_cannot_end),
    "sweeps without permits": (takes_no_permits, sweeps_pay),
    "remembers a slice as longer than it was": (remembers_too_much, slices_leave_no_gap),
}


@pytest.mark.parametrize("check", dict.fromkeys(check for _, check in MUTANTS.values()))
async def test_the_right_ones_pass(stage: Stage, check: Check) -> None:
    """Each check holds for the code as it is."""
    await check(stage)


@pytest.mark.parametrize("name", MUTANTS)
async def test_a_broken_one_is_found_out(stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails for the code that is broken in one place."""
    break_it, check = MUTANTS[name]
    break_it(stage, monkeypatch)
    stage.within_s = 1
    with pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception)):
        await check(stage)
