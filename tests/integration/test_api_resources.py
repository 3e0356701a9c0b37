from __future__ import annotations

from urllib.parse import quote

import asyncpg
import pytest

from expiry import resources
from tests.api_client import Api, make_overdue, problem, read


async def test_a_declared_resource_shows_its_counters(api: Api) -> None:
    """Held, confirmed and available move with the holds."""
    assert await api.declare(capacity=10) == {
        "resource_id": "seat",
        "capacity": 10,
        "held": 0,
        "confirmed": 0,
        "available": 10,
    }
    first = await api.placed(quantity=3)
    await api.placed(quantity=4)
    await api.verb(first, "confirm")
    found = await api.resource()
    assert [found[f] for f in ("held", "confirmed", "available")] == [4, 3, 3]
    await api.verb(first, "return")
    assert (await api.resource())["available"] == 6


async def test_available_leaves_out_overdue_holds(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """First and further items of a hold alike; declared later counts what was held before."""
    await api.placed(quantity=2)
    await api.placed(items=[{"resource_id": "a"}, {"resource_id": "seat", "quantity": 3}])
    await api.declare(capacity=10)
    assert (await api.resource())["available"] == 5
    await make_overdue(pool)
    found = await api.resource()
    assert (found["held"], found["available"]) == (5, 10)


async def test_c17_a_lowered_capacity_keeps_holds(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """C17: below what is held nothing is available and nothing new is placed, until enough has ended."""
    await api.declare(capacity=5)
    held = [await api.placed(quantity=2), await api.placed(quantity=2)]
    lowered = await api.declare(capacity=3)
    assert [lowered[f] for f in ("capacity", "held", "available")] == [3, 4, 0]
    refused = await problem(await api.place(), 409, "insufficient_capacity")
    assert refused["available"] == 0
    assert [(await api.hold(h))["state"] for h in held] == ["held", "held"]
    assert await pool.fetchval("SELECT lowered_at IS NOT NULL FROM resources") is True
    await api.verb(held[0], "release")
    assert await pool.fetchval("SELECT lowered_at IS NULL FROM resources") is True
    await api.placed(quantity=1)
    assert (await api.resource())["available"] == 0


async def test_without_a_limit_nothing_is_scarce(api: Api) -> None:
    """Capacity null counts and never refuses."""
    await api.declare(capacity=None)
    await api.placed(quantity=1_000_000_000)
    found = await api.resource()
    assert (found["capacity"], found["held"], found["available"]) == (None, 1_000_000_000, None)


async def test_a_resource_never_declared_is_404(api: Api) -> None:
    """It has no row, also while it is held."""
    await api.placed()
    await problem(await api.ask("GET", "/v1/resources/seat"), 404, "not_found")


IDS = [
    "room-12/2026-12-24",
    "a/b/c",
    "/",
    "a%2Fb",
    "a b+c",
    "100%",
    "é\U0001f600",
    "?x=1#y",
    "..",
    ".",
    "x" * 255,
    "é" * 255,
    '"\\',
]


async def test_any_id_can_be_declared(api: Api, subtests: pytest.Subtests) -> None:
    """Percent-encoded in the path, it is the id that a hold names in its body."""
    for resource_id in IDS:
        with subtests.test(resource_id=resource_id):
            path = f"/v1/resources/{quote(resource_id, safe='').replace('.', '%2E')}"
            response = await api.raw("PUT", path, b'{"capacity": 1}')
            assert (await read(response))["resource_id"] == resource_id
            await api.placed(resource_id=resource_id)
            found = await read(await api.raw("GET", path))
            assert (found["resource_id"], found["held"]) == (resource_id, 1)


@pytest.mark.parametrize(
    ("segment", "status", "code"),
    [
        ("%FF", 400, "malformed"),
        ("%ED%A0%80", 400, "malformed"),
        ("a%00b", 400, "malformed"),
        ("x" * 256, 422, "invalid"),
        ("", 404, "not_found"),
        ("a/b", 404, "not_found"),
    ],
)
async def test_an_id_that_cannot_be_is_refused(api: Api, segment: str, status: int, code: str) -> None:
    """What is no UTF-8, has a NUL or is too long; a slash belongs encoded."""
    response = await api.raw("PUT", f"/v1/resources/{segment}", b'{"capacity": 1}')
    await problem(response, status, code)


@pytest.mark.parametrize("capacity", ["-1", "1.0", "true", '"1"', "2147483648", "1e3", "[]"])
async def test_a_capacity_is_a_whole_number_or_null(api: Api, capacity: str) -> None:
    """422 points at it; without the field too."""
    response = await api.raw("PUT", "/v1/resources/r", f'{{"capacity": {capacity}}}'.encode())
    found = await problem(response, 422, "invalid")
    assert found["errors"][0]["pointer"] == "#/capacity"
    await problem(await api.ask("PUT", "/v1/resources/r", json={}), 422, "invalid")


async def test_the_sum_of_overdue_units_is_bounded(
    conn: asyncpg.Connection[asyncpg.Record],
    api: Api,
    pool: asyncpg.Pool[asyncpg.Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond OVERDUE_MAX holds `available` errs to the safe side."""
    monkeypatch.setattr(resources, "OVERDUE_MAX", 2)
    await api.declare(capacity=5)
    for _ in range(3):
        await api.placed()
    await make_overdue(pool)
    found = await resources.get(conn, "seat", tenant_id="shop")
    assert (found.held, found.available) == (3, 4)
