"""A shop's events replayed against the HTTP API, as its checkout would send them, and what came of it.

cart -> place (or renew, if this session holds the product already), remove_from_cart -> release, purchase ->
confirm. Events are sent when their scaled time comes; what could not be sent in time is told, not hidden.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from uuid import UUID

import aiohttp
import asyncpg
from rich import box
from rich.console import Console
from rich.table import Table

from expiry import doctor, shop
from expiry.checkout import Checkout, counting
from expiry.client import Client
from expiry.errors import SetupError
from expiry.live import Tally, View, Watch, percentile
from expiry.settings import Settings
from expiry.shop import Event
from expiry.telemetry import mask
from expiry.wakeups import connect_redis

DEMO_SPEED = 24.0
DEMO_TTL_S = 10.0
DEMO_BEHIND_S_MAX = 20.0  # on a slower machine the shop closes early: a demonstration is short
CONCURRENCY_MAX = 32
REQUEST_S_MAX = 10.0
REQUEST_S_TOTAL_MAX = 60.0  # with all attempts: an API that restarts is waited for
ATTEMPTS_MAX = 8
CONNECT_S_MAX = 5.0
READY_S_MAX = 3.0  # somebody may just be starting the API
POLL_S = 0.25
ENDS_WITHIN_S = 30.0  # after the last deadline every hold must have ended
CHUNK = 5000  # holds looked up at once


@dataclass(frozen=True, slots=True)
class Ends:
    """How the holds of a replay ended, by the rows of PostgreSQL."""

    states: Counter[str]
    ended_by: Counter[str]  # of the expired ones
    lags_ms: Sequence[float]  # of the expired ones, in order
    busiest_s: int  # most expiries in one second
    overdue: int  # still held although their time has come


@dataclass(frozen=True, slots=True)
class Report:
    """What a replay did, how long it took, and (once looked up) how its holds ended."""

    tally: Tally
    seconds: float
    ends: Ends | None = None


async def replay(  # noqa: PLR0913 - what a replay depends on, all by name
    events: Iterable[Event],
    *,
    api_url: str,
    api_key: str,
    speed: float = 60.0,
    ttl_s: float,
    capacities: Callable[[str], int] = shop.capacity,
    concurrency_max: int = CONCURRENCY_MAX,
    behind_s_max: float = math.inf,
    on_progress: Callable[[Tally], None] = lambda _tally: None,
) -> Report:
    """Send the events, `speed` event seconds in a real one; each cart holds for `ttl_s` real seconds.

    Once it is `behind_s_max` behind its schedule it sends no more, and the tally says so.
    Raises SetupError when there is no API, when it refuses the key, and for what the events raise.
    """
    if not (speed > 0 and ttl_s >= 1):
        raise SetupError(f"speed is above 0 and ttl_s at least 1, not {speed:g} and {ttl_s:g}.")
    tally = Tally()
    connector = aiohttp.TCPConnector(limit=concurrency_max)
    timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await _await_api(session, api_url.rstrip("/"))
        client = Client(
            api_url,
            key=api_key,
            timeout_s=REQUEST_S_MAX,
            attempts_max=ATTEMPTS_MAX,
            total_s_max=REQUEST_S_TOTAL_MAX,
            session=session,
            on_attempt=counting(tally),
        )
        checkout = Checkout(client, tally, ttl_s, capacities, on_progress)
        started_s = time.monotonic()
        try:
            await _send(events, checkout, speed, concurrency_max, behind_s_max)
        except BaseExceptionGroup as group:  # of the task group: the first says it
            raise group.exceptions[0] from None
        return Report(tally, time.monotonic() - started_s)


async def _send(
    events: Iterable[Event], checkout: Checkout, speed: float, concurrency_max: int, behind_s_max: float
) -> None:
    """Start each event when its time comes, as far as there is room."""
    tally = checkout.tally
    slots = asyncio.Semaphore(concurrency_max)
    started_s = first_s = 0.0
    async with asyncio.TaskGroup() as running:
        for event in events:
            at_s = event.at.timestamp()
            if not tally.events:
                started_s, first_s = time.monotonic(), at_s
            due_s = started_s + (at_s - first_s) / speed
            await asyncio.sleep(max(due_s - time.monotonic(), 0))
            await slots.acquire()
            tally.behind_s = max(time.monotonic() - due_s, 0.0)
            tally.behind_s_max = max(tally.behind_s_max, tally.behind_s)
            if tally.behind_s > behind_s_max:
                tally.closed_early = True
                break
            tally.events += 1
            tally.shop_at = event.at
            running.create_task(checkout.take(event)).add_done_callback(lambda _task: slots.release())
    tally.finished = True


async def _await_api(session: aiohttp.ClientSession, api_url: str) -> None:
    """Wait until the API is there. Raises SetupError."""
    reason = ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S_MAX):
            while True:
                try:
                    async with session.get(f"{api_url}/readyz") as response:
                        if response.ok:
                            return
                        reason = await response.text()
                except (aiohttp.ClientError, ValueError) as error:
                    reason = str(error)
                await asyncio.sleep(POLL_S)
    raise SetupError(f"No API is ready at {api_url} ({reason[:200]}): start it or correct its URL.")


# One probe of the primary key a hold, whatever the statistics say.
ENDS = """
SELECT h.id, h.state, h.ended_by, extract(epoch FROM h.ended_at)::double precision AS ended_s,
       extract(epoch FROM h.ended_at - h.expires_at)::double precision * 1000 AS lag_ms,
       h.expires_at <= statement_timestamp() AS is_past
  FROM unnest($1::uuid[]) AS w (id)
 CROSS JOIN LATERAL (SELECT * FROM holds h WHERE h.id = w.id LIMIT 1) h
