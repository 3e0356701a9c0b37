"""Lists of holds and resources: whole under concurrent change, filtered as said, strict about what is asked."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pydantic import TypeAdapter

from expiry import listing
from expiry.api import cursor as cursors
from expiry.wire.queries import EventsQuery, HoldsQuery, KeysQuery, Query, ResourcesQuery
from tests.api_client import OTHER_TENANT, PLATFORM, TENANT, Api, make_overdue, problem, read
from tests.scene import Pool

NOBODY = "00000000-0000-0000-0000-000000000001"


async def page(api: Api, path: str = "/v1/holds", **query: Any) -> dict[str, Any]:  # noqa: ANN401 - parameters
    """Read one page."""
    response = await api.ask("GET", path, params={k: str(v) for k, v in query.items()})
    assert response.status == 200, await response.text()
    return await read(response)


async def all_of(api: Api, path: str = "/v1/holds", *, limit: int = 2, **query: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Read all pages; answer what is in them, in order."""
    [member] = {"holds", "resources", "keys"} & {path.rpartition("/")[2]}
    found: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    for _ in range(100):
        answer = await page(api, path, limit=limit, **query, **cursor)
        assert len(answer[member]) <= limit
        found += answer[member]
        if answer["next_cursor"] is None:
            return found
        cursor = {"cursor": answer["next_cursor"]}
    raise AssertionError("the pages do not end")


def ids(holds: list[dict[str, Any]]) -> list[str]:
    """Answer their ids."""
    return [h["id"] for h in holds]


async def test_held_holds_by_deadline(api: Api) -> None:
    """The earliest deadline first; another tenant's are not there."""
    placed = [await api.placed(ttl_s=ttl_s) for ttl_s in (300, 100, 200, 400, 50)]
    await api.placed(key=OTHER_TENANT)
    gone = await api.placed()
    await api.verb(gone, "release")
    found = await all_of(api, state="held")
    assert ids(found) == ids(sorted(placed, key=lambda h: h["expires_at"]))
    assert found[0] | {"server_time": "", "expires_in_s": 0} == placed[4] | {
        "server_time": "",
        "expires_in_s": 0,
    }


async def test_without_a_state_what_has_not_ended(api: Api, pool: Pool) -> None:
    """Overdue or not, of all, of a resource, of a holder."""
    late = await api.placed(holder="h", resource_id="r", ttl_s=10)
    await make_overdue(pool)
    held = await api.placed(holder="h", resource_id="r")
    gone = await api.placed(holder="h", resource_id="r")
    await api.verb(gone, "confirm")
    queries: list[dict[str, Any]] = [
        {},
        {"holder": "h"},
        {"resource_id": "r"},
        {"holder": "h", "resource_id": "r"},
    ]
    for query in queries:
        found = await all_of(api, **query)
        assert [(h["id"], h["state"]) for h in found] == [(late["id"], "expired"), (held["id"], "held")]


async def test_what_is_overdue(api: Api, pool: Pool) -> None:
    """Past the deadline and not ended: shown as expired, and not among the held."""
    late = [await api.placed(ttl_s=n) for n in (10, 20, 30)]
    await make_overdue(pool)
    held = await api.placed()
    found = await all_of(api, overdue="true")
    assert sorted(ids(found)) == sorted(ids(late))
    assert {h["state"] for h in found} == {"expired"}
    assert ids(await all_of(api, state="held")) == [held["id"]]
    assert ids(await all_of(api, overdue="false")) == [held["id"]]
    assert len(await all_of(api, state="held", overdue="true")) == 3
    assert len(await all_of(api, state="expired", overdue="true")) == 3


async def test_what_expires_soon(api: Api) -> None:
    """Before a time, by deadline."""
    first, second, _third = [await api.placed(ttl_s=n) for n in (100, 200, 300)]
    before = (await api.hold(_third))["expires_at"]
    assert ids(await all_of(api, expires_before=before)) == [first["id"], second["id"]]
    assert ids(await all_of(api, expires_before=before, state="held")) == [first["id"], second["id"]]


async def test_the_holds_of_a_resource(api: Api) -> None:
    """As first item or as a later one, in one order."""
    one = await api.placed(resource_id="room", ttl_s=300)
    both = await api.placed(items=[{"resource_id": "a"}, {"resource_id": "room"}], ttl_s=200)
    first = await api.placed(items=[{"resource_id": "room"}, {"resource_id": "a"}], ttl_s=100)
    await api.placed(resource_id="other")
    assert ids(await all_of(api, resource_id="room", state="held")) == ids([first, both, one])
    assert ids(await all_of(api, resource_id="room", state="held", limit=1)) == ids([first, both, one])
    assert ids(await all_of(api, resource_id="a", state="held")) == ids([first, both])


