"""Keys over HTTP: made and shown once, listed, revoked; a quota for each; none of them in any log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from expiry import keys
from tests.api_client import PLATFORM, TENANT, Api, problem, read
from tests.scene import Pool


async def make(api: Api, *, once: str | None = None, **asked: Any) -> Any:  # noqa: ANN401 - fields
    """Make a key with the platform's key."""
    headers = {} if once is None else {"Idempotency-Key": once}
    return await api.ask(
        "POST", "/v1/keys", key=PLATFORM, headers=headers, json={"tenant_id": "shop", **asked}
    )


async def listed(api: Api, **query: str) -> list[dict[str, Any]]:
    """List keys."""
    response = await api.ask("GET", "/v1/keys", key=PLATFORM, params=query)
    assert response.status == 200
    found: list[dict[str, Any]] = (await read(response))["keys"]
    return found


async def test_a_key_that_was_made_works(api: Api, pool: Pool) -> None:
    """With the scopes that were asked for; all that such a key can have where none were."""
    response = await make(api, name="till", scopes=["read"])
    assert response.status == 201
    made = await read(response)
    assert (made["tenant_id"], made["scopes"], made["name"]) == ("shop", ["read"], "till")
    assert made["id"] == keys.key_id(made["key"])
    assert (await api.ask("GET", "/v1/resources", key=made["key"])).status == 200
    await problem(await api.place(key=made["key"]), 403, "forbidden")
    assert (await read(await make(api)))["scopes"] == ["holds", "operate", "read"]
    platform = await read(await make(api, tenant_id=None))
    assert (await api.ask("GET", "/v1/overview", key=platform["key"])).status == 200
    assert made["key"] not in str(await pool.fetch("SELECT * FROM api_keys"))


async def test_a_repeated_request_makes_one_key_and_shows_it_once(api: Api, pool: Pool) -> None:
    """The key is stored nowhere, so a replay cannot have it."""
    first = await read(await make(api, once="k", name="a"))
    response = await make(api, once="k", name="a")
    again = await read(response)
    assert response.headers["Idempotent-Replayed"] == "true"
    assert again == first | {"key": None}
    assert first["key"] not in str(await pool.fetch("SELECT response::text FROM idempotency_keys"))
    await problem(await make(api, once="k", name="b"), 422, "key_reused")
    assert len(await listed(api, tenant_id="shop")) == 2


async def test_keys_are_listed_without_their_secrets(api: Api) -> None:
    """Of one tenant or of all, in pages, with last use."""
    made = [await read(await make(api, name=f"k{n}")) for n in range(3)]
    await api.ask("GET", "/v1/resources", key=made[0]["key"])
    found = await listed(api, tenant_id="shop")
    assert [k["id"] for k in found] == [keys.key_id(TENANT), *(m["id"] for m in made)]
    assert all("key" not in k for k in found)
    assert found[1]["last_used_at"] is not None
    assert found[2]["last_used_at"] is None
    assert len(await listed(api)) == 6
    response = await api.ask("GET", "/v1/keys", key=PLATFORM, params={"limit": "4"})
    first = await read(response)
    rest = await listed(api, cursor=first["next_cursor"])
    assert [k["id"] for k in first["keys"] + rest] == [k["id"] for k in await listed(api)]


async def test_a_revoked_key_is_refused_at_once_here(api: Api) -> None:
    """Elsewhere within seconds; repeating it is harmless, an unknown id is 404."""
    made = await read(await make(api))
    assert (await api.ask("GET", "/v1/resources", key=made["key"])).status == 200
    for _ in range(2):
        response = await api.ask("DELETE", f"/v1/keys/{made['id']}", key=PLATFORM)
        assert (response.status, await response.read()) == (204, b"")
        await problem(await api.ask("GET", "/v1/resources", key=made["key"]), 401, "unauthenticated")
    [found] = [k for k in await listed(api) if k["id"] == made["id"]]
    assert found["revoked_at"] is not None
    for nobody in ("nobody", "%00", "0" * 16, "x" * 300):
        await problem(await api.ask("DELETE", f"/v1/keys/{nobody}", key=PLATFORM), 404, "not_found")


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"scopes": []}, "invalid"),
        ({"scopes": ["write"]}, "invalid"),
        ({"tenant_id": ""}, "invalid"),
        ({"tenant_id": "x" * 256}, "invalid"),
        ({"name": "x" * 101}, "invalid"),
        ({"key": "mine"}, "invalid"),
        ({"scopes": ["platform"]}, "out_of_range"),
        ({"tenant_id": None, "scopes": ["read"]}, "out_of_range"),
    ],
)
async def test_a_key_that_cannot_be_is_refused(api: Api, asked: dict[str, Any], code: str) -> None:
    """Scopes and tenant must fit together."""
    await problem(await make(api, **asked), 422, code)


