"""Whatever a client may take its time for, or may send too much of, has an end."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from expiry import keys
from expiry.api import connection, refusals
from tests.api_client import TENANT, WAITING
from tests.edges import HEALTH, Pool, Served, request, served
from tests.fleet import Counted, holds_true
from tests.helpers import eventually

SOON_S = 0.2  # of a time that is to run out
LONG_S = 30.0  # of one that is not


ON_BOTH_LOOPS = True  # their transports buffer, pause and close in ways of their own


@pytest.fixture
async def key(pool: Pool) -> str:
    """Give the test a tenant's key."""
    async with pool.acquire() as conn:
        await keys.create(conn, tenant_id="shop", scopes=("holds", "read"), key=TENANT)
    return TENANT


# --- time for a head

PATIENT = {"api_idle_timeout_s": LONG_S}


async def test_a_connection_without_a_request_is_closed(pool: Pool) -> None:
    """Silently, once a head has had its time."""
    counted = Counted()
    async with served(pool, api_head_timeout_s=SOON_S, **PATIENT) as it, it.wire() as wire:
        assert await wire.ended() == b""
        assert counted("expiry_http_cut_total", reason="head_late") == 1


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("begun", [b"G", b"POST /v1/holds HTTP/1.1\r\nHost: x\r\nX: "])
async def test_a_head_that_dribbles_is_408(pool: Pool, before: int, begun: bytes) -> None:
    """Its line or its headers, of the first request or a later one: each byte is no reason for more time."""
    async with served(pool, api_head_timeout_s=SOON_S, **PATIENT) as it, it.wire() as wire:
        for _ in range(before):
            wire.send(HEALTH)
            assert (await wire.answer()).status == 200
        wire.send(begun)
        first = await wire.dribble((b"ET /" if begun == b"G" else b"") + b"x" * 1000)
        assert (await wire.answer(first)).refusal() == (408, "request_timeout")
        assert await wire.ended() == b""
        assert await it.healthy()


async def test_a_head_in_pieces_is_read(pool: Pool) -> None:
    """And its time does not run on against the wait for the next one, however long that is."""
    async with served(pool, api_head_timeout_s=SOON_S, **PATIENT) as it, it.wire() as wire:
        for _ in range(2):
            wire.send(HEALTH[:10])
            assert await wire.quiet(SOON_S / 4)
            wire.send(HEALTH[10:])
            assert (await wire.answer()).status == 200
            assert await wire.quiet(SOON_S * 2)


async def test_an_idle_connection_is_closed(pool: Pool) -> None:
    """Silently after its time, which a head that has begun replaces by its own."""
    async with served(pool, api_head_timeout_s=LONG_S, api_idle_timeout_s=SOON_S) as it:
        async with it.wire() as idle:
            idle.send(HEALTH)
            assert (await idle.answer()).status == 200
            idle.send(b"\r\n")  # as some clients do after a body
            assert await idle.ended() == b""
        async with it.wire() as begun:
            for _ in range(2):
                begun.send(HEALTH[:10])
                assert await begun.quiet(SOON_S * 2)
                begun.send(HEALTH[10:])
                assert (await begun.answer()).status == 200


# --- time for a body


async def test_a_body_that_dribbles_is_408(pool: Pool, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is placed, and the connection ends although bytes keep coming."""
    monkeypatch.setattr(connection, "LINGER_S", SOON_S)
    async with served(pool, api_body_timeout_s=SOON_S) as it, it.wire() as wire:
        body = b'{"ttl_s": 5, "resource_id": "seat"}' + b" " * 1000
        whole = request("POST", "/v1/holds", key=key, body=body, Idempotency_Key="k")
        wire.send(whole[: -len(body)])
        first = await wire.dribble(body)
        assert (await wire.answer(first)).refusal() == (408, "request_timeout")
        assert await wire.dribble(b" " * 500) == b""
        assert await pool.fetchval("SELECT count(*) FROM holds") == 0


# --- time for an answer


@asynccontextmanager
async def deaf(it: Served) -> AsyncIterator[socket.socket]:
    """Give a client that takes in next to nothing."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(0)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", it.port))
        yield client


FLOOD = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100


async def flood(client: socket.socket) -> None:
    """Ask, and ask, and never listen."""
    while True:
        await asyncio.get_running_loop().sock_sendall(client, FLOOD)


async def test_who_takes_no_answer_is_cut_off(pool: Pool) -> None:
    """Its handler and its memory are free again, and nobody else has noticed."""
    counted = Counted()
    async with served(pool, api_answer_timeout_s=SOON_S, **PATIENT) as it, deaf(it) as client:
        flooding = asyncio.create_task(flood(client))
        assert await it.healthy()
        await eventually(holds_true(lambda: counted("expiry_http_cut_total", reason="answer_left") == 1))
        await eventually(holds_true(lambda: counted("expiry_http_connections") == 0))
        [ended] = await asyncio.gather(flooding, return_exceptions=True)
        assert isinstance(ended, ConnectionError)
        assert await it.healthy()


