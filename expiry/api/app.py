"""The applications: the API, and one with health and metrics only for processes without it."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache

import asyncpg
from aiohttp import web

from expiry.api import batch, events, governor, health, holds, keys, metrics, platform, resources
from expiry.api.document import docs, openapi
from expiry.api.hints import Hints
from expiry.api.lanes import Lanes
from expiry.api.operation import Operation, routes
from expiry.api.placer import Placer
from expiry.api.problems import answer_problems
from expiry.api.quota import Quota
from expiry.api.readiness import Readiness
from expiry.api.state import (
    BUCKET,
    GOVERNOR,
    HINTS,
    KEYS,
    LANES,
    PLACER,
    POOL,
    QUOTA,
    READINESS,
    SETTINGS,
    WAKEUPS,
)
from expiry.keys import KeyRing
from expiry.settings import Settings
from expiry.wakeups import Wakeups
from governor import Bucket, GovernorSettings

# In the order of the document.
OPERATIONS: tuple[Operation, ...] = (
    *holds.operations,
    *batch.operations,
    *resources.operations,
    *events.operations,
    *keys.operations,
    *platform.operations,
    *governor.operations,
)


_GOVERNED = GovernorSettings.model_construct()  # the defaults, whatever the environment says


@cache
def _described() -> tuple[web.RouteDef, ...]:
    document = openapi.document(OPERATIONS)
    return openapi.route(document), docs.route(document)


def _content() -> Mapping[str, str]:
    return {}


def make_app(
    *,
    pool: "asyncpg.Pool[asyncpg.Record]",
    settings: Settings,
    wakeups: Wakeups | None,
    bucket: Bucket | None,
    governed: GovernorSettings = _GOVERNED,
    ready: Callable[[], Mapping[str, str]] = _content,
) -> web.Application:
    """Answer the API; it owns neither pool nor Redis.

    `ready` answers what else keeps this process from its work, name and reason; it must not wait.
    """
    app = _app(settings, [*routes(OPERATIONS), *_described()])
    app[POOL] = pool
    app[WAKEUPS] = wakeups
    app[HINTS] = Hints(wakeups)
    app[BUCKET] = bucket
    app[GOVERNOR] = governed
    app[LANES] = Lanes(pool.get_max_size())
    app[PLACER] = Placer(pool, app[HINTS])
    app[KEYS] = KeyRing(pool)
    app[QUOTA] = Quota(settings.api_rate_per_s)
    app[READINESS] = Readiness(pool=pool, settings=settings, wakeups=wakeups, ready=ready)
    app.on_cleanup.append(_finish)
    return app


async def _finish(app: web.Application) -> None:
    await app[PLACER].close()
    await app[HINTS].close()


def make_health_app(
    *,
    pool: "asyncpg.Pool[asyncpg.Record]",
    settings: Settings,
    wakeups: Wakeups | None,
    ready: Callable[[], Mapping[str, str]] = _content,
) -> web.Application:
    """Answer an application with /healthz, /readyz and /metrics and nothing else."""
    app = _app(settings, [])
    app[READINESS] = Readiness(pool=pool, settings=settings, wakeups=wakeups, ready=ready)
    return app


def _app(settings: Settings, own: Iterable[web.AbstractRouteDef]) -> web.Application:
    app = web.Application(client_max_size=settings.api_body_bytes_max)
    app[SETTINGS] = settings
    app.add_routes([*health.routes, *own])
    app.middlewares.extend((metrics.middleware(app.router), answer_problems))
    return app
