"""API keys: made once, shown once, stored as a hash, checked in constant time.

Every key, made here or given, is found by the first 16 hex digits of its SHA-256, so that any string can be
one. A process remembers keys for CACHE_S: a revoked key works that much longer, and a request costs no query.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from weakref import WeakValueDictionary

import asyncpg
import structlog

from expiry.errors import KeyNotFoundError, OutOfRangeError
from expiry.holds import Conn
from expiry.wanted import TEXT_MAX

SCOPES = ("holds", "read", "operate", "platform")
PREFIX = "exk_"  # lets a secret scanner recognise a leaked key
KEY_CHARS_MAX = 512
LIST_MAX = 1000
CACHE_S = 5.0
CACHE_KEYS_MAX = 4096
ACQUIRE_S_MAX = 2.0  # wait for a connection of the pool
STRANGERS_MAX = 2  # keys looked up at once that were not known lately: guessing keeps little of the pool busy

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: the key's public id, its tenant (None: a platform key) and what it may do."""

    key_id: str
    tenant_id: str | None
    scopes: frozenset[str]


# A given key that is known already is changed to what is asked: `expiry dev --api-key demo` may run twice.
CREATE = """
INSERT INTO api_keys (id, hash, tenant_id, scopes, name) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (id) DO UPDATE
   SET hash = EXCLUDED.hash, tenant_id = EXCLUDED.tenant_id, scopes = EXCLUDED.scopes, name = EXCLUDED.name,
       revoked_at = NULL
"""


async def create(
    conn: Conn,
    *,
    tenant_id: str | None,
    scopes: Collection[str],
    name: str | None = None,
    key: str | None = None,
) -> str:
    """Make a key, or register the given one, and answer it: nobody can show it again.

    Without a tenant it is a platform key, whose only scope is `platform`. A given key that is known already
    is changed. Raises OutOfRangeError for scopes, tenants or keys that cannot be.
    """
    _check(tenant_id, scopes, key)
    shown = PREFIX + secrets.token_urlsafe(32) if key is None else key
    digest = _digest(shown)
    await conn.execute(CREATE, key_id(shown), digest, tenant_id, sorted(set(scopes)), name)
    return shown


# Keys are few: they are sorted at every look.
LIST = """
SELECT id, tenant_id, scopes, name, created_at, last_used_at, revoked_at
  FROM api_keys
 WHERE ($1::text IS NULL OR tenant_id = $1) AND (created_at, id) > ($3, $4)
 ORDER BY created_at, id LIMIT $2
"""
FIRST = (datetime(1970, 1, 1, tzinfo=UTC), "")


async def list_(
    conn: Conn,
    *,
    tenant_id: str | None = None,
    after: tuple[datetime, str] = FIRST,
    limit: int = LIST_MAX,
) -> list[dict[str, Any]]:
    """Answer keys (of one tenant, or all), oldest first, after one's `created_at` and id; never their secrets."""
    return [dict(row) for row in await conn.fetch(LIST, tenant_id, limit, *after)]


GET = """
SELECT id, tenant_id, scopes, name, created_at, last_used_at, revoked_at FROM api_keys WHERE id = $1
"""


async def get(conn: Conn, id_: str) -> dict[str, Any]:
    """Answer one key, never its secret. Raises KeyNotFoundError for an unknown id."""
    row = await conn.fetchrow(GET, id_)
    if row is None:
        raise KeyNotFoundError(f"there is no API key {id_!r}: list them first")
    return dict(row)


REVOKE = "UPDATE api_keys SET revoked_at = coalesce(revoked_at, clock_timestamp()) WHERE id = $1 RETURNING id"


async def revoke(conn: Conn, id_: str) -> None:
    """End a key for good, everywhere within CACHE_S. Raises KeyNotFoundError for an unknown id."""
    if await conn.fetchval(REVOKE, id_) is None:
        raise KeyNotFoundError(f"there is no API key {id_!r}: list them first")


def key_id(key: str) -> str:
    """Answer the public id of any key."""
    return _digest(key).hex()[:16]


