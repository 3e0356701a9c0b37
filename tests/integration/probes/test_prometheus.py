"""A query over HTTP: bounded, optional, and silent about its password."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from governor.probes import Probes
from governor.probes.prometheus import PrometheusProbe, PrometheusQuery

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[Probes]]

QUERY = 'histogram_quantile(0.99, sum by (le) (rate(checkout_seconds_bucket{shop="a+b"}[1m])))'


def vector(*values: str) -> dict[str, object]:
    """Answer as Prometheus does."""
    result = [{"metric": {}, "value": [1_700_000_000.1, value]} for value in values]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Give the test a way to read a server whose answers it makes."""
    servers: list[TestServer] = []
    started: list[Probes] = []

    async def start(handler: Handler) -> Probes:
        app = web.Application()
        app.router.add_get("/base/api/v1/query", handler)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        url = f"http://reader:s3cret@127.0.0.1:{servers[-1].port}/base/"
        source = PrometheusQuery(url, QUERY, timeout_s=0.2)
        started.append(Probes([PrometheusProbe(target=0.5, ttl_s=2, source=source)], interval_s=1))
        await started[-1].start()
        return started[-1]

    yield start
    for probes in started:
        await probes.close()
    for server in servers:
        await server.close()


@pytest.mark.parametrize(
    "answer",
    [
        vector("0.25"),
        {"status": "success", "data": {"resultType": "scalar", "result": [1_700_000_000, "0.25"]}},
    ],
)
async def test_one_value_is_read(serve: Serve, answer: dict[str, object]) -> None:
    """The query goes as it is, with the user of the URL; a vector of one or a scalar comes back."""
    asked: list[web.Request] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request)
        return web.json_response(answer)

    probes = await serve(handler)
    assert await probes.read() == {"prometheus": 0.5}
    assert asked[0].query["query"] == QUERY
    assert asked[0].headers["Authorization"].startswith("Basic ")


async def _hang(_request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def _trickle(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.01)


async def _flood(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * 65536)


def _answers(body: object, status: int = 200) -> Handler:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(text=body if isinstance(body, str) else json.dumps(body), status=status)

    return handler


async def _moved(_request: web.Request) -> web.Response:
    raise web.HTTPFound("http://127.0.0.1:1/elsewhere")


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (_hang, "does not answer"),
        (_trickle, "does not answer"),
        (_flood, "more than"),
        (_moved, "answers 302"),
        (_answers("upstream", status=502), "answers 502"),
        (_answers("<html>"), "no result"),
        (_answers("[" * 60_000), "no result"),
        (_answers({"status": "success"}), "no result"),
        (_answers(vector()), "0 series"),
        (_answers(vector("1", "2")), "2 series"),
        (_answers(vector("NaN")), "implausible"),
        (_answers(vector("+Inf")), "implausible"),
        (_answers(vector("-1")), "implausible"),
        (_answers({"status": "success", "data": {"resultType": "matrix", "result": []}}), "neither"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
async def test_anything_else_is_absent_with_an_alert(serve: Serve, handler: Handler, why: str) -> None:
    """Slow, endless, wrong or empty: nothing is read, within the time-out, and nothing told but why."""
    probes = await serve(handler)
    async with asyncio.timeout(2):
        assert await probes.read() == {}
    assert why in probes.alerts["prometheus"]
    assert "s3cret" not in probes.alerts["prometheus"]


@pytest.mark.parametrize("url", ["http://reader:s3cret@127.0.0.1:1", "http://reader:s3cret@[", "s3cret"])
async def test_a_prometheus_that_is_away_says_nothing_about_the_database(url: str) -> None:
    """It is not read as overload, and its URL is not repeated."""
    source = PrometheusQuery(url, "up", timeout_s=0.2)
    async with Probes([PrometheusProbe(target=0.5, ttl_s=2, source=source)], interval_s=1) as probes:
        assert await probes.read() == {}
        assert "s3cret" not in probes.alerts["prometheus"]
