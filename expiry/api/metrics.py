"""How many requests, how they ended and how long they took; labels are route templates, never paths."""

import time
from http import HTTPStatus

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import Counter, Histogram

REQUESTS = Counter("expiry_api_requests", "Requests answered.", ["route", "method", "status"])
SECONDS = Histogram(
    "expiry_api_request_seconds",
    "Time from a request's head to its answer.",
    ["route"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
UNMATCHED = "unmatched"

_METHODS = frozenset(hdrs.METH_ALL)
# Known from the start, so that a rate of failures has a zero to rise from.
_ALWAYS = (HTTPStatus.OK, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)


def middleware(router: web.UrlDispatcher) -> Middleware:
    """Answer a middleware that counts the requests of these routes."""
    counters: dict[tuple[str, str, int], Counter] = {}
    seconds = {UNMATCHED: SECONDS.labels(UNMATCHED)}
    for route in router.routes():
        template = _template(route)
        seconds[template] = SECONDS.labels(template)
        for status in _ALWAYS:
            key = (template, route.method, status.value)
            counters[key] = REQUESTS.labels(*key)

    def note(request: web.Request, status: int, took_s: float) -> None:
        template = _template(request.match_info.route)
        method = request.method if request.method in _METHODS else "other"
        key = (template, method, status)
        counter = counters.get(key)
        if counter is None:
            counter = counters[key] = REQUESTS.labels(*key)
        counter.inc()
        seconds[template].observe(took_s)

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        started_s = time.perf_counter()
        response = await handler(request)
        note(request, response.status, time.perf_counter() - started_s)
        return response

    return count


def _template(route: web.AbstractRoute) -> str:
    return UNMATCHED if route.resource is None else route.resource.canonical
