from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from expiry import errors, keys
from tests.api_client import OTHER_TENANT, PLATFORM, TENANT, Api, problem

NOBODY = UUID(int=1)  # not drawn: parallel runs must collect the same tests
# Every endpoint that needs a key, with the scope it needs.
ENDPOINTS = [
    ("POST", "/v1/holds", "holds"),
    ("GET", f"/v1/holds/{NOBODY}", "read"),
    ("POST", f"/v1/holds/{NOBODY}/renew", "holds"),
    ("POST", f"/v1/holds/{NOBODY}/confirm", "holds"),
    ("POST", f"/v1/holds/{NOBODY}/release", "holds"),
    ("POST", f"/v1/holds/{NOBODY}/return", "holds"),
    ("POST", "/v1/holds/batch", "holds"),
    ("POST", "/v1/holds/release-batch", "holds"),
    ("GET", "/v1/holds?state=held", "read"),
    ("GET", f"/v1/holds/{NOBODY}/history", "read"),
    ("PUT", "/v1/resources/r", "holds"),
    ("GET", "/v1/resources", "read"),
    ("GET", "/v1/events", "read"),
    ("POST", "/v1/keys", "platform"),
    ("GET", "/v1/keys", "platform"),
    ("DELETE", "/v1/keys/0123456789abcdef", "platform"),
    ("GET", "/v1/resources/r", "read"),
    ("GET", "/v1/overview", "platform"),
    ("POST", "/v1/loops/sweep/pause", "platform"),
    ("POST", "/v1/loops/sweep/resume", "platform"),
    ("GET", "/v1/governor", "platform"),
    ("POST", "/v1/governor/pause", "platform"),
    ("POST", "/v1/governor/resume", "platform"),
    ("PUT", "/v1/governor/override", "platform"),
    ("DELETE", "/v1/governor/override", "platform"),
]


@pytest.fixture
async def api(start_api: Callable[..., Any]) -> Api:
    """Give the test an API without a queue: keys have nothing to do with it."""
    started: Api = await start_api(None)
    return started


async def test_every_endpoint_is_in_the_matrix(api: Api) -> None:
    """Nothing under /v1 is forgotten here, and nothing outside needs a key."""
    router = api.client.app.router
    known = {(r.method, r.resource.canonical) for r in router.routes() if r.resource and r.method != "HEAD"}
    closed = {(m, p) for m, p in known if p.startswith("/v1/")}
    assert len(closed) == len(ENDPOINTS)
    assert known - closed == {
        ("GET", p) for p in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/docs")
    }


@pytest.mark.parametrize(("method", "path", "scope"), ENDPOINTS)
async def test_the_scope_decides(
    api: Api, conn: asyncpg.Connection[asyncpg.Record], method: str, path: str, scope: str
) -> None:
    """Without a key 401; with every scope but the one needed 403; with that one alone it goes on."""
    await problem(await api.ask(method, path, key=None), 401, "unauthenticated")
    for has in keys.SCOPES:
        tenant_id = None if has == "platform" else "shop"
        key = await keys.create(conn, tenant_id=tenant_id, scopes=[has])
        response = await api.ask(method, path, key=key)
        if has == scope:
            assert response.status not in (401, 403)
        else:
            await problem(response, 403, "forbidden")


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic ZGVtbw==",
        TENANT,
        "Bearer wrong",
        f"Bearer {TENANT}x",
        "Bearer " + "x" * 513,
        "Bearer \xff\xfe",
    ],
)
async def test_a_key_that_is_none_is_401(api: Api, authorization: str) -> None:
    """Missing, of another scheme, unknown, too long or no text at all."""
    response = await api.ask("GET", "/v1/resources/r", key=None, headers={"Authorization": authorization})
    await problem(response, 401, "unauthenticated")
    assert response.headers["WWW-Authenticate"].startswith("Bearer")


