"""The event feed on the wire: cursors, filters, what has expired. That it skips nothing: test_feed.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api_client import Api, problem, read
from tests.scene import Pool


async def page(api: Api, **query: Any) -> dict[str, Any]:  # noqa: ANN401 - parameters
    """Read one page."""
    response = await api.ask("GET", "/v1/events", params={k: str(v) for k, v in query.items()})
    assert response.status == 200, await response.text()
    return await read(response)


async def test_events_are_followed_with_a_cursor(api: Api) -> None:
    """Page after page, once each; the cursor of an empty page goes on."""
    hold = await api.placed(external_ref="o", holder="h")
    await api.verb(hold, "renew", ttl_s=90)
    await api.verb(hold, "release", reason="bye")
    first = await page(api, limit=2)
    assert [e["id"] for e in first["events"]] == [f"place:{hold['id']}:1", f"renew:{hold['id']}:2"]
    assert first["more"] is True
    second = await page(api, limit=2, after=first["next_cursor"])
    [event] = second["events"]
    assert (event["type"], event["generation"], event["sequence"]) == ("hold.released", 2, 3)
    assert event["data"] | {"by": ""} == {
        "items": [{"resource_id": "seat", "quantity": 1}],
        "holder": "h",
        "external_ref": "o",
        "expires_at": (await api.hold(hold))["expires_at"],
        "by": "",
        "reason": "bye",
    }
    third = await page(api, after=second["next_cursor"])
    assert (third["events"], third["more"]) == ([], False)
    await api.verb(await api.placed(), "confirm")
    fourth = await page(api, after=third["next_cursor"])
    assert [e["type"] for e in fourth["events"]] == ["hold.placed", "hold.confirmed"]
    only = await page(api, type="hold.confirmed", hold_id=fourth["events"][0]["hold_id"])
    assert len(only["events"]) == 1


async def test_an_expired_cursor_is_410(api: Api, pool: Pool) -> None:
    """Once events after it were pruned, the reader must be told."""
    await api.placed()
    cursor = (await page(api))["next_cursor"]
    await api.placed()
    assert await pool.fetchval("SELECT expiry_forget_events('shop', '2999-01-01', 10)") == 2
    await problem(await api.ask("GET", "/v1/events", params={"after": cursor}), 410, "cursor_expired")
    assert (await page(api))["events"] == []


@pytest.mark.parametrize(
    ("query", "pointer"),
    [
        ("after=x", "?after"),
        ("after=W10", "?after"),
        ("type=hold", "?type"),
        ("hold_id=x", "?hold_id"),
        ("limit=1001", "?limit"),
        ("limit=1.5", "?limit"),
        ("cursor=x", "?cursor"),
    ],
)
async def test_the_events_query_is_read_strictly(api: Api, query: str, pointer: str) -> None:
    """422 that names the parameter."""
    found = await problem(await api.raw("GET", f"/v1/events?{query}"), 422, "invalid")
    assert [e["pointer"] for e in found["errors"]] == [pointer]
