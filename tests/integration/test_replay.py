"""A replay ends with the truth: what was sent, what came of it, how late it was; whatever the API does."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any, TypeAlias

import asyncpg
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import SecretStr
from rich.console import Console

from expiry import holds, keys, replay, shop
from expiry.errors import SetupError
from expiry.live import Tally
from expiry.service import Service
from expiry.settings import Settings
from expiry.shop import Event
from expiry.wanted import Item
from governor import GovernorSettings

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Replies = Callable[[web.Request], Awaitable[web.StreamResponse]]

KEY = "exk_replay"
AT = datetime(2025, 1, 1, tzinfo=UTC)


def cart(session: str, *, after_s: float = 0, kind: str = "cart", product: str = "1") -> Event:
    """Answer one event of a session, cart unless told otherwise."""
    return Event(AT + timedelta(seconds=after_s), kind, product, "user", session)


def console(*, terminal: bool = False) -> Console:
    """Answer a console of 80 columns that keeps what is printed."""
    return Console(file=StringIO(), width=80, force_terminal=terminal)


def printed(console: Console) -> str:
    """Answer what was printed."""
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


# --- against the whole service


@pytest.fixture
async def api(conn: Connection, database_url: str, redis_url: str) -> AsyncIterator[tuple[str, Settings]]:
    """Run API, worker and sweep; answer the URL and the settings."""
    settings = Settings(
        database_url=SecretStr(database_url), redis_url=SecretStr(redis_url), api_port=0, stop_grace_s=1
    )
    await keys.create(conn, tenant_id="shop", scopes=["holds", "read"], key=KEY)
    stop = asyncio.Event()
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    service = Service(settings, GovernorSettings(), api=True, background=True, stop=stop, bound=bound)
    running = asyncio.create_task(service.run())
    yield f"http://127.0.0.1:{await bound}", settings
    stop.set()
    await running


async def test_a_shop_is_replayed_and_checked(conn: Connection, api: tuple[str, Settings]) -> None:
    """Every hold ends as the events say or by time, and every check passes."""
    api_url, settings = api
    out = console()
    code = await replay.run(
        events=shop.generate(1, sessions=120, products=10, minutes=2),
        api_url=api_url,
        api_key=KEY,
        database_url=settings.database_url.get_secret_value(),
        speed=60,
        ttl_s=1,
        settings=settings,
        console=out,
    )
    assert code == 0, printed(out)
    rows = await conn.fetch("SELECT state, count(*) FROM holds GROUP BY state")
    states = {row["state"]: row["count"] for row in rows}
    assert set(states) == {"confirmed", "released", "expired"}
    text = printed(out)
    assert f"{sum(states.values()):,} placed" in text
    assert f"{states['expired']:,} expired" in text
    assert f"{states['confirmed']:,} confirmed, {states['released']:,} released" in text
    assert "✗" not in text
    assert max(len(line) for line in text.splitlines() if " s  placed" not in line) <= 80


async def test_a_promise_that_is_broken_is_the_exit_status(
    conn: Connection, api: tuple[str, Settings]
) -> None:
    """The replay went well; what lies in the rows did not."""
    api_url, settings = api
    await conn.execute("SELECT expiry_declare('shop', 'sold twice', 1)")
    await conn.execute("UPDATE resources SET held = 2")
    out = console(terminal=True)
    code = await replay.run(
        events=[cart("s1"), cart("s1", after_s=1, kind="purchase")],
        api_url=api_url,
        api_key=KEY,
        database_url=settings.database_url.get_secret_value(),
        speed=60,
        ttl_s=1,
        settings=settings,
        console=out,
    )
    assert code == 1
    assert "sold twice has 2 held and 0 confirmed of 1" in printed(out)
    assert "shop at 60 times its speed" in printed(out)


async def test_what_a_session_does_becomes_requests(conn: Connection, api: tuple[str, Settings]) -> None:
    """The cart of a held product renews it, a full product is sold out, nothing held is nothing done."""
    api_url, _ = api
    events = [
        cart("buys"),
        cart("buys", after_s=0.1),
        cart("sells out", after_s=0.2),
        cart("sells out", after_s=0.3, kind="purchase"),
        cart("removes", after_s=0.4, product="2"),
        cart("removes", after_s=0.5, product="2", kind="remove_from_cart"),
        cart("buys", after_s=0.6, kind="purchase"),
    ]
    report = await replay.replay(
        events,
        api_url=api_url,
        api_key=KEY,
        speed=60,
        ttl_s=60,
        capacities=lambda _product: 1,
        concurrency_max=1,  # the sessions are 2 ms apart, and who comes first gets the product
    )
    tally = report.tally
    assert (tally.events, tally.requests, tally.retries, tally.finished) == (7, 8, 0, True)
    assert (tally.placed, tally.renewed, tally.sold_out, tally.unmatched) == (2, 1, 1, 1)
    assert (tally.confirmed, tally.released, tally.refused) == (1, 1, {})
    rows = await conn.fetch("SELECT id, external_ref, state, generation FROM holds ORDER BY external_ref")
    assert [tuple(row)[1:] for row in rows] == [("buys", "confirmed", 2), ("removes", "released", 1)]
    assert tally.hold_ids == {row["id"] for row in rows}
    ends = await replay.ends(conn, tally.hold_ids)
    assert (ends.states, ends.lags_ms, ends.overdue) == ({"confirmed": 1, "released": 1}, [], 0)


async def test_who_comes_after_the_deadline_is_counted(conn: Connection, api: tuple[str, Settings]) -> None:
    """A purchase is too late then; a second look at the cart takes the product anew."""
    api_url, _ = api
    events = [
        cart("buys late"),
        cart("looks late"),
        cart("buys late", after_s=2, kind="purchase"),
        cart("looks late", after_s=2),
    ]
    report = await replay.replay(events, api_url=api_url, api_key=KEY, speed=1, ttl_s=1)
    assert (report.tally.placed, report.tally.too_late, report.tally.renewed) == (3, 1, 0)
    await replay.await_ends(conn, report.tally.hold_ids, within_s=10)
    ends = await replay.ends(conn, report.tally.hold_ids)
    assert ends.states == {"expired": 3}
    assert ends.ended_by.total() == len(ends.lags_ms) == 3
    assert min(ends.lags_ms) >= 0


async def test_a_key_that_is_refused_ends_the_replay(api: tuple[str, Settings]) -> None:
    """It is said at once, with what to do, and nothing goes on in the background."""
    with pytest.raises(SetupError, match="The API refuses the key"):
        await replay.replay([cart("s1"), cart("s2")], api_url=api[0], api_key="other", speed=60, ttl_s=1)


# --- without workers


async def test_holds_that_do_not_end_are_reported(conn: Connection) -> None:
    """Waiting for them is bounded, and the report counts those that are overdue."""
    placed = [
        await holds.place(conn, tenant_id="shop", items=[Item("r")], ttl_s=ttl_s, external_ref="s")
        for ttl_s in (60, 70)
    ]
    ids = [hold.id for hold in placed]
    await conn.execute("UPDATE holds SET expires_at = placed_at WHERE id = $1", ids[0])
    await replay.await_ends(conn, ids, within_s=0)
    ends = await replay.ends(conn, [*ids, uuid.uuid4()])
    assert (ends.states, ends.overdue) == ({"held": 2}, 1)
    out = console()
    out.print(replay.render(replay.Report(Tally(), 1.0, ends)))
    assert "2 are still held, 1 of them past their deadline" in printed(out)


# --- against an API that has a bad day


@asynccontextmanager
async def answering(replies: Replies) -> AsyncIterator[str]:
    """Serve this in place of the API."""
    app = web.Application()
    app.router.add_get("/readyz", _ready)
    app.router.add_route("*", "/{path:.*}", replies)
    async with TestServer(app) as server:
        yield str(server.make_url(""))


async def _ready(_request: web.Request) -> web.Response:
    return web.json_response({})


async def _answer(status: int, **body: object) -> web.Response:
    return web.json_response(body, status=status)


async def _declared() -> web.Response:
    return await _answer(200, resource_id="r", capacity=1, held=0, confirmed=0, available=1)


async def _hold(status: int = 201, *, hold_id: str | None = None) -> web.Response:
    nothing = dict.fromkeys(
        ("holder", "external_ref", "max_renewals", "lifetime_ends_at", "ended_at", "ended_by")
    )
    times = dict.fromkeys(("placed_at", "expires_at", "server_time"), AT.isoformat())
    return await _answer(
        status,
        id=hold_id or str(uuid.uuid4()),
        state="held",
        generation=1,
        items=[],
        metadata={},
        expires_in_s=1,
        renewals=0,
        **nothing,
        **times,
    )


async def test_a_failed_request_is_repeated_under_its_key() -> None:
    """Busy, over quota, in progress, cut off: the same key and body again, until it is placed."""
    seen: list[tuple[str, bytes]] = []
    hold_id = str(uuid.uuid4())

    async def replies(request: web.Request) -> web.StreamResponse:
        if request.method == "PUT":
            return await _declared()
        seen.append((request.headers["Idempotency-Key"], await request.read()))
        assert request.transport is not None
        match len(seen):
            case 1:
                return await _answer(503, code="busy")
            case 2:
                return await _answer(429, code="quota")
            case 3:
                return await _answer(409, code="key_in_progress")
            case 4:
                request.transport.close()
        return await _hold(hold_id=hold_id)

    async with answering(replies) as api_url:
        report = await replay.replay([cart("s1")], api_url=api_url, api_key=KEY, ttl_s=1)
    assert len(seen) == 5
    assert len(set(seen)) == 1
    assert (report.tally.placed, report.tally.retries) == (1, 4)
    assert [str(i) for i in report.tally.hold_ids] == [hold_id]


async def test_two_requests_never_share_a_key() -> None:
    """Neither two carts of a session nor two replays of the same file."""
    seen: list[str] = []

    async def replies(request: web.Request) -> web.StreamResponse:
        if request.method == "PUT":
            return await _declared()
        seen.append(request.headers["Idempotency-Key"])
        return await _answer(409, code="insufficient_capacity", available=0)

    async with answering(replies) as api_url:
        for _ in range(2):
            report = await replay.replay(
                [cart("s1"), cart("s1", product="2"), cart("s1")], api_url=api_url, api_key=KEY, ttl_s=1
            )
            assert report.tally.sold_out == 3
    assert len(set(seen)) == len(seen) == 6


async def test_what_the_api_should_not_answer_is_reported() -> None:
    """An unexpected refusal is counted by its code and shown, and the replay goes on."""

    async def replies(request: web.Request) -> web.StreamResponse:
        return await _answer(500 if request.method == "POST" else 422, code="odd")

    async with answering(replies) as api_url:
        report = await replay.replay([cart("s1")], api_url=api_url, api_key=KEY, ttl_s=1)
    assert report.tally.refused == {"odd": 2}
    out = console()
    out.print(replay.render(report))
    assert "2 odd" in printed(out)


async def test_falling_behind_is_told_and_bounded() -> None:
    """An API that does not answer in time holds up the schedule; past the bound the shop closes."""
    release = asyncio.Event()

    async def replies(_request: web.Request) -> web.StreamResponse:
        await release.wait()
        return await _answer(409, code="insufficient_capacity")

    events = (cart(f"s{n}", after_s=n) for n in itertools.count())
    async with answering(replies) as api_url:
        running = asyncio.create_task(
            replay.replay(
                events,
                api_url=api_url,
                api_key=KEY,
                speed=100,
                ttl_s=1,
                concurrency_max=2,
                behind_s_max=0.2,
                on_progress=lambda _tally: None,
            )
        )
        asyncio.get_running_loop().call_later(0.5, release.set)
        report = await running
    assert report.tally.closed_early
    assert report.tally.events == 2
    assert 0.2 < report.tally.behind_s <= report.tally.behind_s_max < 5
    out = console()
    out.print(replay.render(report))
    assert "closed early, at 00:00:01 of the shop's time: this machine" in printed(out)
    assert "is too slow for it; a --speed below 24 asks less of it" in printed(out)


async def test_events_of_one_product_and_session_keep_their_order() -> None:
    """A purchase waits for the cart before it, however slow that is; other sessions do not."""
    order: list[str] = []
    other = asyncio.Event()

    async def replies(request: web.Request) -> web.StreamResponse:
        if request.method == "PUT":
            return await _declared()
        body: dict[str, Any] = await request.json()
        if body.get("external_ref") == "slow":
            await other.wait()
        order.append(request.path.rpartition("/")[2])
        if body.get("external_ref") == "fast":
            other.set()
        return await _hold(201 if "ttl_s" in body else 200)

    events = [cart("slow"), cart("slow", kind="purchase"), cart("fast"), cart("slow", kind="purchase")]
    async with answering(replies) as api_url:
        report = await replay.replay(events, api_url=api_url, api_key=KEY, ttl_s=1)
    assert order == ["holds", "holds", "confirm"]
    assert (report.tally.placed, report.tally.confirmed, report.tally.unmatched) == (2, 1, 1)


async def test_without_an_api_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens, or not ready: one sentence with the URL and the remedy."""
    monkeypatch.setattr(replay, "READY_S_MAX", 0.1)
    with pytest.raises(SetupError, match=r"No API is ready at http://127.0.0.1:1 .*: start it or correct"):
        await replay.replay([cart("s1")], api_url="http://127.0.0.1:1/", api_key=KEY, ttl_s=1)


@pytest.mark.parametrize(("speed", "ttl_s"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0.5)])
async def test_impossible_arguments_are_refused(speed: float, ttl_s: float) -> None:
    """Time goes forward, and a hold lasts at least a second."""
    with pytest.raises(SetupError, match="speed is above 0 and ttl_s at least 1"):
        await replay.replay([], api_url="http://127.0.0.1:1", api_key=KEY, speed=speed, ttl_s=ttl_s)


async def test_without_a_database_it_says_so() -> None:
    """The password in the URL is not repeated."""
    with pytest.raises(
        SetupError, match=r"PostgreSQL cannot be used at postgresql://me:\*\*\*@127.0.0.1:1/x"
    ):
        await replay.run(
            events=[],
            api_url="http://127.0.0.1:1",
            api_key=KEY,
            database_url="postgresql://me:secret@127.0.0.1:1/x",
            speed=1,
            ttl_s=1,
            settings=Settings(),
            console=console(),
        )
