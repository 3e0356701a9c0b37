"""The loop that governs a fleet: hold the lease, read, step the law, publish, journal.

Every process runs one; the holder of the lease row decides. A leader publishes only within a moment of having
renewed its lease, under the lease's epoch, for a bounded time: one that was paused, cut off or killed cannot
raise anything, and silence ends at the floor. The allowance is at one bucket (its home), never at two.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from governor import journal, lease, telemetry
from governor.bucket import Attempts, Bucket, BucketUnavailable
from governor.flow import Flow, Look, between
from governor.journal import Entry
from governor.law import Decision, Law
from governor.lease import Connection, Lease
from governor.outcomes import Outcomes
from governor.reading import Reading
from governor.readings import Backlog, Readings, Signals
from governor.settings import GovernorSettings, hash_of
from governor.shadow import Shadow

LEASE_INTERVALS = 4
TTL_INTERVALS = 6  # of a published allowance: outlives the lease, so that a new leader finds it in force
DEAD_INTERVALS = 2  # of a fast cut: until a reading lies wholly after it
HISTORY_S_MAX = 3600.0  # an older journal says nothing of today's database
PRUNE_EVERY = 60  # decisions
BASELINE_S = 0.25  # from a first look at a bucket to the first reading
AWAY_MAX = 2  # intervals in a row without the first bucket; then another may reach it
REDIS, POSTGRES = "redis", "postgres"

log = logging.getLogger(__name__)


class Controller:
    """A candidate for the lease of one fleet, and its leader while it holds it.

    `primary` is the bucket in Redis, None without one; `row` the one in PostgreSQL that stands in for it.
    """

    def __init__(  # noqa: PLR0913 - the composition of a loop
        self,
        connection: Connection,
        *,
        name: str,
        holder: str | None = None,
        row: Bucket,
        primary: Bucket | None = None,
        backlog: Callable[[], Awaitable[Backlog]],
        settings: GovernorSettings,
        outcomes: Outcomes | None = None,
        probes: Signals | None = None,
        settings_hash: str | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Govern the fleet `name` as `holder`, which must differ between processes; left out: host and process.

        settings_hash is of all that should be equal in them; of the settings, if left out.
        Raises: ValueError for a shadow that is no law.
        """
        self.name = name
        self.holder = holder or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self.home = POSTGRES if primary is None else REDIS
        self.leads = False
        self.epoch = 0
        self._connection = connection
        self._buckets = {POSTGRES: row} if primary is None else {REDIS: primary, POSTGRES: row}
        self._settings = settings
        self._law_hash = hash_of(settings.law)
        self._hash = settings_hash or settings.hash
        self._outcomes = outcomes or Outcomes()
        self._clock_s = clock_s
        self._interval_s = settings.interval_s
        self._readings = Readings(connection, name, backlog, probes, timeout_s=settings.interval_s)
        self._law = Law(settings.law)
        self._shadow = None if settings.shadow is None else Shadow(settings.shadow, settings.law)
        self._before: Look | None = None  # at the home, when the interval began
        self._published_per_s: float | None = None  # in force after the last publication
        self._decided_per_s: float | None = None
        self._epoch_seen = 0
        self._lease_ends_s = -math.inf
        self._resumed = False
        self._reached = False  # the first bucket, while leading
        self._away = 0  # intervals in a row without it
        self._stands_back_until_s = -math.inf
        self._decisions = 0
        telemetry.SETTINGS.labels(self._hash).set(1)
        telemetry.FLOOR.set(settings.floor_per_s)

    async def run(self, stop: asyncio.Event) -> None:
        """Tick every interval until asked to stop, then let another lead at once."""
        try:
            while not stop.is_set():
                began_s = self._clock_s()
                wait_s = await self._safely() - (self._clock_s() - began_s)
                try:
                    async with asyncio.timeout(max(wait_s, 0)):
                        await stop.wait()
                except TimeoutError:
                    continue
        finally:
            await self.close()

    async def close(self) -> None:
        """Give the lease back and close the probes; a second call does nothing."""
        if self.leads:
            await self._give_up("stops")

    async def tick(self) -> Decision | None:
        """Do one interval's work; returns the decision, None where this process made none.

        Raises what the database's driver raises; nothing was published then.
        """
        home = self.home
        look = await self._look(home)
        leads = self.leads or await self._campaign(reached=look is not None)
        if self.home != home:  # looks at two buckets make no interval
            look = await self._look(self.home)
        if not leads:
            self._before = look or self._before
            return None
        flow = self._flow(look)
        if self._resumed and self._before is None and look is not None:
            self._before = look  # a reading needs two looks
            return None
        self._before = look or self._before  # after a look that failed, the next interval is twice as long
        return await self._decide(look, flow)

    async def _safely(self) -> float:
        """Tick, whatever happens; returns when to tick next, s from the beginning of this one."""
        try:
            decision = await self.tick()
        except Exception as error:  # noqa: BLE001 - the edge of the loop: noted, then tried again
            telemetry.FAILURES.labels("lease").inc()
            log.warning("governor did not decide: %r", error)
            if self.leads and self._clock_s() >= self._lease_ends_s:
                await self._retire("could not renew its lease")
            return self._interval_s
        first = self.leads and self._resumed and decision is None
        return min(BASELINE_S, self._interval_s) if first else self._interval_s

    # --- one decision, in the order it happens

    async def _decide(self, look: Look | None, flow: Flow) -> Decision | None:
        reading, notes = await self._readings.read(flow, at_s=self._clock_s(), resumed=self._resumed)
        snapshot = self._law.snapshot()
        decision = self._law.step(reading)
        shadow = self._step_shadow(reading)
        self._resumed = False
        if self._away >= AWAY_MAX and self._reached:
            # Perhaps it is this process that is cut off: who reaches the first bucket leads better.
            self._stands_back_until_s = self._clock_s() + LEASE_INTERVALS * self._interval_s
            await self._give_up("does not reach its bucket")
            return None
        if not await self._renew_and_publish(look, decision):
            return None
        telemetry.show(
            reading, decision, before_per_s=self._decided_per_s, ceiling_per_s=self._settings.ceiling_per_s
        )
        self._decided_per_s = decision.allowance_per_s
        await self._journal(
            Entry(
                holder=self.holder,
                epoch=self.epoch,
                mode=self._settings.mode,
                settings_hash=self._law_hash,
                reading=journal.as_reading(reading),
                snapshot=snapshot,
                decision=journal.as_decision(decision),
                shadow=shadow,
                orders=self._readings.in_force.as_list(),
                notes=notes,
            )
        )
        return decision

    async def _renew_and_publish(self, look: Look | None, decision: Decision) -> bool:
        """Renew the lease, then publish where it says; tells whether this process still leads."""
        wanted, left = await self._wanted(look)
        asked_s = self._clock_s()
        async with asyncio.timeout(self._interval_s):
            held = await lease.renew(
                self._connection,
                self.name,
                holder=self.holder,
                epoch=self.epoch,
                epoch_seen=self._epoch_seen,
                lease_s=LEASE_INTERVALS * self._interval_s,
                home=wanted,
                home_s=self._counts_s,
                home_left=left,
                settings_hash=self._hash,
            )
        if held is None:
            await self._retire("lost its lease")
            return False
        self._hold(held, asked_s)
        if held.home != self.home:
            self.home = held.home
            look = self._before = await self._look(self.home)
            self._published_per_s = None
        if self._enforces and held.home == wanted and look is not None:
            await self._publish(look, decision, asked_s)
        if self._enforces and decision.limited_by == "paused":
            await self._hush()
        return True

    async def _publish(self, look: Look, decision: Decision, renewed_s: float) -> None:
        """Publish, at the latest one interval after the lease was renewed, by the bucket's own clock."""
        window_s = renewed_s + self._interval_s - look.at_s
        try:
            done = await self._buckets[self.home].publish(
                allowance_per_s=decision.allowance_per_s,
                ttl_s=TTL_INTERVALS * self._interval_s,
                epoch=self.epoch,
                by_us=max(1, look.state.micros + round(window_s * 1_000_000)),
            )
        except BucketUnavailable as error:
            telemetry.FAILURES.labels("publish").inc()
            log.warning("governor cannot publish in %s: %r", self.home, error.__cause__)
            return
        self._epoch_seen = max(self._epoch_seen, done.epoch)
        if done.accepted:
            self._published_per_s = done.allowance_per_s
        else:
            telemetry.FAILURES.labels("publish").inc()
            log.warning("governor was refused: epoch %d, the bucket's is %d", self.epoch, done.epoch)

    # --- the bucket

    async def _look(self, home: str) -> Look | None:
        """Report this process's attempts to the bucket, and see what is there; None if it is away."""
        unreported = self._outcomes.drain()
        try:
            totals = await self._buckets[home].report(unreported)
            unreported = Attempts()
            state = await self._buckets[home].read()
        except BucketUnavailable as error:
            self._outcomes.put_back(unreported)
            self._away += home == REDIS
            telemetry.FAILURES.labels("bucket").inc()
            log.warning("governor cannot reach its bucket in %s: %r", home, error.__cause__)
            return None
        if home == REDIS:
            self._reached, self._away = True, 0
        self._epoch_seen = max(self._epoch_seen, state.epoch)
        telemetry.IN_FORCE.set(state.allowance_per_s)
        return Look(state=state, attempts=totals, at_s=self._clock_s())

    def _flow(self, look: Look | None) -> Flow:
        return between(
            self._before,
            look,
            ttl_us=round(TTL_INTERVALS * self._interval_s * 1_000_000),
            dead_us=round(DEAD_INTERVALS * self._interval_s * 1_000_000),
            published_per_s=self._published_per_s,
        )

    async def _wanted(self, look: Look | None) -> tuple[str, bool]:
        """Return where the allowance should be, and whether it is known to be gone from where it is."""
        if REDIS not in self._buckets or not self._enforces:
            return self.home, False
        if self.home == REDIS:
            return (POSTGRES if look is None else REDIS), False
        if await self._look(REDIS) is None:
            return POSTGRES, False
        # The row comes down to the floor before the other bucket gets the allowance.
        return REDIS, await self._lowered(self._buckets[POSTGRES], self._settings.floor_per_s)

    async def _hush(self) -> None:
        """Let nothing flow from the buckets where the allowance is not: who cannot reach the one asks another."""
        for home, bucket in self._buckets.items():
            if home != self.home:
                await self._lowered(bucket, 0.0)

    async def _lowered(self, bucket: Bucket, to_per_s: float) -> bool:
        """Lower a bucket, which needs no fence but the epoch; tells whether it is done."""
        try:
            done = await bucket.publish(
                allowance_per_s=to_per_s, ttl_s=TTL_INTERVALS * self._interval_s, epoch=self.epoch
            )
        except BucketUnavailable:
            return False
        return done.accepted

    # --- the lease

    async def _campaign(self, *, reached: bool) -> bool:
        """Lead if nobody does. Who does not reach the bucket lets others try first."""
        async with asyncio.timeout(self._interval_s):
            found = await lease.read(self._connection, self.name)
        if found is not None:
            telemetry.EPOCH.set(found.epoch)
            telemetry.DIFFERS.set(found.settings_hash not in ("", self._hash))
            self._follow(found)
        if (found is not None and found.left_s > 0) or self._clock_s() < self._stands_back_until_s:
            return False
        asked_s = self._clock_s()
        async with asyncio.timeout(self._interval_s):
            last = await journal.last(self._connection, self.name)
            await self._readings.begin()
            won = await lease.acquire(
                self._connection,
                self.name,
                holder=self.holder,
                epoch_seen=max(self._epoch_seen, 0 if last is None else last[0].epoch),
                lease_s=LEASE_INTERVALS * self._interval_s,
                home=self.home,
                home_s=self._counts_s,
                free_s=0 if reached else 2 * self._interval_s,
            )
        if won is None:
            return False
        self.leads, self._resumed, self._reached = True, True, reached and self.home == REDIS
        self._published_per_s = self._decided_per_s = None
        self._law = self._restored(last)
        self._follow(won)
        self._hold(won, asked_s)
        log.info("governor leads %s under epoch %d", self.name, won.epoch)
        await self._readings.start()
        return True

    def _restored(self, last: tuple[Entry, float] | None) -> Law:
        """Return the law as the last leader left it, if that is not long ago and it had these settings."""
        law = Law(self._settings.law)
        if last is None or last[1] > HISTORY_S_MAX or last[0].settings_hash != self._law_hash:
            return law
        try:
            law = Law.restore(self._settings.law, last[0].snapshot)
            law.step(last[0].read)
            law = Law.restore(self._settings.law, _elsewhere(law.snapshot(), last[1]))
        except (TypeError, ValueError) as error:
            telemetry.FAILURES.labels("restore").inc()
            log.warning("governor begins without history: %r", error)
            return Law(self._settings.law)
        return law

    def _hold(self, held: Lease, asked_s: float) -> None:
        self.epoch, self._lease_ends_s = held.epoch, asked_s + LEASE_INTERVALS * self._interval_s
        telemetry.LEADER.set(1)
        telemetry.EPOCH.set(held.epoch)

    def _follow(self, found: Lease) -> None:
        """Look where the allowance is, as far as this process can."""
        home = found.home if found.home in self._buckets else POSTGRES
        if home != self.home:
            self.home, self._before = home, None

    async def _give_up(self, why: str) -> None:
        epoch = self.epoch
        await self._retire(why)
        try:
            async with asyncio.timeout(self._interval_s):
                await lease.release(self._connection, self.name, holder=self.holder, epoch=epoch)
        except Exception as error:  # noqa: BLE001 - the lease ends by itself
            log.warning("governor leaves its lease to end by itself: %r", error)

    async def _retire(self, why: str) -> None:
        self.leads = self._resumed = self._reached = False
        self._before = None
        telemetry.retire()
        log.warning("governor leads %s no longer: it %s", self.name, why)
        await self._readings.close()

    # --- what is kept

    async def _journal(self, entry: Entry) -> None:
        """Keep the decision; one that is lost costs history, nothing else."""
        self._decisions += 1
        try:
            async with asyncio.timeout(self._interval_s):
                await journal.write(self._connection, self.name, entry)
                if self._decisions % PRUNE_EVERY == 1:
                    await journal.prune(
                        self._connection,
                        rows_max=self._settings.journal_rows_max,
                        age_s_max=self._settings.journal_age_s_max,
                    )
        except Exception as error:  # noqa: BLE001 - the decision was published
            telemetry.FAILURES.labels("journal").inc()
            log.warning("governor's decision is not in the journal: %r", error)

    def _step_shadow(self, reading: Reading) -> dict[str, Any] | None:
        if self._shadow is None:
            return None
        try:
            decided = self._shadow.step(reading)
            json.dumps(decided, allow_nan=False)  # or the whole row would not be JSON
        except Exception as error:  # noqa: BLE001 - a candidate may be anybody's
            telemetry.FAILURES.labels("shadow").inc()
            log.warning("governor's shadow failed: %r", error)
            return None
        return decided

    @property
    def _enforces(self) -> bool:
        return self._settings.mode == "enforce"

    @property
    def _counts_s(self) -> float:
        """How long after a renewal a publication that follows it may still count, s."""
        return (1 + TTL_INTERVALS) * self._interval_s


def _elsewhere(snapshot: dict[str, Any], age_s: float) -> dict[str, Any]:
    """Return a law's memory for a leader whose clock began elsewhere: it has aged by the database's clock."""
    state = snapshot["state"]
    aged = {name: state[name] + age_s for name in ("good_age_s", "bad_age_s")}
    return {**snapshot, "state": {**state, **aged, "at_s": None}}
