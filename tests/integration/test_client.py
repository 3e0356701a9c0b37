"""The client on a real API: every operation, typed answers, errors by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID, uuid4

import asyncpg
import pytest

import expiry
from expiry import errors
from expiry.client import Client, Item, PathNotFoundError, Wanted, as_error
from expiry.wire import problems
from expiry.wire.answers import PlacedResult, RefusedResult
from tests.api_client import PLATFORM, TENANT, Api, make_overdue
from tests.gateway import Clock, client_at, url_of


@pytest.fixture
async def client(api: Api) -> AsyncIterator[Client]:
    """Give the test the API by way of the tenant's client."""
    async with client_at(url_of(api)) as client:
        yield client


@pytest.fixture
async def platform(api: Api) -> AsyncIterator[Client]:
    """Give the test the API by way of the platform's client."""
    async with client_at(url_of(api), key=PLATFORM) as client:
        yield client


# --- every operation


async def test_a_hold_is_placed_with_all_it_can_have(client: Client) -> None:
    """What was asked is answered, typed."""
    old = await client.place("room-12", ttl_s=60)
    hold = await client.place(
        items=[Item("room-12", 2), Item("breakfast")],
        ttl_s=60,
        holder="customer",
        external_ref="cart-77",
        metadata={"channel": "web", "price": 1.5, "note": None},
        max_renewals=3,
        max_lifetime_s=3600,
        replaces=old.id,
    )
    assert isinstance(hold.id, UUID)
    assert (hold.state, hold.generation, hold.replayed) == ("held", 1, False)
    assert [(i.resource_id, i.quantity) for i in hold.items] == [("room-12", 2), ("breakfast", 1)]
    assert (hold.holder, hold.external_ref, hold.max_renewals) == ("customer", "cart-77", 3)
    assert hold.metadata == {"channel": "web", "price": 1.5, "note": None}
    assert hold.expires_at - hold.placed_at == timedelta(seconds=60)
    assert hold.lifetime_ends_at == hold.placed_at + timedelta(hours=1)
    assert (await client.get(old.id)).state == "released"


@pytest.mark.parametrize(
    ("ttl_s", "micros"),
    [
        (2, 2_000_000),
        (1.1, 1_100_000),
        (Decimal("1.000001"), 1_000_001),
        (timedelta(days=364, microseconds=999_999), 364 * 86_400_000_000 + 999_999),
    ],
)
async def test_a_deadline_is_exact(client: Client, ttl_s: float | Decimal | timedelta, micros: int) -> None:
    """In whatever form the seconds come, not a microsecond is lost on the way."""
    hold = await client.place("room-12", ttl_s=ttl_s)
    assert hold.expires_at - hold.placed_at == timedelta(microseconds=micros)


async def test_a_deadline_may_be_a_time(client: Client) -> None:
    """An aware datetime, to the microsecond."""
    at = datetime.now(UTC).replace(microsecond=1) + timedelta(minutes=5)
    hold = await client.place("room-12", expires_at=at)
    assert hold.expires_at == at
    assert (await client.renew(hold.id, expires_at=at + timedelta(hours=1))).expires_at == at + timedelta(
        hours=1
    )


async def test_the_verbs_change_a_hold(client: Client) -> None:
    """Renewed, confirmed, returned; another released; the generation is checked where one is given."""
    hold = await client.place("room-12", ttl_s=60)
    renewed = await client.renew(hold.id, ttl_s=90, generation=1)
    assert (renewed.generation, renewed.renewals) == (2, 1)
    assert (await client.confirm(str(hold.id), generation=2)).state == "confirmed"
    assert (await client.return_(hold.id, reason="refund", generation=2)).state == "returned"
    other = await client.place("room-12", ttl_s=60)
    assert (await client.release(other.id, reason="emptied", generation=1)).state == "released"
    history = await client.history(hold.id)
    assert [entry.what for entry in history.history] == ["placed", "renewed", "confirmed", "returned"]
    assert history.hold.state == "returned"
    assert history.history[-1].detail["reason"] == "refund"


async def test_lists_go_over_all_pages(client: Client) -> None:
    """The iterator follows the cursor; a page is one request; filters are those of the wire."""
    wanted = [Wanted(items=[Item("seat")], ttl_s=60 + n, holder="h") for n in range(203)]
    placed = await client.place_batch(wanted)
    ids = [result.hold.id for result in placed.results if isinstance(result, PlacedResult)]
    assert [hold.id async for hold in client.holds(resource_id="seat", state="held")] == ids
    soon = datetime.now(UTC) + timedelta(hours=1)
    page = await client.holds_page(holder="h", state="held", overdue=False, expires_before=soon, limit=2)
    assert [hold.id for hold in page.holds] == sorted(ids)[:2]  # oldest first
    page = await client.holds_page(
        holder="h", state="held", overdue=False, expires_before=soon, limit=2, cursor=page.next_cursor
    )
    assert [hold.id for hold in page.holds] == sorted(ids)[2:4]


