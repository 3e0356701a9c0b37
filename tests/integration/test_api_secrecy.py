"""A key reaches neither a log nor an answer, however the request that carries it is broken."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from io import StringIO

import pytest
import structlog

from expiry import keys
from expiry.api import connection
from expiry.telemetry import set_up_logging
from tests.edges import PACE_S, Pool, request, served

ON_BOTH_LOOPS = True

SECRET = "s3cret"  # noqa: S105 - to be looked for in what is written
KEY = f"exk_{SECRET}"

PLACE = request("POST", "/v1/holds", key=KEY, body=b'{"ttl_s": 60}', Idempotency_Key="k")
BEARER = f"Bearer {KEY}".encode()
CHUNKED = PLACE.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
CONTROLS = [b"\0", b"\x01", b"\t", b"\n", b"\r", b"\x1b", b"\x7f"]

BROKEN = {
    **{f"{c!r} after the key": PLACE.replace(BEARER, BEARER + c + b"x") for c in CONTROLS},
    **{f"{c!r} in the key": PLACE.replace(BEARER, BEARER[:-3] + c + BEARER[-3:]) for c in CONTROLS},
    **{f"{c!r} before the key": PLACE.replace(BEARER, b"Bearer" + c + KEY.encode()) for c in CONTROLS},
    "a key too long": PLACE.replace(BEARER, BEARER + b"x" * 9000),
    "a key too long for one packet": PLACE.replace(BEARER, BEARER + b"x" * 70_000),
    "a name too long": PLACE.replace(b"Authorization", b"Authorization" + b"x" * 9000),
    "the key in the name": PLACE.replace(b"Authorization: Bearer ", b"Authorization "),
    "the key in the line": PLACE.replace(b"/v1/holds HTTP/1.1\r\nHost: x\r\nAuthorization:", b""),
    "the key for a method": KEY.encode() + b" " + PLACE,
    "the key for a version": PLACE.replace(b"HTTP/1.1", b"HTTP/" + KEY.encode()),
    "the key for a host": PLACE.replace(b"Host: x", b"Host: " + BEARER),
    "a later header": PLACE.replace(b"Content-Type", b"X\x01: y\r\nContent-Type"),
    "two lengths": PLACE.replace(b"Content-Length", b"Content-Length: 1\r\nContent-Length"),
    "no host": PLACE.replace(b"Host: x\r\n", b""),
    "a body for a head": PLACE.replace(b"Content-Length: 13", b"Content-Length: 1"),
    "a length too long": PLACE.replace(b"Content-Length: 13", b"Content-Length: 40") + PLACE,
    "a head for a chunk": CHUNKED + PLACE,
    "a head in a chunk": CHUNKED + b"5\r\n" + PLACE,
    "a head after a chunk": CHUNKED + b"1\r\n{\r\n" + PLACE,
    "a head for a trailer": CHUNKED + b"0\r\n" + PLACE.replace(b"Auth", b"Auth\x01"),
    "no gzip": PLACE.replace(b"Content-Type", b"Content-Encoding: gzip\r\nContent-Type"),
}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[StringIO]:
    """Give the test all that is logged, at every level; leave logging as other tests expect it."""
    root, structured = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    log = StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    set_up_logging("json", "debug")
    root.setLevel(logging.DEBUG)
    yield log
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**structured)


@pytest.mark.parametrize("apart", [False, True], ids=["one packet", "two packets"])
async def test_a_key_is_not_told(
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    written: StringIO,
    subtests: pytest.Subtests,
    apart: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Control characters at every place, what is too long, and heads where there should be a body."""
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    times = ("api_head_timeout_s", "api_body_timeout_s", "api_idle_timeout_s")
    asyncio.get_running_loop().set_debug(True)
    async with pool.acquire() as conn:
        await keys.create(conn, tenant_id="shop", scopes=("holds",), key=KEY)
    async with served(pool, **dict.fromkeys(times, 0.2)) as it:
        for name, data in BROKEN.items():
            before = len(written.getvalue())
            with subtests.test(name):
                async with it.wire() as wire:
                    head, end, rest = data.partition(b"\r\n\r\n")
                    wire.send(head + end)
                    if apart:
                        await asyncio.sleep(PACE_S)
                    wire.send(rest)
                    answered = await wire.ended()
                assert SECRET.encode() not in answered
                said = written.getvalue()[before:]
                assert [line for line in said.splitlines() if SECRET in line] == []
    assert '"http.unreadable"' in written.getvalue()
    assert '"api.body_unreadable"' in written.getvalue()