VERIFY = """
SELECT hash, tenant_id, scopes,
       last_used_at IS NULL OR last_used_at < clock_timestamp() - interval '1 minute' AS unused
  FROM api_keys WHERE id = $1 AND revoked_at IS NULL
"""
# SKIP LOCKED: a key that is being revoked, or noted by another process, must not delay a request.
TOUCH = """
UPDATE api_keys SET last_used_at = clock_timestamp()
 WHERE id = ANY (ARRAY(SELECT k.id FROM api_keys k WHERE k.id = $1 FOR NO KEY UPDATE SKIP LOCKED))
"""


class KeyRing:
    """Checks keys, remembering the good ones for CACHE_S; concurrent requests with one key share a query."""

    def __init__(
        self, pool: "asyncpg.Pool[asyncpg.Record]", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Know no key yet; `clock` answers seconds since anything."""
        self._pool = pool
        self._clock = clock
        self._known: dict[bytes, tuple[float, Principal]] = {}
        self._strangers = asyncio.Semaphore(STRANGERS_MAX)
        self._asking: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def verify(self, key: str) -> Principal | None:
        """Answer who has this key, None if nobody. Raises what asyncpg raises when it must ask and cannot."""
        digest = _digest(key)
        principal = self._remembered(digest)
        if principal is not None:
            return principal
        lock = self._asking.setdefault(digest, asyncio.Lock())
        async with asyncio.timeout(ACQUIRE_S_MAX) as waiting, lock:
            if principal := self._remembered(digest):
                return principal
            async with nullcontext() if digest in self._known else self._strangers:
                waiting.reschedule(None)
                return await self._ask(digest)

    def forget(self, id_: str) -> None:
        """Ask again for this key at its next use."""
        for digest in [d for d in self._known if d.hex().startswith(id_)]:
            del self._known[digest]

    def _remembered(self, digest: bytes) -> Principal | None:
        until, principal = self._known.get(digest, (0.0, None))
        return principal if self._clock() < until else None

    async def _ask(self, digest: bytes) -> Principal | None:
        id_ = digest.hex()[:16]
        async with self._pool.acquire(timeout=ACQUIRE_S_MAX) as conn:
            row = await conn.fetchrow(VERIFY, id_)
            if row is None or not hmac.compare_digest(row["hash"], digest):
                self._known.pop(digest, None)
                return None
            if row["unused"]:
                await _touch(conn, id_)
        if len(self._known) >= CACHE_KEYS_MAX:
            self._known.pop(next(iter(self._known)))
        principal = Principal(id_, row["tenant_id"], frozenset(row["scopes"]))
        self._known.pop(digest, None)  # to the end of the order in which keys are forgotten
        self._known[digest] = (self._clock() + CACHE_S, principal)
        return principal


async def _touch(conn: Conn, id_: str) -> None:
    try:
        await conn.execute(TOUCH, id_)
    except asyncpg.PostgresError as error:  # a standby, for one: reading goes on
        log.debug("key.use_not_noted", key_id=id_, reason=repr(error))


def _digest(key: str) -> bytes:
    # surrogateescape: a header may hold any bytes, and every one of them must get an answer.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _check(tenant_id: str | None, scopes: Collection[str], key: str | None) -> None:
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        raise OutOfRangeError(
            f"scopes are one or more of {', '.join(SCOPES)}, not {', '.join(unknown) or 'none'}"
        )
    if tenant_id is None and set(scopes) != {"platform"}:
        raise OutOfRangeError("a key without a tenant has the scope platform and no other")
    if tenant_id is not None and "platform" in scopes:
        raise OutOfRangeError("a key of a tenant cannot have the scope platform: make one without a tenant")
    if tenant_id is not None and not 1 <= len(tenant_id) <= TEXT_MAX:
        raise OutOfRangeError(f"tenant_id: 1 to {TEXT_MAX} characters")
    if key is not None and not (
        1 <= len(key) <= KEY_CHARS_MAX and key.isascii() and key.isprintable() and " " not in key
    ):
        raise OutOfRangeError(f"an API key has 1 to {KEY_CHARS_MAX} printable ASCII characters and no space")