async def test_batches_have_a_result_for_each(client: Client) -> None:
    """In order; a refused one's problem becomes the error it would have been alone."""
    await client.declare("seat", capacity=2)
    wanted = [Wanted(items=[Item("seat", n)], ttl_s=60) for n in (1, 2, 1)]
    placed = (await client.place_batch(wanted)).results
    assert [result.status for result in placed] == [201, 409, 201]
    assert isinstance(placed[1], RefusedResult)
    error = as_error(placed[1].problem)
    assert isinstance(error, errors.InsufficientCapacityError)
    assert (error.facts["resource_id"], error.facts["available"]) == ("seat", 1)
    assert str(error) == "The resource 'seat' has too few units left: 1 available."

    released = await client.release_batch([uuid4(), *_ids(placed)], reason="closed")
    assert [result.status for result in released.results] == [404, 200, 200]
    atomic = (await client.place_batch(wanted, atomic=True)).results
    assert [result.status for result in atomic] == [424, 409, 424]
    assert (await client.resource("seat")).held == 0


async def test_resources_are_declared_and_listed(client: Client) -> None:
    """Whatever their ids look like: nothing in a path is taken for a part of the path."""
    ids = [
        "room-12/2026-12-24",
        ".",
        "..",
        "a b?c#d",
        "50%",
        "%2F",
        "ü\N{SNOWMAN}",
        "a/../b",
        "+",
        "\\",
        "c" * 255,
    ]
    for resource_id in ids:
        assert (await client.declare(resource_id, capacity=3)).capacity == 3
        assert (await client.resource(resource_id)).resource_id == resource_id
    assert {r.resource_id async for r in client.resources()} == set(ids)
    assert [r.resource_id async for r in client.resources("room-")] == ["room-12/2026-12-24"]
    assert (await client.declare("%2F", capacity=None)).available is None
    page = await client.resources_page(limit=2)
    assert len(page.resources) == 2
    assert page.next_cursor is not None


async def test_the_platform_has_its_own(platform: Client) -> None:
    """Overview, pausing, keys."""
    assert (await platform.overview()).due == 0
    paused = await platform.pause("sweep", reason="maintenance")
    assert (paused.name, paused.paused, paused.reason) == ("sweep", True, "maintenance")
    assert not (await platform.resume("sweep")).paused
    made = await platform.create_key(tenant_id="shop", scopes=["read"], name="reports")
    assert made.key is not None
    assert (made.tenant_id, made.scopes, made.name) == ("shop", ["read"], "reports")
    assert made.id in [key.id async for key in platform.keys("shop")]
    assert len((await platform.keys_page(limit=1)).keys) == 1
    await platform.revoke_key(made.id)
    assert [key.id async for key in platform.keys("shop") if key.revoked_at is not None] == [made.id]
    assert (await platform.create_key(tenant_id=None)).scopes == ["platform"]


# --- events


async def test_events_are_read_by_page(client: Client) -> None:
    """By type, by hold, from a cursor on."""
    hold, other = [await client.place("room-12", ttl_s=60) for _ in range(2)]
    await client.confirm(hold.id)
    page = await client.events(limit=2)
    assert [(e.type, e.hold_id) for e in page.events] == [("hold.placed", hold.id), ("hold.placed", other.id)]
    rest = await client.events(after=page.next_cursor)
    assert [(e.type, e.hold_id, e.sequence) for e in rest.events] == [("hold.confirmed", hold.id, 2)]
    assert [e.type for e in (await client.events(hold_id=hold.id)).events] == [
        "hold.placed",
        "hold.confirmed",
    ]
    assert [e.hold_id for e in (await client.events(type="hold.confirmed")).events] == [hold.id]


async def test_following_waits_for_what_comes(api: Api) -> None:
    """Events come in order, those that happen later after a pause; from a kept cursor on nothing is skipped."""
    clock = Clock()
    async with client_at(url_of(api), clock=clock) as client:
        ids = [(await client.place("room-12", ttl_s=60)).id for _ in range(3)]

        async def later() -> None:
            ids.append((await client.place("room-12", ttl_s=60)).id)

        clock.meanwhile = [lambda: None, later]
        seen, cursors = [], []
        async with aclosing(client.follow(poll_s=7)) as events:
            async for event, cursor in events:
                seen.append(event.hold_id)
                cursors.append(cursor)
                if len(seen) == 4:
                    break
        assert seen == ids
        assert clock.slept_s == [7, 7]
        # Within a page one begins again at its start, after its last event behind it.
        assert cursors[:2] == [None, None]
        for kept, cursor in enumerate(cursors, start=1):
            again = [e.hold_id for e in (await client.events(after=cursor)).events]
            assert set(ids[kept:]) <= set(again)
        assert (await client.events(after=cursors[-1])).events == []


