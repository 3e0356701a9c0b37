"""What is no HTTP, or none that we read, is refused as a problem and forgotten: no 500, no traceback, no harm."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from uuid import UUID

import pytest

from expiry import keys
from expiry.api import connection
from tests.api_client import TENANT
from tests.edges import HEALTH, Answer, Pool, Served, request, served
from tests.fleet import Counted, holds_true
from tests.helpers import eventually

ON_BOTH_LOOPS = True  # bytes come in other pieces

BODY = b'{"ttl_s": 60, "resource_id": "seat"}'
PLACE = request("POST", "/v1/holds", key=TENANT, body=BODY, Idempotency_Key="k")
CONFIRM = f"/v1/holds/{UUID(int=1)}/confirm"
DECLARE = request("PUT", "/v1/resources/a", key=TENANT, body=b'{"capacity": 1}')
TLS = bytes.fromhex("16030100f1010000ed0303") + bytes(range(230))

TIMES = ("api_head_timeout_s", "api_body_timeout_s", "api_idle_timeout_s")


@pytest.fixture
async def it(
    pool: Pool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Served]:
    """Give a server that is as healthy after the test as before, and has no failure to tell of."""
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    async with pool.acquire() as conn:
        await keys.create(conn, tenant_id="shop", scopes=("holds", "read"), key=TENANT)
    with caplog.at_level(logging.INFO):
        async with served(pool, **dict.fromkeys(TIMES, 0.1)) as it:
            yield it
            assert await it.healthy()
        # `caplog.records` are those of this phase, the teardown.
        said = [*caplog.get_records("call"), *caplog.get_records("teardown")]
        assert [r.getMessage() for r in said if r.name in ("asyncio", "aiohttp.server")] == []


async def sent(it: Served, data: bytes) -> list[Answer]:
    """Send this on a connection of its own; return what the server answers until it ends the connection."""
    answers = []
    async with it.wire() as wire:
        wire.send(data)
        with suppress(asyncio.IncompleteReadError, ConnectionResetError):
            while True:
                answers.append(await wire.answer())
    return answers


def line(text: str | bytes) -> bytes:
    """Put this line in the place of a request's first."""
    text = text.encode() if isinstance(text, str) else text
    return HEALTH.replace(b"GET /healthz HTTP/1.1", text)


def header(text: str | bytes, whole: bytes = PLACE) -> bytes:
    """Put this line among the headers of a request."""
    text = text.encode() if isinstance(text, str) else text
    return whole.replace(b"\r\nAuth", b"\r\n" + text + b"\r\nAuth", 1)


