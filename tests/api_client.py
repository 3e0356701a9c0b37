"""The API as a client sees it: an application on a free port, keys, and short ways to ask it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import uuid4

import asyncpg
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient
from yarl import URL

from expiry.wakeups import Wakeups
from governor import Bucket

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
CHANGES = ("renew", "confirm", "release", "return")
# one backend that waits for a lock
WAITING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
TENANT, OTHER_TENANT, PLATFORM = "exk_tenant", "exk_other", "exk_platform"


@dataclass
class Api:
    """One running API. Requests carry the tenant's key unless told otherwise."""

    client: TestClient[Any, Any]
    wakeups: Wakeups | None
    bucket: Bucket
    failing: dict[str, str] = field(default_factory=dict)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        key: str | None = TENANT,
        headers: Mapping[str, str] | None = None,
        **body: Any,  # noqa: ANN401 - json= or data=, as aiohttp takes them
    ) -> ClientResponse:
        """Send one request and read its answer to the end."""
        auth = {} if key is None else {"Authorization": f"Bearer {key}"}
        response = await self.client.request(method, path, headers={**auth, **(headers or {})}, **body)
        await response.read()
        return response

    async def raw(self, method: str, path: str, body: bytes | None = None) -> ClientResponse:
        """Send a path and a JSON body as they stand: nothing is encoded or normalised on the way."""
        url = URL(str(self.client.make_url("/")).rstrip("/") + path, encoded=True)
        headers = {"Authorization": f"Bearer {TENANT}", "Content-Type": "application/json"}
        response = await self.client.session.request(method, url, headers=headers, data=body)
        await response.read()
        return response

    async def place(self, *, key: str = TENANT, once: str | None = None, **asked: object) -> ClientResponse:
        """Place a hold on one unit of `seat` for a minute, or what is asked instead."""
        document = {"ttl_s": 60, **({} if "items" in asked else {"resource_id": "seat"}), **asked}
        if "expires_at" in asked:
            del document["ttl_s"]
        return await self.ask(
            "POST", "/v1/holds", key=key, headers={"Idempotency-Key": once or str(uuid4())}, json=document
        )

    async def placed(self, **asked: Any) -> dict[str, Any]:  # noqa: ANN401 - as place
        """Place a hold that must succeed, and answer it."""
        response = await self.place(**asked)
        assert response.status == 201, await response.text()
        return await read(response)

    async def verb(
        self,
        hold: Mapping[str, Any],
        verb: str,
        *,
        headers: Mapping[str, str] | None = None,
        **asked: Any,  # noqa: ANN401 - fields of the body
    ) -> ClientResponse:
        """Renew, confirm, release or return a hold."""
        return await self.ask("POST", f"/v1/holds/{hold['id']}/{verb}", headers=headers, json=asked)

    async def hold(self, hold: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the hold as it is now."""
        return await read(await self.ask("GET", f"/v1/holds/{hold['id']}"))

    async def declare(self, resource_id: str = "seat", *, capacity: int | None = 1) -> dict[str, Any]:
        """Declare a resource."""
        response = await self.ask("PUT", f"/v1/resources/{resource_id}", json={"capacity": capacity})
        assert response.status == 200, await response.text()
        return await read(response)

    async def resource(self, resource_id: str = "seat") -> dict[str, Any]:
        """Answer a resource as it is now."""
        return await read(await self.ask("GET", f"/v1/resources/{resource_id}"))


async def read(response: ClientResponse) -> dict[str, Any]:
    """Answer the JSON object of a response."""
    document = await response.json(content_type=None)
    assert isinstance(document, dict)
    return document


async def problem(response: ClientResponse, status: int, code: str) -> dict[str, Any]:
    """Check that the answer is this problem, as RFC 9457 has it, and answer it."""
    assert (response.status, response.content_type) == (status, "application/problem+json"), (
        await response.text()
    )
    found = await read(response)
    assert (found["status"], found["code"]) == (status, code)
    assert all(isinstance(found[member], str) for member in ("type", "title", "detail", "instance"))
    assert ("Retry-After" in response.headers) == (status in (429, 503) or code == "key_in_progress")
    return found


async def make_overdue(pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Let the deadline of every held hold have passed a second ago."""
    await pool.execute(
        "UPDATE holds SET placed_at = statement_timestamp() - (expires_at - placed_at) - interval '1 s', "
        "expires_at = statement_timestamp() - interval '1 s' WHERE state = 'held'"
    )


def every_change(*, ttl_s: float) -> list[tuple[str, dict[str, Any]]]:
    """Answer each verb with a body that suits it."""
    return [(verb, {"ttl_s": ttl_s} if verb == "renew" else {}) for verb in CHANGES]


def at(text: str) -> datetime:
    """Read a time of the wire, which has exactly one form."""
    assert TIME.fullmatch(text)
    return datetime.fromisoformat(text)