async def test_guessing_keys_keeps_nobody_out(api: Api) -> None:
    """Many unknown keys at once are all 401, and who is known goes on meanwhile."""
    assert (await api.ask("GET", "/v1/resources")).status == 200
    guesses = [api.ask("GET", "/v1/resources", key=f"guess-{n}") for n in range(200)]
    known = [api.ask("GET", "/v1/resources") for _ in range(20)]
    answers = await asyncio.gather(*guesses, *known)
    assert {a.status for a in answers[:200]} == {401}
    assert {a.status for a in answers[200:]} == {200}


async def test_no_key_is_in_any_log(api: Api, conn: asyncpg.Connection[asyncpg.Record]) -> None:
    """Neither good nor bad ones, neither in refusals nor when the database fails."""
    with capture_logs() as logs:
        made = await read(await make(api))
        for key in (made["key"], "a-bad-key"):
            await api.place(key=key)
            await api.ask("POST", "/v1/holds", key=key, data=b"{")
            await api.ask("GET", "/v1/nothing", key=key)
        await conn.execute("DROP TABLE api_keys CASCADE")
        await problem(await api.ask("GET", "/v1/resources", key="a-bad-key"), 503, "unavailable")
    assert logs
    for secret in (made["key"], "a-bad-key", TENANT, PLATFORM):
        assert secret not in str(logs)


# --- quota


async def test_a_key_has_its_quota(start_api: Callable[..., Any]) -> None:
    """A second's worth at once, then 429 with Retry-After; other keys have their own."""
    api: Api = await start_api(None, api_rate_per_s=3)
    statuses = [(await api.ask("GET", "/v1/resources")).status for _ in range(3)]
    assert statuses == [200] * 3
    refused = await api.ask("GET", "/v1/resources")
    await problem(refused, 429, "quota")
    assert int(refused.headers["Retry-After"]) >= 1
    assert (await api.ask("GET", "/v1/overview", key=PLATFORM)).status == 200
    assert (await api.ask("GET", "/healthz", key=None)).status == 200


async def test_a_batch_counts_its_holds(start_api: Callable[..., Any]) -> None:
    """It is answered, and what follows waits for all of it."""
    api: Api = await start_api(None, api_rate_per_s=5)
    holds = [{"ttl_s": 60, "resource_id": "r"}] * 40
    batch = await api.ask("POST", "/v1/holds/batch", headers={"Idempotency-Key": "k"}, json={"holds": holds})
    assert batch.status == 200
    refused = await api.ask("GET", "/v1/resources")
    await problem(refused, 429, "quota")
    assert int(refused.headers["Retry-After"]) >= 6


async def test_there_is_no_quota_unless_asked_for(api: Api) -> None:
    """Off by default."""
    answers = await asyncio.gather(*(api.ask("GET", "/v1/resources") for _ in range(100)))
    assert {a.status for a in answers} == {200}


# --- Idempotency-Key on every other POST


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_a_loop_is_paused_once_per_key(api: Api, pool: Pool, verb: str) -> None:
    """A replay answers as the first time and changes nothing; another body is refused."""
    path, headers = f"/v1/loops/sweep/{verb}", {"Idempotency-Key": "k"}
    first = await api.ask("POST", path, key=PLATFORM, headers=headers, json={"reason": "why"})
    await pool.execute("UPDATE loops SET paused = NOT paused, reason = 'else'")
    again = await api.ask("POST", path, key=PLATFORM, headers=headers, json={"reason": "why"})
    assert again.headers["Idempotent-Replayed"] == "true"
    assert await read(again) == await read(first)
    assert await pool.fetchval("SELECT reason FROM loops") == "else"
    other = await api.ask("POST", path, key=PLATFORM, headers=headers, json={"reason": "why not"})
    await problem(other, 422, "key_reused")
