"""A database as a processor-sharing server, with foreground load that is not ours.

Fluid, in fixed steps: what is offered beyond the capacity waits as backlog; below it the number in the
system is the stationary one of c servers,

    N(rho) = c rho + rho^sqrt(2 (c + 1)) / (1 - rho)

(Sakasegawa 1977, "An approximation formula Lq = a rho^b / (1 - rho)"), and every job takes N / (c rho) times
its work (Little's law; processor sharing stretches all jobs alike). Jobs that wait longer than their
timeout are given up, at the rate that exponential response times imply; the foreground then tries again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_RHO_MOST = 0.97  # the stationary queue beyond this takes longer to build than it is ever stationary


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSpec:
    """Sizes of the database and of what it is asked; scenarios/common.toml says why these."""

    cores: float
    foreground_per_s: float  # requests/s before retries
    foreground_work_s: float  # work of one, s of one core
    foreground_timeout_s: float
    retry_ratio: float  # share of timed-out requests that come again
    retry_after_s: float
    transition_work_s: float
    transition_timeout_s: float
    target_utilisation: float  # of the cores: where the operator set the target of active_backends
    commit_s: float  # commit latency of the canary on an idle database
    commit_io_ratio: float  # share of it that is the disk's, the rest stretches with the cores
    commit_target: float  # target of commit_latency, x commit_s
    commit_timeout_s: float  # the canary gives up, and reads this
    lock_waiters_target: float


def in_system(cores: float, utilisation: float) -> float:
    """Return the stationary mean number of jobs in the system (running and waiting)."""
    rho = min(utilisation, _RHO_MOST)
    return cores * rho + math.pow(rho, math.sqrt(2 * (cores + 1))) / (1 - rho)


@dataclass(slots=True)
class Conditions:
    """What befalls the database at one instant."""

    speed: float = 1.0  # of every core
    foreground: float = 1.0  # x foreground_per_s
    disk: float = 1.0  # x the disk's share of a commit
    lock_wait_s: float = 0.0  # wait of every statement per 1,000 transitions/s: a storm of lock waits


@dataclass(slots=True)
class Served:
    """What one step did, in jobs; the rest of the step's figures are the database's attributes."""

    completed: float = 0.0
    timed_out: float = 0.0


class Database:
    """The state of the server between steps."""

    def __init__(self, spec: DatabaseSpec) -> None:
        """Begin idle."""
        self.spec = spec
        self.foreground_backlog_s = 0.0  # work offered and not yet served
        self.transition_backlog_s = 0.0
        self.retries = 0.0  # timed-out requests that will come again
        self.in_flight = 0.0  # transitions in the system
        self.foreground_latency_s = spec.foreground_work_s
        self.foreground_completed = 0.0
        self.active_backends = 0.0  # the three probes, value / target
        self.commit_latency = 0.0
        self.lock_waits = 0.0
        self._active_target = in_system(spec.cores, spec.target_utilisation)

    @property
    def saturation(self) -> float:
        """The true worst saturation, which no probe of the bench reads without noise."""
        return max(self.active_backends, self.commit_latency, self.lock_waits)

    def step(self, *, dt_s: float, started: float, now: Conditions) -> Served:
        """Serve dt_s, with so many transitions started in it."""
        spec = self.spec
        again = min(self.retries, self.retries * dt_s / spec.retry_after_s)
        self.retries -= again
        requests = spec.foreground_per_s * now.foreground * dt_s + again
        foreground_s = self.foreground_backlog_s + requests * spec.foreground_work_s
        transition_s = self.transition_backlog_s + started * spec.transition_work_s
        capacity_s = spec.cores * now.speed * dt_s
        offered_s = foreground_s + transition_s
        share = min(1.0, capacity_s / offered_s) if offered_s else 1.0
        self.foreground_backlog_s = foreground_s * (1 - share)
        self.transition_backlog_s = transition_s * (1 - share)
        utilisation = min(1.0, offered_s / capacity_s)
        stationary = in_system(spec.cores, utilisation)
        waiting = self.foreground_backlog_s / spec.foreground_work_s
        waiting += self.transition_backlog_s / spec.transition_work_s
        # Of the served jobs' time: stationary stretch, and the time until the backlog is worked off.
        stretch = stationary / (spec.cores * max(min(utilisation, _RHO_MOST), 1e-9)) / now.speed
        queued_s = (self.foreground_backlog_s + self.transition_backlog_s) / (spec.cores * now.speed)
        lock_s = now.lock_wait_s * started / dt_s / 1000
        self.foreground_latency_s = spec.foreground_work_s * stretch + queued_s + lock_s
        transition_latency_s = spec.transition_work_s * stretch + queued_s + lock_s
        served = Served(completed=transition_s * share / spec.transition_work_s)
        self.foreground_completed = foreground_s * share / spec.foreground_work_s
        self._give_up(dt_s, transition_latency_s, served)
        jobs_per_s = (requests + started) / dt_s
        locked = jobs_per_s * lock_s
        self.in_flight = started / dt_s * min(transition_latency_s, 1.0)
        self.in_flight += self.transition_backlog_s / spec.transition_work_s
        self.active_backends = (stationary + waiting + locked) / self._active_target
        commit = spec.commit_io_ratio * now.disk + (1 - spec.commit_io_ratio) * stretch
        commit_s = min(spec.commit_s * commit + queued_s * (1 - spec.commit_io_ratio), spec.commit_timeout_s)
        self.commit_latency = commit_s / (spec.commit_target * spec.commit_s)
        self.lock_waits = locked / spec.lock_waiters_target
        return served

    def _give_up(self, dt_s: float, transition_latency_s: float, served: Served) -> None:
        spec = self.spec
        if self.foreground_backlog_s:
            hazard = math.exp(-spec.foreground_timeout_s / self.foreground_latency_s)
            gone_s = self.foreground_backlog_s * min(1.0, hazard * dt_s / spec.foreground_timeout_s)
            self.foreground_backlog_s -= gone_s
            self.retries += gone_s / spec.foreground_work_s * spec.retry_ratio
        if self.transition_backlog_s:
            hazard = math.exp(-spec.transition_timeout_s / transition_latency_s)
            gone_s = self.transition_backlog_s * min(1.0, hazard * dt_s / spec.transition_timeout_s)
            self.transition_backlog_s -= gone_s
            served.timed_out = gone_s / spec.transition_work_s

    def stationary_saturation(self, transitions_per_s: float, now: Conditions, horizon_s: float) -> float:
        """Return the worst saturation that a constant rate leads to, the backlog worked off within horizon_s."""
        spec = self.spec
        requests_per_s = spec.foreground_per_s * now.foreground + self.retries / spec.retry_after_s
        offered = requests_per_s * spec.foreground_work_s + transitions_per_s * spec.transition_work_s
        offered += (self.foreground_backlog_s + self.transition_backlog_s) / horizon_s
        utilisation = offered / (spec.cores * now.speed)
        if utilisation >= 1:
            return math.inf
        stationary = in_system(spec.cores, utilisation)
        stretch = stationary / (spec.cores * max(min(utilisation, _RHO_MOST), 1e-9)) / now.speed
        locked = (requests_per_s + transitions_per_s) * now.lock_wait_s * transitions_per_s / 1000
        commit = spec.commit_io_ratio * now.disk + (1 - spec.commit_io_ratio) * stretch
        return max(
            (stationary + locked) / self._active_target,
            commit / spec.commit_target,
            locked / spec.lock_waiters_target,
        )