async def test_following_does_not_wait_while_there_is_more(api: Api) -> None:
    """Full pages are asked for one after the other."""
    clock = Clock()
    async with client_at(url_of(api), clock=clock) as client:
        await client.place_batch([Wanted(items=[Item("seat")], ttl_s=60) for _ in range(250)])
        async with aclosing(client.follow()) as events:
            seen = [(await anext(events))[0].id for _ in range(250)]
    assert len(set(seen)) == 250
    assert clock.slept_s == []


# --- errors


async def test_what_is_not_there_is_told_by_name(client: Client, platform: Client, api: Api) -> None:
    """A hold, a resource, a key, a loop or a path, each by its own error; all of them are NotFoundError."""
    with pytest.raises(errors.HoldNotFoundError) as lost:
        await client.confirm(uuid4())
    assert "missing" not in lost.value.facts
    with pytest.raises(errors.ResourceNotFoundError, match="never declared"):
        await client.resource("never")
    for unknown in ("nope", "0" * 16):
        with pytest.raises(errors.KeyNotFoundError):
            await platform.revoke_key(unknown)
    for name in ("nope", "No Pe"):
        with pytest.raises(errors.LoopNotFoundError, match="worker, promoter, sweep, prune"):
            await platform.pause(name, reason="-")  # type: ignore[arg-type]
    async with Client(f"{url_of(api)}/v1", key=TENANT) as astray:
        with pytest.raises(errors.NotFoundError, match="a base URL goes without it") as path:
            await astray.place("r", ttl_s=60)
    assert type(path.value) is PathNotFoundError


async def test_refusals_are_errors_by_name(client: Client, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """The class of the Python API, its sentence, its facts."""
    await client.declare("room-12", capacity=1)
    hold = await client.place("room-12", ttl_s=60, max_renewals=0, idempotency_key="k")
    with pytest.raises(
        expiry.InsufficientCapacityError, match=r"'room-12' .* too few .* 0 available"
    ) as full:
        await client.place("room-12", ttl_s=60)
    assert full.value.facts == {"available": 0, "resource_id": "room-12"}
    with pytest.raises(errors.KeyReusedError):
        await client.place("room-12", ttl_s=61, idempotency_key="k")
    with pytest.raises(expiry.LimitReachedError):
        await client.renew(hold.id, ttl_s=60)
    with pytest.raises(expiry.GenerationMismatchError) as other:
        await client.confirm(hold.id, generation=2)
    assert other.value.facts["current_generation"] == 1
    with pytest.raises(errors.NotConfirmedError):
        await client.return_(hold.id)
    with pytest.raises(expiry.HoldNotFoundError):
        await client.get(uuid4())
    await make_overdue(pool)
    with pytest.raises(expiry.HoldExpiredError, match="past its deadline") as late:
        await client.confirm(hold.id)
    assert (late.value.facts["hold_id"], late.value.facts["current_state"]) == (str(hold.id), "expired")
    assert isinstance(late.value.facts["expired_at"], datetime)
    with pytest.raises(expiry.AlreadyEndedError):
        await client.release(hold.id)


async def test_who_may_not_is_told_so(api: Api, client: Client, platform: Client) -> None:
    """No such key, no such scope."""
    with pytest.raises(problems.ForbiddenError, match="'platform'") as refused:
        await client.overview()
    assert refused.value.facts["scope"] == "platform"
    with pytest.raises(problems.ForbiddenError):
        await platform.place("room-12", ttl_s=60)
    async with client_at(url_of(api), key="exk_wrong") as stranger:
        with pytest.raises(problems.UnauthenticatedError):
            await stranger.get(uuid4())


async def test_what_only_the_api_can_judge_says_what_is_wrong(client: Client) -> None:
    """The facts name each parameter, and a traceback shows them."""
    with pytest.raises(problems.InvalidError) as refused:
        await anext(client.holds(state="confirmed"))
    assert refused.value.facts["errors"][0]["pointer"] == "?state"  # type: ignore[index]
    assert refused.value.__notes__[0].startswith("?state: no index serves")
    with pytest.raises(problems.InvalidError):
        await client.events(after="nonsense")


async def test_the_same_call_again_is_the_same_hold(client: Client) -> None:
    """With a key of one's own, in whatever characters; and the answer says that it is a replay."""
    for key in ("order-1", '"order-1"', "a\\b", "ü ", "x" * 255):
        first, again = [await client.place("room-12", ttl_s=60, idempotency_key=key) for _ in range(2)]
        assert (first.id, first.replayed, again.replayed) == (again.id, False, True)
        renewed = [await client.renew(first.id, ttl_s=90, idempotency_key=key) for _ in range(2)]
        assert [hold.generation for hold in renewed] == [2, 2]
    assert len({hold.id async for hold in client.holds(state="held")}) == 5


def _ids(results: list[PlacedResult | RefusedResult]) -> list[UUID]:
    return [result.hold.id for result in results if isinstance(result, PlacedResult)]