async def test_the_holds_of_a_holder(api: Api) -> None:
    """The oldest first; further filters may leave pages short."""
    mine = [await api.placed(holder="h", resource_id=f"r{n % 2}") for n in range(5)]
    await api.placed(holder="i")
    assert ids(await all_of(api, holder="h", state="held")) == ids(mine)
    assert ids(await all_of(api, holder="h", state="held", resource_id="r1")) == ids(mine[1::2])


async def test_the_holds_of_an_order(api: Api, pool: Pool) -> None:
    """By reference in any state, or in one of them."""
    made = [await api.placed(external_ref="o") for _ in range(5)]
    await api.verb(made[0], "confirm")
    await api.verb(made[1], "release")
    await api.verb(made[2], "confirm")
    await api.verb(made[2], "return")
    await make_overdue(pool)
    fresh = await api.placed(external_ref="o")
    assert ids(await all_of(api, external_ref="o")) == ids([*made, fresh])
    for state, expected in (
        ("confirmed", [made[0]]),
        ("released", [made[1]]),
        ("returned", [made[2]]),
        ("expired", made[3:]),
        ("held", [fresh]),
    ):
        assert ids(await all_of(api, external_ref="o", state=state)) == ids(expected)
    assert ids(await all_of(api, external_ref="o", overdue="true")) == ids(made[3:])
    assert await all_of(api, external_ref="nobody") == []