MALFORMED = {
    "TLS": TLS,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "SMTP": b"EHLO mail.example.com\r\n\r\n",
    "Redis": b"*1\r\n$4\r\nPING\r\n",
    "NUL": b"\0" * 100,
    "no version": line("GET /healthz HTTP"),
    "bad version": line("GET /healthz HTTP/9.9"),
    "half a version": line("GET /healthz HTTP/1."),
    "two paths": line("GET /healthz /readyz HTTP/1.1"),
    "tab for a space": line("GET\t/healthz\tHTTP/1.1"),
    "NUL in the path": line("GET /health\0z HTTP/1.1"),
    "no path": line("GET  HTTP/1.1"),
    "bad method": line("G\x7fT /healthz HTTP/1.1"),
    "lower method": line("get /healthz HTTP/1.1"),
    "bad host in the line": line("GET http://[::1/healthz HTTP/1.1"),
    "bad port in the line": line("GET http://x:y/healthz HTTP/1.1"),
    "no host": HEALTH.replace(b"Host: x\r\n", b""),
    "two hosts": HEALTH.replace(b"Host: x", b"Host: x\r\nHost: y"),
    "no colon": header("nonsense"),
    "empty name": header(": x"),
    "space before the colon": header("X : y"),
    "folded": header("X: y\r\n z"),
    "bare CR": header("X: y\rZ: z"),
    "bare LF": HEALTH.replace(b"\r\n", b"\n"),
    "NUL in a value": header("X: \0"),
    "control in a value": header("X: \x01"),
    "control in a name": header("X\x01: y"),
    "é in a name": header("Xé: y"),
    "length a word": header("Content-Length: many", HEALTH.replace(b"Host", b"Auth: x\r\nHost")),
    "length negative": PLACE.replace(b"Content-Length: ", b"Content-Length: -"),
    "length with a sign": PLACE.replace(b"Content-Length: ", b"Content-Length: +"),
    "length huge": PLACE.replace(b"Content-Length: ", b"Content-Length: 9999999999999999999999"),
    "two lengths": header("Content-Length: 5"),
    "length and chunks": header("Transfer-Encoding: chunked"),
    "unknown coding": header("Transfer-Encoding: nonsense"),
    "chunked not last": header("Transfer-Encoding: chunked, identity"),
    "chunked twice": header("Transfer-Encoding: chunked, chunked"),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_what_is_no_request_is_400(it: Served, pool: Pool, data: bytes) -> None:
    """As a problem that says what is wrong, without the bytes; the connection ends, and nothing is placed."""
    [answer] = await sent(it, data)
    assert answer.refusal() == (400, "malformed")
    assert "\\" not in answer.problem()["detail"]
    assert await pool.fetchval("SELECT count(*) FROM holds") == 0


ODD = {
    "Expect": (header("Expect: nonsense"), 417),
    "Expect, no such path": (header("Expect: nonsense").replace(b"/v1/holds", b"/nothing"), 417),
    "bad upgrade": (header("Connection: upgrade\r\nUpgrade: websocket"), 201),
    "another method": (PLACE.replace(b"POST", b"PURGE"), 405),
    "all of the server": (line("OPTIONS * HTTP/1.1"), 404),
    "CONNECT nowhere": (line("CONNECT [::1 HTTP/1.1"), 404),
    "CONNECT": (line("CONNECT x:443 HTTP/1.1"), 404),
    "escapes that are none": (line("GET /%zz%f HTTP/1.1"), 404),
    "a key that is no text": (PLACE.replace(TENANT.encode(), b"\xff\xfe"), 401),
    "a key of NULs": (PLACE.replace(TENANT.encode(), b"%00%00"), 401),
    "an idempotency key that is no text": (PLACE.replace(b"Key: k", b"Key: \xff"), 400),
    "a type that is no text": (PLACE.replace(b"application/json", b"application/\xff"), 415),
    "a charset that is none": (PLACE.replace(b"application/json", b'application/json; charset="\xff'), 415),
    "a coding that is none": (header("Content-Encoding: nonsense"), 415),
    "a coding of another kind": (header("Content-Encoding: br"), 415),
    "two codings": (header("Content-Encoding: gzip, gzip"), 415),
    "two coding headers": (header("Content-Encoding: identity\r\nContent-Encoding: identity"), 400),
    "no coding": (header("Content-Encoding: Identity"), 201),
    "two keys": (header(f"Authorization: Bearer {TENANT}"), 400),
    "two idempotency keys": (header("Idempotency-Key: k"), 400),
    "two conditions": (header("If-Match: *\r\nIf-Match: *", request("POST", CONFIRM, key=TENANT)), 400),
    "a query where there is none": (PLACE.replace(b"/v1/holds", b"/v1/holds?x=1"), 422),
    "NUL in such a query": (PLACE.replace(b"/v1/holds", b"/v1/holds?x=%00"), 400),
    "a query of a declaration": (DECLARE.replace(b"/v1/resources/a", b"/v1/resources/a?x=1"), 422),
    "an id that is no escape": (DECLARE.replace(b"/a", b"/%zz"), 400),
    "an id that is half an escape": (DECLARE.replace(b"/a", b"/a%2"), 400),
    "an id that is escaped": (DECLARE.replace(b"/a", b"/a%2f%25zz"), 200),
    "HTTP/0.9": (b"GET /healthz\r\n\r\n", 200),
    "HTTP/1.0": (HEALTH.replace(b"1.1", b"1.0"), 200),
}


@pytest.mark.parametrize(("data", "status"), ODD.values(), ids=ODD)
async def test_what_is_odd_is_answered(it: Served, data: bytes, status: int) -> None:
    """HTTP, if only just: with the status that says why, and a problem if that is a refusal."""
    answer = (await sent(it, data))[-1]
    assert answer.status == status
    if status >= 400:
        answer.problem()


def mutated(rng: random.Random) -> bytes:
    """Break a request in one to four places."""
    data = bytearray(rng.choice([PLACE, HEALTH, *MALFORMED.values(), *(data for data, _ in ODD.values())]))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        piece = rng.choice([bytes([rng.randrange(256)]), b"\r\n", b"\r\n\r\n", b":", b" ", b"\0", b"chunked"])
        data[at : at + rng.randint(0, 3)] = piece
    return bytes(data)


async def test_what_aiohttp_fails_on_is_closed(it: Served) -> None:
    """It reads a request without a target, and fails: the connection ends, and nothing is left of it."""
    counted = Counted()
    assert await sent(it, b"CONNECT \r\n\r\n") == []
    await eventually(holds_true(lambda: counted("expiry_http_connections") == 0))


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_comes_is_refused_or_dropped(it: Served, seed: int) -> None:
    """Two hundred requests, broken at random: each is answered below 500, as a problem if refused, or closed."""
    rng = random.Random(seed)  # noqa: S311 - no secret

    async def check() -> None:
        data = mutated(rng)
        for answer in await sent(it, data):
            assert answer.status < 500, (data, answer)
            if answer.status >= 400:
                answer.problem()

    for _ in range(4):
        await asyncio.gather(*(check() for _ in range(50)))


@pytest.mark.parametrize("path", ["/healthz", "/v1/nothing", "/v1/holds"])
async def test_a_body_that_nobody_reads_need_not_be_readable(it: Served, path: str) -> None:
    """It says that it is compressed and is not: the answer does not depend on it, and nothing is logged."""
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 7\r\n\r\n"
    [answer] = await sent(it, head.encode() + b"no gzip")
    assert answer.status in (200, 401, 404)
    assert answer.headers["connection"] == "close"