async def test_the_scheme_has_no_case(api: Api) -> None:
    """RFC 9110: bearer is Bearer."""
    response = await api.ask(
        "PUT",
        "/v1/resources/r",
        key=None,
        headers={"Authorization": f"bEARER  {TENANT}"},
        json={"capacity": 1},
    )
    assert response.status == 200


async def test_another_tenants_hold_is_not_there(api: Api) -> None:
    """404 for reading and for every change, as for an id that nobody has."""
    hold = await api.placed()
    path = f"/v1/holds/{hold['id']}"
    await problem(await api.ask("GET", path, key=OTHER_TENANT), 404, "not_found")
    for verb, body in (("renew", {"ttl_s": 5}), ("confirm", {}), ("release", {}), ("return", {})):
        await problem(await api.ask("POST", f"{path}/{verb}", key=OTHER_TENANT, json=body), 404, "not_found")
    assert (await api.hold(hold))["generation"] == 1


async def test_tenants_do_not_share_resources(api: Api) -> None:
    """The same name is another resource, with a capacity of its own."""
    await api.declare(capacity=1)
    await api.placed()
    await problem(await api.ask("GET", "/v1/resources/seat", key=OTHER_TENANT), 404, "not_found")
    assert (await api.place(key=OTHER_TENANT)).status == 201


async def test_a_platform_key_places_nothing(api: Api) -> None:
    """It has no tenant to place for."""
    await problem(await api.place(key=PLATFORM), 403, "forbidden")


async def test_a_key_without_its_scheme_is_told(api: Api) -> None:
    """The most usual slip has its own sentence, which does not repeat the key."""
    for given, said in (
        (TENANT, "begins with the word Bearer"),
        (f"Basic {TENANT}", "begins with the word Bearer"),
        ("Bearer", "Send a valid API key"),
        ("Bearer nobodys", "Send a valid API key"),
    ):
        response = await api.ask("GET", "/v1/resources/r", key=None, headers={"Authorization": given})
        detail = (await problem(response, 401, "unauthenticated"))["detail"]
        assert said in detail
        assert TENANT not in detail


# --- keys


async def test_a_key_is_shown_once_and_stored_as_a_hash(conn: asyncpg.Connection[asyncpg.Record]) -> None:
    """Neither the table nor the list has anything to log in with."""
    key = await keys.create(conn, tenant_id="shop", scopes=["read", "holds", "read"], name="till 3")
    assert key.startswith("exk_")
    assert len(key) > 40
    assert await keys.create(conn, tenant_id="shop", scopes=["read"]) != key
    listed = await keys.list_(conn, tenant_id="shop")
    assert (listed[0]["id"], listed[0]["scopes"], listed[0]["name"]) == (
        keys.key_id(key),
        ["holds", "read"],
        "till 3",
    )
    assert key not in str(await conn.fetch("SELECT * FROM api_keys"))
    assert await keys.list_(conn, tenant_id="other") == []


async def test_any_string_can_be_a_key(api: Api, conn: asyncpg.Connection[asyncpg.Record]) -> None:
    """Registering it again changes it, and revives it: `expiry dev --api-key demo` may run twice."""
    assert await keys.create(conn, tenant_id="shop", scopes=["read"], key="demo") == "demo"
    await problem(await api.ask("GET", "/v1/resources/r", key="demo"), 404, "not_found")
    await keys.revoke(conn, keys.key_id("demo"))
    await keys.create(conn, tenant_id="shop", scopes=["read", "holds"], key="demo")
    (listed,) = [k for k in await keys.list_(conn) if k["id"] == keys.key_id("demo")]
    assert (listed["scopes"], listed["revoked_at"]) == (["holds", "read"], None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant_id": "t", "scopes": []},
        {"tenant_id": "t", "scopes": ["write"]},
        {"tenant_id": "t", "scopes": ["read", "platform"]},
        {"tenant_id": None, "scopes": ["read"]},
        {"tenant_id": None, "scopes": ["platform", "holds"]},
        {"tenant_id": "", "scopes": ["read"]},
        {"tenant_id": "x" * 256, "scopes": ["read"]},
        {"tenant_id": "t", "scopes": ["read"], "key": ""},
        {"tenant_id": "t", "scopes": ["read"], "key": "a b"},
        {"tenant_id": "t", "scopes": ["read"], "key": "é"},
        {"tenant_id": "t", "scopes": ["read"], "key": "x" * 513},
    ],
)
async def test_a_key_that_cannot_be_used_is_not_made(
    conn: asyncpg.Connection[asyncpg.Record], wrong: dict[str, Any]
) -> None:
    """Scopes, tenant and key must fit together, and into a header."""
    with pytest.raises(errors.OutOfRangeError):
        await keys.create(conn, **wrong)
    assert await keys.list_(conn) == []