def kept_by_the_kernel() -> int:
    """Measure how much of one answer the kernel takes for a deaf client."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.getsockname())
        wire, _ = server.accept()
        with wire:
            wire.settimeout(0)
            return wire.send(b"x" * 50_000_000)


@pytest.mark.parametrize("left", [5_000_000, 30_000])
async def test_who_leaves_an_answer_does_not_outlive_the_close(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """A connection that is closed with something left to send, much or little, is not kept until that is taken."""
    counted = Counted()
    monkeypatch.setattr(refusals, "HEAD_LATE", b"x" * (kept_by_the_kernel() + left))
    times = {"api_head_timeout_s": SOON_S, "api_answer_timeout_s": SOON_S}
    async with served(pool, **times) as it, deaf(it) as client:
        await asyncio.get_running_loop().sock_sendall(client, HEALTH[:10])
        await eventually(holds_true(lambda: counted("expiry_http_cut_total", reason="answer_left") == 1))
        await eventually(holds_true(lambda: counted("expiry_http_connections") == 0))


@pytest.mark.parametrize("resets", [False, True])
async def test_who_goes_away_in_its_body_is_no_failure_of_ours(
    pool: Pool,
    key: str,
    resets: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Closed or reset: a 400 that reaches nobody, and not a 500 with a traceback."""
    counted = Counted()
    place = request("POST", "/v1/holds", key=key, body=b"{" + b" " * 100, Idempotency_Key="k")

    def answered(status: str) -> float:
        return counted("expiry_api_requests_total", route="/v1/holds", method="POST", status=status)

    async with served(pool, **PATIENT) as it:
        async with it.wire() as wire:
            wire.send(place[:-50])
            assert await wire.quiet(SOON_S)
            if resets:
                at_once = struct.pack("ii", 1, 0)
                wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        await eventually(holds_true(lambda: counted("expiry_http_connections") == 0))
        await eventually(holds_true(lambda: answered("400") + answered("500") == 1))
        assert answered("400") == 1


# --- how much


async def test_requests_in_advance_are_bounded(pool: Pool, key: str) -> None:
    """While the first is under way, the rest stays with the client: the server reads no further."""
    async with pool.acquire() as conn:
        await conn.execute(
            "INSERT INTO resources (tenant_id, resource_id, capacity) VALUES ('shop', 'seat', 1)"
        )
    place = request(
        "POST", "/v1/holds", key=key, body=b'{"ttl_s": 60, "resource_id": "seat"}', Idempotency_Key="k"
    )
    async with served(pool, **PATIENT) as it, it.wire() as wire, pool.acquire() as conn:
        async with conn.transaction():
            await conn.execute("SELECT FROM resources FOR UPDATE")
            wire.send(place)
            await eventually(lambda: pool.fetchval(WAITING))
            wire.send(HEALTH * 500_000)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wire.writer.drain(), 1)
        assert (await wire.answer()).status == 201
        for _ in range(100):
            assert (await wire.answer()).status == 200


async def test_connections_beyond_the_bound_wait(pool: Pool) -> None:
    """They are refused by nobody, and served in their turn when one ends."""
    counted = Counted()
    async with served(pool, api_connections_max=2, **PATIENT) as it:
        async with it.wire() as first, it.wire() as second:
            for wire in (first, second):
                wire.send(HEALTH)
                assert (await wire.answer()).status == 200
            async with it.wire() as third, it.wire() as fourth:
                for wire in (third, fourth):
                    wire.send(HEALTH)
                assert await third.quiet(SOON_S)
                assert counted("expiry_http_connections") == 2
                first.writer.close()
                assert (await third.answer()).status == 200
                assert await fourth.quiet(SOON_S)
                second.writer.close()
                assert (await fourth.answer()).status == 200
        assert await it.healthy()


LINE = "GET /v1/resources/{} HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        LINE.format("r" * 9000),
        LINE.format("r").replace("Host", f"{'h' * 9000}: y\r\nHost"),
        LINE.format("r").replace("Host", f"H: {'h' * 9000}\r\nHost"),
        LINE.format("r").replace("Host", "".join(f"H{i}: y\r\n" for i in range(70)) + "Host"),
        LINE.format("r").replace("Host", "".join(f"H{i}: {'y' * 8000}\r\n" for i in range(10)) + "Host")[:-2],
        "GET /" + "r" * 100_000,
    ],
    ids=["line", "name", "value", "number", "all", "endless"],
)
async def test_a_head_that_is_too_large_is_431(pool: Pool, head: str) -> None:
    """The line, one header, their number, or all together before the end has come."""
    async with served(pool) as it, it.wire() as wire:
        first = await wire.dribble(head.encode(), size=1000, pace_s=0.002)
        assert (await wire.answer(first)).refusal() == (431, "headers_too_large")
        assert await it.healthy()


async def test_the_greatest_body_and_depth_are_settings(pool: Pool, key: str) -> None:
    """413 names the bytes, 422 the levels; what is as great as allowed is read."""

    async def place(it: Served, body: bytes) -> tuple[int, str]:
        async with it.wire() as wire:
            wire.send(request("POST", "/v1/holds", key=key, body=body, Idempotency_Key=str(uuid4())))
            answer = await wire.answer()
            return answer.status, "" if answer.status == 201 else str(answer.problem())

    async with served(pool, api_body_bytes_max=20_000, api_json_depth_max=8) as it:
        seat = b'{"ttl_s": 60, "resource_id": "seat"}'
        assert (await place(it, seat + b" " * (20_000 - len(seat))))[0] == 201
        status, said = await place(it, seat + b" " * (20_001 - len(seat)))
        assert (status, "20,000 bytes" in said) == (413, True)
        for depth, expected in ((8, 201), (9, 422)):
            nested = b"[" * (depth - 2) + b"]" * (depth - 2)  # in metadata in the body
            body = seat.replace(b"}", b', "metadata": {"\\u0061": ' + nested + b"}}")
            status, said = await place(it, body)
            assert (status, "8 levels" in said) == (expected, expected == 422), said


async def test_a_host_with_two_addresses_listens_on_both(pool: Pool) -> None:
    """As localhost has, where there is IPv6."""
    async with served(pool, api_host="localhost") as it:
        assert it.port
