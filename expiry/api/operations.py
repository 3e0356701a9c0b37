"""For the platform's operators: the overview, and pausing loops."""

import asyncio
import json
from typing import Any

import structlog
from aiohttp import web

from expiry import loops, overview
from expiry.api import body
from expiry.api.auth import name_of, needs
from expiry.api.database import run
from expiry.api.models import PauseBody, ResumeBody
from expiry.api.state import POOL, WAKEUPS
from expiry.api.times import rfc3339
from expiry.wakeups import REDIS_AWAY, Wakeups

QUEUE_S_MAX = 2.0  # wait for Redis

routes = web.RouteTableDef()
log = structlog.get_logger()


@routes.get("/v1/overview")
@needs("platform")
async def get_overview(request: web.Request) -> web.Response:
    """Answer what was due, what has ended, and how old the rest is, in the database and in the queue."""
    found = await run(request.app[POOL], overview.read)
    queue = await _queue(request.app[WAKEUPS], now_ms=found.now.timestamp() * 1000)
    return _json(
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


@routes.post("/v1/loops/{name}/pause")
@needs("platform")
async def pause(request: web.Request) -> web.Response:
    """Pause a loop in the whole fleet."""
    asked, _ = await body.read(request, PauseBody)
    return await _set_paused(request, paused=True, reason=asked.reason)


@routes.post("/v1/loops/{name}/resume")
@needs("platform")
async def resume(request: web.Request) -> web.Response:
    """Let a paused loop run again."""
    asked, _ = await body.read(request, ResumeBody)
    return await _set_paused(request, paused=False, reason=asked.reason)


async def _set_paused(request: web.Request, *, paused: bool, reason: str | None) -> web.Response:
    name, by = request.match_info["name"], name_of(request)
    await run(
        request.app[POOL],
        lambda conn: loops.set_paused(conn, name, paused=paused, by=by, reason=reason),
    )
    return _json({"name": name, "paused": paused, "reason": reason, "changed_by": by})


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


def _json(document: dict[str, Any]) -> web.Response:
    return web.Response(
        body=json.dumps(document, ensure_ascii=False).encode(),
        headers={"Content-Type": "application/json"},
    )