async def test_a_revoked_key_ends_within_the_time_it_is_remembered(
    pool: asyncpg.Pool[asyncpg.Record],
) -> None:
    """Known keys cost no query; after CACHE_S the table is asked again."""
    now_s = 0.0
    ring = keys.KeyRing(pool, clock=lambda: now_s)
    key = await keys.create(pool, tenant_id="shop", scopes=["read"])  # type: ignore[arg-type]
    expected = keys.Principal(keys.key_id(key), "shop", frozenset({"read"}))
    assert await ring.verify(key) == expected
    await keys.revoke(pool, keys.key_id(key))  # type: ignore[arg-type]
    assert await ring.verify(key) == expected
    now_s = keys.CACHE_S
    assert await ring.verify(key) is None
    assert keys.CACHE_S <= 5


async def test_a_revoked_key_cannot_be_found_out(conn: asyncpg.Connection[asyncpg.Record]) -> None:
    """Revoking twice keeps the first time; an unknown id is told."""
    key = await keys.create(conn, tenant_id="shop", scopes=["read"])
    await keys.revoke(conn, keys.key_id(key))
    (first,) = await keys.list_(conn)
    await keys.revoke(conn, keys.key_id(key))
    (second,) = await keys.list_(conn)
    assert first["revoked_at"] == second["revoked_at"] is not None
    with pytest.raises(errors.KeyNotFoundError):
        await keys.revoke(conn, "0" * 16)


async def test_a_hash_must_match_to_the_last_bit(
    pool: asyncpg.Pool[asyncpg.Record],
) -> None:
    """The id finds the row; the hash alone lets in."""
    key = await keys.create(pool, tenant_id="shop", scopes=["read"])  # type: ignore[arg-type]
    await pool.execute("UPDATE api_keys SET hash = set_bit(hash, 255, 1 - get_bit(hash, 255))")
    assert await keys.KeyRing(pool).verify(key) is None


async def test_use_is_noted_at_most_once_a_minute(pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Many requests at once, and many rounds of the cache, write once; a minute later again."""
    now_s = 0.0
    ring = keys.KeyRing(pool, clock=lambda: now_s)
    key = await keys.create(pool, tenant_id="shop", scopes=["read"])  # type: ignore[arg-type]
    await asyncio.gather(*(ring.verify(key) for _ in range(50)))
    first = await pool.fetchval("SELECT last_used_at FROM api_keys")
    assert first is not None
    now_s = 59.0
    await ring.verify(key)
    assert await pool.fetchval("SELECT last_used_at FROM api_keys") == first
    await pool.execute("UPDATE api_keys SET last_used_at = last_used_at - interval '61 s'")
    now_s = 120.0
    await ring.verify(key)
    assert await pool.fetchval("SELECT last_used_at FROM api_keys") > first


async def test_who_asks_for_a_key_waits_once_for_a_busy_database(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests with one key give up together, not one after the other."""
    monkeypatch.setattr(keys, "ACQUIRE_S_MAX", 0.2)
    async with asyncpg.create_pool(database_url, min_size=1, max_size=1) as pool, pool.acquire():
        ring = keys.KeyRing(pool)
        async with asyncio.timeout(2):
            found = await asyncio.gather(*(ring.verify("k") for _ in range(20)), return_exceptions=True)
    assert {type(each) for each in found} == {TimeoutError}
