"""Why is the rate what it is? Answered in one sentence with its numbers, from what the leader wrote down."""

from __future__ import annotations

from dataclasses import dataclass

from governor import journal, lease, orders
from governor.controller import LEASE_INTERVALS, TTL_INTERVALS
from governor.journal import Entry
from governor.lease import Connection, Lease
from governor.orders import Order, Orders
from governor.settings import GovernorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A fleet's governor as of now."""

    settings: GovernorSettings  # of this process
    lease: Lease | None
    orders: Orders
    last: Entry | None  # the last decision
    age_s: float | None  # of it

    @property
    def led(self) -> bool:
        """Whether somebody leads."""
        return self.lease is not None and self.lease.left_s > 0

    @property
    def enforced(self) -> bool:
        """Whether decisions and orders count."""
        return self.settings.mode == "enforce"

    @property
    def lapsed(self) -> bool:
        """Whether what was published has lapsed, so that the floor flows."""
        counts_s = TTL_INTERVALS * self.settings.interval_s
        return self.age_s is None or (not self.led and self.age_s > counts_s)

    @property
    def allowance_per_s(self) -> float:
        """What the leader allows, the floor where that has lapsed, the ceiling where it is fixed."""
        if not self.enforced:
            return self.settings.ceiling_per_s
        if self.last is None or self.lapsed:
            return self.settings.floor_per_s
        return self.last.decided.allowance_per_s

    @property
    def limited_by(self) -> str:
        """What limits it; `ceiling` where it is fixed, `floor` where nobody leads."""
        if not self.enforced:
            return "ceiling"
        return "floor" if self.last is None or self.lapsed else self.last.decided.limited_by

    @property
    def ceiling_per_s(self) -> float:
        """The ceiling, after an override."""
        override = self.orders.ceiling_per_s if self.enforced else None
        ceiling = self.settings.ceiling_per_s
        return ceiling if override is None else min(ceiling, override)


async def read(connection: Connection, name: str, settings: GovernorSettings) -> Status:
    """Return the status of a fleet, read with three short statements."""
    found = await journal.last(connection, name)
    return Status(
        settings=settings,
        lease=await lease.read(connection, name),
        orders=await orders.read(connection, name),
        last=None if found is None else found[0],
        age_s=None if found is None else found[1],
    )


def sentence(status: Status) -> str:
    """Answer it."""
    rate, settings = f"{status.allowance_per_s:g}/s", status.settings
    if settings.mode == "off":
        return f"{rate}: the governor is off, so the allowance is fixed at GOVERNOR_CEILING_PER_S."
    if settings.mode == "observe":
        would = "it has not decided yet" if status.last is None else f"it would say: {_decided(status)}"
        return f"{rate}: the governor only observes, so the allowance is fixed at GOVERNOR_CEILING_PER_S; {would}."
    if status.last is None or status.lapsed:
        since = (
            "nobody has led yet" if status.age_s is None else f"nobody has decided for {status.age_s:.0f} s"
        )
        return f"{rate}, the floor: {since}; start a worker, or see why none gets the lease."
    return "; ".join([f"{rate}, {_decided(status)}", *_said(status)]) + "."


def _decided(status: Status) -> str:
    if status.last is None:
        return "nothing"
    decision = status.last.decided
    ago = f"{status.age_s or 0:.0f} s ago by {status.last.holder}"
    return f"limited by {decision.limited_by}: {decision.reason} (decided {ago})"


def _said(status: Status) -> list[str]:
    said = [_order(each) for each in (status.orders.pause, status.orders.override) if each is not None]
    if not status.led:
        left_s = TTL_INTERVALS * status.settings.interval_s - (status.age_s or 0)
        said.append(f"nobody leads, the floor follows in {max(0, left_s):.0f} s")
    lease_s = LEASE_INTERVALS * status.settings.interval_s
    if status.led and (status.age_s or 0) > lease_s:
        said.append(f"the leader has not decided for {status.age_s:.0f} s")
    return said


def _order(order: Order) -> str:
    what = "paused" if order.ceiling_per_s is None else f"ceiling lowered to {order.ceiling_per_s:g}/s"
    until = "" if order.ends_at is None else f" until {order.ends_at:%H:%M:%S} UTC"
    return f"{what} by {order.ordered_by} since {order.ordered_at:%H:%M:%S} UTC{until} ({order.reason})"