"""


async def ends(conn: "asyncpg.Connection[asyncpg.Record]", hold_ids: Iterable[UUID]) -> Ends:
    """Look up how these holds ended."""
    rows = [row async for row in _look_up(conn, hold_ids)]
    expired = [row for row in rows if row["state"] == "expired"]
    in_s = Counter(int(row["ended_s"]) for row in expired)
    return Ends(
        states=Counter(row["state"] for row in rows),
        ended_by=Counter(row["ended_by"] for row in expired),
        lags_ms=sorted(row["lag_ms"] for row in expired),
        busiest_s=max(in_s.values(), default=0),
        overdue=sum(row["state"] == "held" and row["is_past"] for row in rows),
    )


async def await_ends(
    conn: "asyncpg.Connection[asyncpg.Record]", hold_ids: Iterable[UUID], *, within_s: float
) -> None:
    """Return when none of these holds is held any more, or after `within_s`."""
    deadline_s = time.monotonic() + within_s
    held = list(hold_ids)
    while held and time.monotonic() < deadline_s:
        held = [row["id"] async for row in _look_up(conn, held) if row["state"] == "held"]
        await asyncio.sleep(POLL_S if held else 0)


async def _look_up(
    conn: "asyncpg.Connection[asyncpg.Record]", hold_ids: Iterable[UUID]
) -> AsyncIterator[asyncpg.Record]:
    ids = list(hold_ids)
    for first in range(0, len(ids), CHUNK):
        for row in await conn.fetch(ENDS, ids[first : first + CHUNK]):
            yield row


def render(report: Report) -> Table:
    """Lay the report out for a terminal of 80 columns."""
    tally, sent_s = report.tally, max(report.seconds, 0.001)
    table = Table(
        box=box.SIMPLE_HEAD, title="replay", title_justify="left", show_header=False, pad_edge=False
    )
    table.add_column(style="dim")
    table.add_column()
    table.add_row("events", f"{tally.events:,} in {sent_s:,.1f} s, {tally.events / sent_s:,.0f}/s")
    schedule = f"at most {tally.behind_s_max:.1f} s behind, {tally.behind_s:.1f} s at the end"
    table.add_row("schedule", schedule)
    if tally.closed_early:
        table.add_row(
            "", f"[yellow]closed early, at {tally.shop_at:%H:%M:%S} of the shop's time: this machine[/]"
        )
        table.add_row("", f"[yellow]is too slow for it; a --speed below {DEMO_SPEED:g} asks less of it[/]")
    table.add_row(
        "requests", f"{tally.requests:,}, {tally.requests / sent_s:,.0f}/s; {tally.retries:,} retries"
    )
    table.add_row("", _percentiles(sorted(tally.latencies_ms)))
    table.add_row("holds", f"{tally.placed:,} placed, {tally.renewed:,} renewed, {tally.sold_out:,} sold out")
    table.add_row("by the shop", f"{tally.confirmed:,} confirmed, {tally.released:,} released")
    missed = f"{tally.too_late:,} came too late, {tally.unmatched:,} had nothing held"
    table.add_row("", missed)
    for code, count in tally.refused.most_common():
        table.add_row("[red]refused[/]", f"[red]{count:,} {code}[/]")
    if report.ends is not None:
        _render_ends(table, report.ends)
    return table


def _render_ends(table: Table, found: Ends) -> None:
    by = ", ".join(f"{count:,} by {name}" for name, count in found.ended_by.most_common())
    table.add_row("by time", f"{found.states['expired']:,} expired ({by}), {found.busiest_s:,} in one second")
    table.add_row("lag", f"[bold]{_percentiles(found.lags_ms)}[/]")
    if found.states["held"]:
        held = f"{found.states['held']:,} are still held, {found.overdue:,} of them past their deadline"
        table.add_row("[red]waiting[/]", f"[red]{held}[/]")


def _percentiles(ordered: Sequence[float]) -> str:
    shares = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))
    return "  ".join(f"{name} {percentile(ordered, share):,.1f} ms" for name, share in shares)


async def run(  # noqa: PLR0913 - as replay, and where to show it
    *,
    events: Iterable[Event],
    api_url: str,
    api_key: str,
    database_url: str,
    speed: float,
    ttl_s: float,
    settings: Settings,
    console: Console,
    behind_s_max: float = math.inf,
) -> int:
    """Replay the events under a live view, print the report and the doctor's findings.

    Answers 0 if every hold ended in time and every check passed, else 1. Raises SetupError.
    """
    async with AsyncExitStack() as stack:
        watching, asking = [await stack.enter_async_context(_connected(database_url)) for _ in range(2)]
        view = View(
            console, Watch(watching), title=f"shop at {speed:g} times its speed, holds of {ttl_s:g} s"
        )
        stop = asyncio.Event()
        showing = asyncio.create_task(view.show(stop))
        try:
            report = await replay(
                events,
                api_url=api_url,
                api_key=api_key,
                speed=speed,
                ttl_s=ttl_s,
                behind_s_max=behind_s_max,
                on_progress=view.progress,
            )
            hold_ids = report.tally.hold_ids
            await await_ends(asking, hold_ids, within_s=ttl_s + ENDS_WITHIN_S)
        finally:
            stop.set()
            await showing
        found = await ends(asking, hold_ids)
        console.print(render(replace(report, ends=found)))
        redis = connect_redis(settings) if settings.queue_used else None
        if redis is not None:
            stack.push_async_callback(redis.aclose)
        findings = await doctor.examine(asking, since=None, settings=settings, redis=redis)
        console.print(doctor.render(findings))
        return 0 if doctor.healthy(findings) and not found.states["held"] else 1


@asynccontextmanager
async def _connected(database_url: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    try:
        conn = await asyncpg.connect(database_url, timeout=CONNECT_S_MAX)
    except (OSError, TimeoutError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise SetupError(
            f"PostgreSQL cannot be used at {mask(database_url)} ({mask(str(error))}): "
            "start it or correct EXPIRY_DATABASE_URL."
        ) from error
    try:
        yield conn
    finally:
        await conn.close(timeout=CONNECT_S_MAX)
