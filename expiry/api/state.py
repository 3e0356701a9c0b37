"""What the handlers share, by typed key; put there by `make_app`, never changed afterwards."""

import asyncpg
from aiohttp import web

from expiry.api.hints import Hints
from expiry.api.lanes import Lanes
from expiry.api.placer import Placer
from expiry.api.quota import Quota
from expiry.api.readiness import Readiness
from expiry.keys import KeyRing
from expiry.settings import Settings
from expiry.wakeups import Wakeups
from governor import Bucket, GovernorSettings

POOL: "web.AppKey[asyncpg.Pool[asyncpg.Record]]" = web.AppKey("POOL")
WAKEUPS: web.AppKey[Wakeups | None] = web.AppKey("WAKEUPS")
LANES: web.AppKey[Lanes] = web.AppKey("LANES")
PLACER: web.AppKey[Placer] = web.AppKey("PLACER")
HINTS: web.AppKey[Hints] = web.AppKey("HINTS")
BUCKET: web.AppKey[Bucket | None] = web.AppKey("BUCKET")
KEYS: web.AppKey[KeyRing] = web.AppKey("KEYS")
QUOTA: web.AppKey[Quota] = web.AppKey("QUOTA")
READINESS: web.AppKey[Readiness] = web.AppKey("READINESS")
SETTINGS: web.AppKey[Settings] = web.AppKey("SETTINGS")
GOVERNOR: web.AppKey[GovernorSettings] = web.AppKey("GOVERNOR")
