"""/v1/governor: why the rate is what it is, and what operators may order: pause, resume, a lower ceiling."""

import asyncio
from datetime import datetime
from typing import Any

import structlog
from aiohttp import web

from expiry import errors
from expiry.api.database import run
from expiry.api.documents import REPLAYED
from expiry.api.once import once
from expiry.api.operation import Call, Operations, answer
from expiry.api.state import BUCKET, GOVERNOR, POOL
from expiry.holds import Conn
from expiry.permits import FLEET
from expiry.wire.answers import GovernorAnswer, OrdersAnswer
from expiry.wire.bodies import OverrideBody, PauseBody, ResumeBody
from expiry.wire.queries import NoQuery
from expiry.wire.times import rfc3339, rfc3339_or_none
from governor import Bucket, BucketUnavailable, explain, journal, orders
from governor.explain import Status
from governor.journal import Entry
from governor.orders import Order, Orders

BUCKET_S_MAX = 1.0  # wait for the bucket
JOURNAL_TAIL = 20

operations = Operations("operations")
log = structlog.get_logger()


@operations.add("GET", "/v1/governor", scope="platform", takes=NoQuery, answers=GovernorAnswer)
async def get_governor(call: Call, _asked: NoQuery) -> web.Response:
    """Get how many transitions a second may start, and why: signals, orders, the last decisions."""

    async def work(conn: Conn) -> tuple[Status, list[Entry], datetime]:
        status = await explain.read(conn, FLEET, call.app[GOVERNOR])
        tail = await journal.tail(conn, FLEET, limit=JOURNAL_TAIL)
        return status, tail, await conn.fetchval("SELECT clock_timestamp()")

    status, tail, now = await run(call.app[POOL], work)
    return answer(
        {
            **_document(status),
            "in_force_per_s": await _in_force_per_s(call.app[BUCKET]),
            "journal": [_decision(entry) for entry in tail],
            "server_time": rfc3339(now),
        }
    )


@operations.add("POST", "/v1/governor/pause", scope="platform", takes=PauseBody, answers=OrdersAnswer)
async def pause_governor(call: Call, asked: PauseBody) -> web.Response:
    """Allow nothing in the whole fleet, not even the floor, from the next decision on."""

    async def order(conn: Conn) -> None:
        await orders.pause(conn, FLEET, reason=asked.reason, by=call.by)

    return await _ordered(call, "pause", order, reason=asked.reason)


@operations.add("POST", "/v1/governor/resume", scope="platform", takes=ResumeBody, answers=OrdersAnswer)
async def resume_governor(call: Call, asked: ResumeBody) -> web.Response:
    """End a pause: the fleet goes on at half the last good rate at most. Repeating it is harmless."""

    async def order(conn: Conn) -> None:
        await orders.resume(conn, FLEET)

    return await _ordered(call, "resume", order, reason=asked.reason)


@operations.add(
    "PUT",
    "/v1/governor/override",
    scope="platform",
    takes=OverrideBody,
    answers=OrdersAnswer,
    refuses=(errors.OutOfRangeError,),
)
async def put_override(call: Call, asked: OverrideBody) -> web.Response:
    """Lower the ceiling for a while; it may only lower, and ends by itself. Replaces an earlier override."""

    async def order(conn: Conn) -> None:
        try:
            await orders.override(
                conn,
                FLEET,
                ceiling_per_s=float(asked.ceiling_per_s),
                most_per_s=call.app[GOVERNOR].ceiling_per_s,
                ttl_s=float(asked.ttl_s),
                reason=asked.reason,
                by=call.by,
            )
        except ValueError as error:
            raise errors.OutOfRangeError(f"{error}.") from error

    return await _ordered(call, "override", order, reason=asked.reason)


@operations.add("DELETE", "/v1/governor/override", scope="platform", takes=NoQuery, answers=OrdersAnswer)
async def delete_override(call: Call, _asked: NoQuery) -> web.Response:
    """End an override before its time. Repeating it is harmless."""

    async def order(conn: Conn) -> None:
        await orders.withdraw(conn, FLEET)

    return await _ordered(call, "withdraw", order, reason=None)


async def _ordered(call: Call, verb: str, order: Any, *, reason: str | None) -> web.Response:  # noqa: ANN401
    enforced = call.app[GOVERNOR].mode == "enforce"

    async def work(conn: Conn) -> dict[str, Any]:
        await order(conn)
        log.warning("governor.ordered", order=verb, by=call.by, reason=reason)
        return _orders(await orders.read(conn, FLEET), enforced=enforced)

    document, replayed_at = await once(call, f"governor/{verb}", work)
    return answer(document, headers=None if replayed_at is None else REPLAYED)


async def _in_force_per_s(bucket: Bucket | None) -> float | None:
    if bucket is None:
        return None
    try:
        async with asyncio.timeout(BUCKET_S_MAX):
            return (await bucket.read()).allowance_per_s
    except (BucketUnavailable, TimeoutError) as error:
        log.debug("governor.bucket_unknown", reason=repr(error.__cause__ or error))
        return None


def _document(status: Status) -> dict[str, Any]:
    decision = None if status.last is None else status.last.decided
    reading = None if status.last is None else status.last.read
    return {
        "allowance_per_s": status.allowance_per_s,
        "limited_by": status.limited_by,
        "reason": explain.sentence(status),
        "mode": status.settings.mode,
        "signals": {} if reading is None else dict(reading.saturation),
        "ceiling_per_s": status.ceiling_per_s,
        "floor_per_s": status.settings.floor_per_s,
        "needs_per_s": None if decision is None else decision.needs_per_s,
        "safe_per_s": None if decision is None else decision.safe_per_s,
        "drain_s": None if decision is None else decision.drain_s,
        "due": None if reading is None else reading.due_depth,
        "oldest_due_age_s": None if reading is None else reading.oldest_due_age_s,
        "stuck": decision is not None and decision.stuck,
        "paused": status.enforced and status.orders.paused,
        "orders": _orders(status.orders, enforced=status.enforced),
        "leader": _leader(status),
        "decided_at": None if status.last is None else rfc3339_or_none(status.last.decided_at),
        "settings_hash": None if status.lease is None else status.lease.settings_hash or None,
    }


def _leader(status: Status) -> dict[str, Any] | None:
    if status.lease is None or not status.led:
        return None
    return {"holder": status.lease.holder, "epoch": status.lease.epoch, "left_s": status.lease.left_s}


def _orders(found: Orders, *, enforced: bool) -> dict[str, Any]:
    return {"pause": _order(found.pause), "override": _order(found.override), "enforced": enforced}


def _order(order: Order | None) -> dict[str, Any] | None:
    if order is None:
        return None
    return {
        "ceiling_per_s": order.ceiling_per_s,
        "reason": order.reason,
        "ordered_by": order.ordered_by,
        "ordered_at": rfc3339(order.ordered_at),
        "ends_at": rfc3339_or_none(order.ends_at),
    }


def _decision(entry: Entry) -> dict[str, Any]:
    decision = entry.decided
    return {
        "decided_at": rfc3339_or_none(entry.decided_at),
        "allowance_per_s": decision.allowance_per_s,
        "limited_by": decision.limited_by,
        "reason": decision.reason,
        "epoch": entry.epoch,
    }