async def test_a_page_looks_at_a_bounded_number_of_rows(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """What matches far behind is found by following the cursor through short and empty pages."""
    monkeypatch.setattr(listing, "SCAN_MAX", 5)
    for _ in range(12):
        await api.placed(external_ref="o")
    last = await api.placed(external_ref="o")
    await api.verb(last, "confirm")
    first = await page(api, external_ref="o", state="confirmed", limit=2)
    assert first["holds"] == []
    assert first["next_cursor"] is not None
    assert ids(await all_of(api, external_ref="o", state="confirmed")) == [last["id"]]


@pytest.mark.parametrize(
    "query",
    [
        {"state": "released"},
        {"state": "expired"},
        {"state": "expired", "overdue": "false"},
        {"state": "confirmed", "overdue": "true"},
        {"state": "confirmed", "holder": "h"},
        {"state": "returned", "holder": "h", "resource_id": "r"},
        {"state": "expired", "expires_before": "2030-01-01T00:00:00Z"},
    ],
)
async def test_what_no_index_serves_is_said(api: Api, query: dict[str, str]) -> None:
    """422 with what to add, instead of a slow answer."""
    found = await problem(await api.ask("GET", "/v1/holds", params=query), 422, "invalid")
    assert found["errors"][0]["pointer"] == "?state"
    assert "external_ref" in found["errors"][0]["detail"]


@pytest.mark.parametrize(
    ("query", "pointer"),
    [
        ("state=held&limit=0", "?limit"),
        ("state=held&limit=201", "?limit"),
        ("state=held&limit=x", "?limit"),
        ("state=held&limit=" + "9" * 5000, "?limit"),
        ("state=hold", "?state"),
        ("overdue=yes", "?overdue"),
        ("overdue=1", "?overdue"),
        ("state=held&resource=r", "?resource"),
        ("state=held&state=held", "?state"),
        ("state=held&holder=", "?holder"),
        ("state=held&holder=" + "x" * 256, "?holder"),
        ("expires_before=tomorrow", "?expires_before"),
        ("state=held&cursor=x", "?cursor"),
        ("state=held&cursor=%F0%9F%98%80", "?cursor"),
        ("state=held&cursor=" + "A" * 1024, "?cursor"),
        ("state=held&cursor=", "?cursor"),
    ],
)
async def test_parameters_are_read_strictly(api: Api, query: str, pointer: str) -> None:
    """Unknown, repeated, out of range: 422 that names the parameter."""
    found = await problem(await api.raw("GET", f"/v1/holds?{query}"), 422, "invalid")
    assert [e["pointer"] for e in found["errors"]] == [pointer]


async def test_nul_in_a_query_is_refused(api: Api) -> None:
    """PostgreSQL could not compare it."""
    for path in ("/v1/holds?state=held&holder=a%00", "/v1/resources?prefix=%00", "/v1/holds?%00=1"):
        await problem(await api.raw("GET", path), 400, "malformed")
    assert (await api.raw("GET", "/v1/resources?prefix=%FF%FE")).status in (200, 400)


@pytest.mark.parametrize(
    ("path", "query", "places"),
    [
        (
            "/v1/events",
            EventsQuery(),
            ([10**23, 1, 1], [1, 10**23, 1], [1, 1, 2**63], [1, -5, 1], [1, 1], "x", [1, 1, 1.5]),
        ),
        (
            "/v1/holds",
            HoldsQuery(),
            (
                ["0001-01-01T00:00:00+23:00", NOBODY],
                ["9999-12-31T23:59:59-23:59", NOBODY],
                ["2026-01-01T00:00:00", NOBODY],
                ["2026-01-01T00:00:00Z", "x"],
            ),
        ),
        ("/v1/resources", ResourcesQuery(), ("\0", "x" * 256, 1)),
        (
            "/v1/keys",
            KeysQuery(),
            (
                ["2026-01-01T00:00:00Z", "\0"],
                ["0001-01-01T00:00:00+23:00", ""],
                ["9999-12-31T23:59:59-23:59", ""],
            ),
        ),
    ],
)
async def test_a_cursor_that_was_never_given_is_refused(
    api: Api, path: str, query: Query, places: tuple[Any, ...]
) -> None:
    """What somebody makes up is 422, whatever it says."""
    key = PLATFORM if path == "/v1/keys" else TENANT
    name = "after" if path == "/v1/events" else "cursor"
    for place in places:
        made_up = cursors.write(place, TypeAdapter(Any), query)
        response = await api.ask("GET", path, key=key, params={name: made_up})
        await problem(response, 422, "invalid")


async def test_a_cursor_goes_with_its_filters(api: Api) -> None:
    """Used for another question it would answer nonsense; another limit is fine."""
    for _ in range(4):
        await api.placed(holder="h")
    cursor = (await page(api, state="held", limit=1))["next_cursor"]
    response = await api.ask("GET", "/v1/holds", params={"holder": "h", "state": "held", "cursor": cursor})
    await problem(response, 422, "invalid")
    assert len((await page(api, state="held", limit=9, cursor=cursor))["holds"]) == 3
    foreign = await api.ask("GET", "/v1/holds", key=OTHER_TENANT, params={"state": "held", "cursor": cursor})
    assert (await read(foreign))["holds"] == []


async def test_pages_are_whole_while_everything_changes(api: Api) -> None:
    """Holds that stay as they are come exactly once, whatever is placed, renewed and ended between two pages."""
    rng = random.Random(7)  # noqa: S311 - to be repeated
    still = [await api.placed(ttl_s=rng.randint(100, 900)) for _ in range(20)]
    moving = [await api.placed(ttl_s=rng.randint(100, 900)) for _ in range(20)]
    seen: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        answer = await page(api, state="held", limit=3, **cursor)
        seen += ids(answer["holds"])
        if answer["next_cursor"] is None:
            break
        cursor = {"cursor": answer["next_cursor"]}
        await api.placed(ttl_s=rng.randint(100, 900))
        if moving:
            await api.verb(moving.pop(), rng.choice(("release", "confirm")))
        if moving:
            await api.verb(moving[-1], "renew", ttl_s=rng.randint(100, 900))
    assert sorted(i for i in seen if i in ids(still)) == sorted(ids(still))


# --- resources


async def test_resources_by_prefix(api: Api) -> None:
    """In the order of bytes, with counters; what only looks like the prefix is not there."""
    names = ["a", "room-1", "room-10", "room-2", "Room-3", "room_4", "room-é", "room-%", "room-\U0010ffffx"]
    for name in names:
        response = await api.ask("PUT", f"/v1/resources/{_encoded(name)}", json={"capacity": 3})
        assert response.status == 200
    await api.placed(resource_id="room-1", quantity=2)
    found = await all_of(api, "/v1/resources", prefix="room-")
    expected = sorted((n for n in names if n.startswith("room-")), key=lambda n: n.encode())
    assert [r["resource_id"] for r in found] == expected
    assert found[1] == {"resource_id": "room-1", "capacity": 3, "held": 2, "confirmed": 0, "available": 1}
    assert len(await all_of(api, "/v1/resources")) == len(names)
    other = await api.ask("GET", "/v1/resources", key=OTHER_TENANT)
    assert (await read(other)) == {"resources": [], "next_cursor": None}


async def test_a_listed_resource_leaves_out_what_is_overdue(api: Api, pool: Pool) -> None:
    """Available as if the expiries had run."""
    await api.declare(capacity=1)
    await api.placed()
    await make_overdue(pool)
    [found] = await all_of(api, "/v1/resources")
    assert (found["held"], found["available"]) == (1, 1)


def _encoded(name: str) -> str:
    return "".join(f"%{byte:02X}" for byte in name.encode())
