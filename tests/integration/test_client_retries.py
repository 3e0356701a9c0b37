"""Whatever happens on the way, a request is done once, and the attempts have bounds."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from expiry import errors
from expiry.client import Attempt
from expiry.client.transport import RETRY_S, RETRY_S_MAX
from expiry.wire.problems import InvalidError, QuotaError
from tests.api_client import Api
from tests.gateway import FAULTS, PROBLEM, Clock, answering, client_at, gateway_to, url_of
from tests.proxy import Cut, proxy_to

HOLD = "0193b0c5-8f4a-7c3e-9d5e-2f6a1b8c4d7e"
COUNT = "SELECT count(*) FROM holds"


def refusing(status: int, code: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    """Answer a problem to be served."""
    return status, PROBLEM.format(code, status), {h.replace("_", "-"): v for h, v in headers.items()}


# --- once


@pytest.mark.parametrize("cut", Cut)
async def test_a_cut_connection_places_one_hold(
    api: Api, pool: asyncpg.Pool[asyncpg.Record], cut: Cut
) -> None:
    """Cut before the request arrives, or after the commit and before the answer: one hold, and it is answered."""
    attempts: list[Attempt] = []
    async with (
        proxy_to(url_of(api)) as proxy,
        client_at(proxy.url, on_attempt=attempts.append) as client,
    ):
        proxy.cut_at(b"POST /v1/holds ", cut)
        hold = await client.place("room-12", ttl_s=60)
        assert proxy.cuts == 1
    assert [row["id"] for row in await pool.fetch("SELECT id FROM holds")] == [hold.id]
    assert hold.replayed == (cut is Cut.AFTER)
    assert [(a.method, a.path, a.number, a.status) for a in attempts] == [
        ("POST", "/v1/holds", 1, None),
        ("POST", "/v1/holds", 2, 201),
    ]


@pytest.mark.parametrize(("when", "what"), FAULTS)
async def test_any_one_fault_leaves_one_hold(
    api: Api, pool: asyncpg.Pool[asyncpg.Record], when: str, what: str
) -> None:
    """Whatever comes in place of the answer, before or after the work: the same bytes again, and one hold."""
    async with gateway_to(url_of(api)) as (gateway, url), client_at(url) as client:
        gateway.faults = [(when, what)]
        hold = await client.place("room-12", ttl_s=60, metadata={"price": 1.5})
    assert [row["id"] for row in await pool.fetch("SELECT id FROM holds")] == [hold.id]
    assert hold.replayed == (when == "after")
    assert len(gateway.seen) == 2
    assert len(set(gateway.seen)) == 1


async def test_any_two_faults_leave_one_renewal(api: Api) -> None:
    """A change that would not be harmless twice is not done twice, whatever goes wrong with two attempts."""
    async with gateway_to(url_of(api)) as (gateway, url), client_at(url) as client:
        for first in FAULTS:
            for second in (("before", "cut"), ("after", "cut"), ("after", "half an answer")):
                hold = await client.place("room-12", ttl_s=60)
                gateway.faults = [first, second]
                renewed = await client.renew(hold.id, ttl_s=90)
                assert (renewed.generation, (await client.get(hold.id)).generation) == (2, 2), (first, second)


async def test_every_operation_survives_a_fault(api: Api) -> None:
    """Those without a key too: they may be repeated as they are."""
    async with gateway_to(url_of(api)) as (gateway, url), client_at(url) as client:
        hold = await client.place("room-12", ttl_s=60)
        for ask in (
            lambda: client.declare("room-12", capacity=3),
            lambda: client.resource("room-12"),
            lambda: client.get(hold.id),
            client.events,
            lambda: client.confirm(hold.id),
            lambda: client.return_(hold.id),
            lambda: client.release_batch([hold.id]),
        ):
            gateway.faults = [("after", "cut"), ("before", "busy"), ("after", "bad gateway")]
            gateway.seen.clear()
            await ask()
            assert len(gateway.seen) == 4
            assert len(set(gateway.seen)) == 1


async def test_a_key_in_use_is_waited_for(
    api: Api, conn: asyncpg.Connection[asyncpg.Record], pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    """While another process is placing under the same key, the client comes again until it is done."""
    busy = conn.transaction()
    await busy.start()
    await conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('shop/place/k', 0))")
    clock = Clock(meanwhile=[lambda: None, busy.rollback])
    async with client_at(url_of(api), clock=clock) as client:
        hold = await client.place("room-12", ttl_s=60, idempotency_key="k")
    assert await pool.fetchval("SELECT id FROM holds") == hold.id
    assert len(clock.slept_s) == 2
    assert min(clock.slept_s) >= 1  # as its Retry-After says


# --- when, and how often


async def test_waits_double_with_jitter() -> None:
    """Up to a bound, spread over half of it; never the same twice in a row for two clients."""
    waits = []
    for _ in range(20):
        clock = Clock()
        async with (
            answering((502, "", {})) as (_, url),
            client_at(url, clock=clock, attempts_max=8) as client,
        ):
            with pytest.raises(errors.UnavailableError):
                await client.overview()
        waits.append(clock.slept_s)
    for number, wait_s in enumerate(zip(*waits, strict=True)):
        longest_s = min(RETRY_S * 2**number, RETRY_S_MAX)
        assert longest_s / 2 <= min(wait_s) < max(wait_s) <= longest_s
        assert len(set(wait_s)) == len(wait_s)


@pytest.mark.parametrize("what", ["busy", "quota", "in progress", "no capacity at the gateway"])
async def test_retry_after_is_kept(api: Api, what: str) -> None:
    """The wait is at least as long as the API asks for, whoever answers for it."""
    clock = Clock()
    async with gateway_to(url_of(api)) as (gateway, url), client_at(url, clock=clock) as client:
        gateway.faults, gateway.retry_after = [("before", what)], "7"
        await client.place("room-12", ttl_s=60)
    assert len(clock.slept_s) == 1
    assert 7 < clock.slept_s[0] <= 7 + RETRY_S


@pytest.mark.parametrize("text", ["", "Wed, 21 Oct 2026 07:28:00 GMT", "-1", "1e9", "soon", "\u0663"])
async def test_another_retry_after_is_none(api: Api, text: str) -> None:
    """What is no number of seconds does not keep anybody waiting."""
    clock = Clock()
    async with gateway_to(url_of(api)) as (gateway, url), client_at(url, clock=clock) as client:
        gateway.faults, gateway.retry_after = [("before", "busy")], text
        await client.place("room-12", ttl_s=60)
    assert clock.slept_s[0] <= RETRY_S


async def test_no_wait_goes_past_the_total() -> None:
    """Told to come again too late, the client does not wait at all, and says what was said."""
    clock = Clock()
    async with (
        answering(refusing(429, "quota", Retry_After="31")) as (keys, url),
        client_at(url, clock=clock) as client,
    ):
        with pytest.raises(QuotaError):
            await client.confirm(HOLD)
    assert (len(keys), clock.slept_s) == (1, [])


async def test_all_attempts_together_have_a_bound() -> None:
    """However many attempts are allowed, they end in time."""
    clock = Clock()
    async with (
        answering(refusing(503, "busy", Retry_After="1")) as (keys, url),
        client_at(url, clock=clock, attempts_max=1000, total_s_max=30.0) as client,
    ):
        with pytest.raises(errors.BusyError):
            await client.confirm(HOLD)
    assert 7 < len(keys) <= 15
    assert 25 < clock.now_s < 30


async def test_an_attempt_has_a_bound() -> None:
    """A server that takes the request and says nothing is given up, and asked again."""
    release = asyncio.Event()
    seen = 0

    async def handle(_request: web.Request) -> web.Response:
        nonlocal seen
        seen += 1
        await release.wait()
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        async with client_at(str(server.make_url("")), timeout_s=0.05, attempts_max=3) as client:
            with pytest.raises(errors.UnavailableError, match=r"nothing within 0\.1 s|timeout"):
                await client.confirm(HOLD)
        release.set()
    assert seen == 3


@pytest.mark.parametrize(
    ("reply", "kind", "code"),
    [
        (refusing(500, "internal"), errors.ExpiryError, "internal"),
        (refusing(409, "insufficient_capacity"), errors.InsufficientCapacityError, "insufficient_capacity"),
        (refusing(409, "already_ended"), errors.AlreadyEndedError, "already_ended"),
        (refusing(410, "hold_expired"), errors.HoldExpiredError, "hold_expired"),
        (refusing(422, "invalid"), InvalidError, "invalid"),
        (refusing(418, "from_a_newer_server"), errors.ExpiryError, "from_a_newer_server"),
        ((404, "<html>", {}), errors.ExpiryError, "error"),
        ((400, '["code"]', {}), errors.ExpiryError, "error"),
        ((400, '{"error": "no"}', {}), errors.ExpiryError, "error"),
        ((400, '{"code": 7, "detail": null, "errors": ["no"], "message": 1}', {}), errors.ExpiryError, "7"),
        ((302, "", {"Location": "http://127.0.0.1:1/"}), errors.ExpiryError, "error"),
    ],
)
async def test_nothing_else_is_repeated(
    reply: tuple[int, str, dict[str, str]], kind: type[errors.ExpiryError], code: str
) -> None:
    """A refusal is one; its class is that of its code, and the code is there where no class has it."""
    async with answering(reply) as (keys, url), client_at(url) as client:
        with pytest.raises(errors.ExpiryError) as refused:
            await client.confirm(HOLD)
    assert (type(refused.value), refused.value.code, len(keys)) == (kind, code, 1)
    assert "idempotency_key" not in refused.value.facts


async def test_no_answer_can_be_asked_for_later(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """After all attempts the error names the key; with it the same call answers what was done meanwhile."""
    async with gateway_to(url_of(api)) as (gateway, url), client_at(url) as client:
        gateway.faults = [("after", "cut")] * 5
        with pytest.raises(errors.UnavailableError, match="may be done all the same") as lost:
            await client.place("room-12", ttl_s=60)
        assert len(gateway.seen) == 5
        key = lost.value.facts["idempotency_key"]
        assert isinstance(key, str)
        hold = await client.place("room-12", ttl_s=60, idempotency_key=key)
    assert hold.replayed
    assert await pool.fetchval(COUNT) == 1


async def test_nobody_there_is_unavailable() -> None:
    """Said with the URL and the reason."""
    attempts: list[Attempt] = []
    async with client_at("http://127.0.0.1:1", attempts_max=2, on_attempt=attempts.append) as client:
        with pytest.raises(errors.UnavailableError, match=r"http://127.0.0.1:1.*Cannot connect"):
            await client.overview()
    assert [(a.number, a.status) for a in attempts] == [(1, None), (2, None)]
