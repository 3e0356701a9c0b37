"""What the handlers share, by typed key; put there by `make_app`, never changed afterwards."""

import asyncpg
from aiohttp import web

from expiry.api.readiness import Readiness
from expiry.keys import KeyRing
from expiry.wakeups import Wakeups
from governor import Bucket

Pool = asyncpg.Pool[asyncpg.Record]

POOL = web.AppKey[Pool]("POOL")
WAKEUPS = web.AppKey[Wakeups | None]("WAKEUPS")
BUCKET = web.AppKey[Bucket | None]("BUCKET")
KEYS = web.AppKey[KeyRing]("KEYS")
READINESS = web.AppKey[Readiness]("READINESS")
