"""For the platform's operators: the overview, and pausing loops."""

import asyncio
from typing import Any

import structlog
from aiohttp import web

from expiry import errors, loops, overview
from expiry.api.database import run
from expiry.api.documents import REPLAYED
from expiry.api.once import once
from expiry.api.operation import Call, Operations, answer
from expiry.api.state import POOL, WAKEUPS
from expiry.holds import Conn
from expiry.wakeups import REDIS_AWAY, Wakeups
from expiry.wire.answers import LoopAnswer, OverviewAnswer
from expiry.wire.bodies import PauseBody, ResumeBody
from expiry.wire.queries import NoQuery
from expiry.wire.times import rfc3339

QUEUE_S_MAX = 2.0  # wait for Redis

operations = Operations("operations")
log = structlog.get_logger()


@operations.add("GET", "/v1/overview", scope="platform", takes=NoQuery, answers=OverviewAnswer)
async def get_overview(call: Call, _asked: NoQuery) -> web.Response:
    """Get what was due, what has ended, and how old the rest is, in the database and in the queue."""
    found = await run(call.app[POOL], overview.read)
    queue = await _queue(call.app[WAKEUPS], now_ms=found.now.timestamp() * 1000)
    return answer(
        {
            "eligible": found.eligible,
            "expired": found.expired,
            "difference": found.difference,
            "window_started_at": rfc3339(found.window_started_at),
            "due": found.due,
            "backed_off": found.backed_off,
            "count_max": overview.COUNT_MAX,
            "oldest_due_age_s": {
                "database": found.oldest_due_age_s,
                "queue": None if queue is None else queue["oldest_due_age_s"],
            },
            "queue_depth": None if queue is None else queue["depth"],
            "dead_letters_open": found.dead_letters_open,
            "server_time": rfc3339(found.now),
        }
    )


@operations.add(
    "POST",
    "/v1/loops/{name}/pause",
    scope="platform",
    takes=PauseBody,
    answers=LoopAnswer,
    refuses=(errors.LoopNotFoundError,),
)
async def pause(call: Call, asked: PauseBody) -> web.Response:
    """Pause a loop in the whole fleet, within a second; data stays as it is."""
    return await _set_paused(call, paused=True, reason=asked.reason)


@operations.add(
    "POST",
    "/v1/loops/{name}/resume",
    scope="platform",
    takes=ResumeBody,
    answers=LoopAnswer,
    refuses=(errors.LoopNotFoundError,),
)
async def resume(call: Call, asked: ResumeBody) -> web.Response:
    """Let a paused loop run again."""
    return await _set_paused(call, paused=False, reason=asked.reason)


async def _set_paused(call: Call, *, paused: bool, reason: str | None) -> web.Response:
    name, by = call.request.match_info["name"], call.by

    async def work(conn: Conn) -> dict[str, Any]:
        await loops.set_paused(conn, name, paused=paused, by=by, reason=reason)
        return {"name": name, "paused": paused, "reason": reason, "changed_by": by}

    verb = "pause" if paused else "resume"
    document, replayed_at = await once(call, f"{verb}/{name}", work)
    return answer(document, headers=None if replayed_at is None else REPLAYED)


async def _queue(wakeups: Wakeups | None, *, now_ms: float) -> dict[str, Any] | None:
    """Answer the queue's side; None without a queue, or when it does not answer."""
    if wakeups is None:
        return None
    try:
        async with asyncio.timeout(QUEUE_S_MAX):
            depth, oldest_ms = await wakeups.depth(), await wakeups.oldest_ms()
    except REDIS_AWAY as error:
        log.debug("overview.queue_unknown", reason=repr(error))
        return None
    age_s = 0.0 if oldest_ms is None else max(0.0, now_ms - oldest_ms) / 1000
    return {"depth": depth, "oldest_due_age_s": age_s}
