"""What a client asks is exact, and refused before it is sent where no API could take it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from expiry.client import Client, Item, Wanted, words
from expiry.errors import SetupError
from expiry.wanted import TTL_S_MAX
from expiry.wire.bodies import PlaceBody, RenewBody
from expiry.wire.problems import InvalidError
from expiry.wire.queries import HoldsQuery

NOBODY = "http://127.0.0.1:1"  # asked, it would be an UnavailableError
PROGRAM = """
import sys
import expiry.client
print([m for m in sys.modules if m.partition(".")[0] in ("asyncpg", "redis", "arq", "structlog", "uvloop")
       or m.startswith(("expiry.api", "expiry.holds", "expiry.service", "governor"))])
"""


@given(st.integers(min_value=1_000_000, max_value=TTL_S_MAX * 1_000_000))
def test_every_microsecond_is_on_the_wire(micros: int) -> None:
    """As a duration, as a decimal or as a float, the digits of a number of seconds are exact."""
    exact = Decimal(micros) / 1_000_000
    for ttl_s in (timedelta(microseconds=micros), exact, float(exact)):
        body = json.loads(words.body(RenewBody, ttl_s=ttl_s), parse_float=Decimal)
        assert body == {"ttl_s": exact}


def test_times_are_said_in_utc() -> None:
    """In a body and in a query, from whichever zone."""
    at = datetime(2026, 12, 24, 18, 0, 0, 1, tzinfo=timezone(timedelta(hours=2)))
    assert json.loads(words.body(RenewBody, expires_at=at)) == {"expires_at": "2026-12-24T16:00:00.000001Z"}
    assert words.query(HoldsQuery, expires_before=at, overdue=False, limit=3, holder=None) == {
        "expires_before": "2026-12-24T16:00:00.000001Z",
        "overdue": "false",
        "limit": "3",
    }


def test_metadata_is_left_as_it_is() -> None:
    """Nulls, numbers and what looks like a NUL and is none."""
    metadata = {"a": None, "b": [1, 1.5, True], "c": "\\u0000 \N{SNOWMAN}"}
    assert (
        json.loads(words.body(PlaceBody, resource_id="r", ttl_s=1, metadata=metadata))["metadata"] == metadata
    )


PLACES: list[tuple[dict[str, Any], str]] = [
    ({"resource_id": "r"}, "give either ttl_s or expires_at"),
    ({"resource_id": "r", "ttl_s": 1, "expires_at": datetime.now(UTC)}, "give either ttl_s or expires_at"),
    ({"resource_id": "r", "ttl_s": 0.5}, "#/ttl_s: .*greater than or equal to 1"),
    ({"resource_id": "r", "ttl_s": timedelta(days=366)}, "#/ttl_s: .*less than or equal"),
    ({"resource_id": "r", "ttl_s": 1.0000001}, "#/ttl_s: .*6 decimal places"),
    ({"resource_id": "r", "ttl_s": float("nan")}, "#/ttl_s: .*finite"),
    ({"resource_id": "r", "ttl_s": True}, "#/ttl_s: Input should be a number"),
    ({"resource_id": "r", "ttl_s": "60"}, "#/ttl_s: Input should be a number"),
    ({"resource_id": "r", "expires_at": datetime(2026, 1, 1)}, "#/expires_at: .*with a zone"),  # noqa: DTZ001
    ({"ttl_s": 1}, "give either resource_id or items"),
    ({"resource_id": "r", "items": [Item("s")], "ttl_s": 1}, "give either resource_id or items"),
    ({"items": [Item("r")], "quantity": 2, "ttl_s": 1}, "quantity goes with resource_id"),
    ({"items": [], "ttl_s": 1}, "#/items: .*at least 1"),
    ({"items": [Item("r"), Item("r")], "ttl_s": 1}, "name a resource twice"),
    ({"items": [Item("r", 0)], "ttl_s": 1}, "#/items/0/quantity: .*greater than or equal to 1"),
    ({"resource_id": "", "ttl_s": 1}, "#/resource_id: .*at least 1 character"),
    ({"resource_id": "r\0", "ttl_s": 1}, "NUL"),
    ({"resource_id": "\ud800", "ttl_s": 1}, "#/resource_id: .*unicode"),
    ({"resource_id": "r", "ttl_s": 1, "metadata": {"a": "\0"}}, "NUL"),
    ({"resource_id": "r", "ttl_s": 1, "metadata": {"a": datetime.now(UTC)}}, "metadata is what JSON can say"),
    ({"resource_id": "r", "ttl_s": 1, "metadata": {"a": float("inf")}}, "metadata is what JSON can say"),
    ({"resource_id": "r", "ttl_s": 1, "metadata": {"a": "x" * 8192}}, "metadata takes"),
    ({"resource_id": "r", "ttl_s": 1, "replaces": "r"}, "#/replaces"),
    ({"resource_id": "r", "ttl_s": 1, "idempotency_key": ""}, "idempotency_key: 1 to 255"),
    ({"resource_id": "r", "ttl_s": 1, "idempotency_key": "a\nb"}, "idempotency_key: .* printable"),
]


@pytest.mark.parametrize(("asked", "sentence"), PLACES)
async def test_a_hold_that_cannot_be_is_not_asked_for(asked: dict[str, Any], sentence: str) -> None:
    """The error names the argument; nobody needs to be there to say so."""
    async with Client(NOBODY, key="k", attempts_max=1) as client:
        with pytest.raises(InvalidError, match=sentence):
            await client.place(**asked)


async def test_nothing_else_that_cannot_be_is_asked_for() -> None:
    """Ids, loops, filters, batches that are too large."""
    one = Wanted(items=[Item("r")], ttl_s=60)
    async with Client(NOBODY, key="k", attempts_max=1) as client:
        for asking, sentence in (
            (client.get("room-12"), "hold_id: a hold is named by a UUID"),
            (client.resource(""), "1 to 255 characters"),
            (client.resource("r" * 256), "1 to 255 characters"),
            (client.declare("r\0", capacity=1), "NUL"),
            (client.declare("\ud800", capacity=1), "surrogate"),
            (client.declare("r", capacity=-1), "#/capacity"),
            (client.place_batch([one] * 501), "#/holds: .*at most 500"),
            (client.place_batch([]), "#/holds: .*at least 1"),
            (client.place_batch([Wanted(items=[Item("r")], ttl_s=0)]), "#/holds/0/ttl_s"),
            (client.release_batch([UUID(int=n) for n in range(501)]), "#/ids: .*at most 500"),
            (client.confirm(UUID(int=1), generation=0), "#/generation"),
            (client.resources_page("r\0"), "NUL"),
            (client.holds_page(limit=201), r"\?limit"),
            (client.holds_page(state="gone"), r"\?state"),  # type: ignore[arg-type]
            (client.events(hold_id="x"), r"\?hold_id"),
            (client.pause("sweep", reason=""), "#/reason"),
            (client.create_key(tenant_id=None, scopes=[]), "#/scopes"),
        ):
            with pytest.raises(InvalidError, match=sentence):
                await asking


@pytest.mark.parametrize(
    ("base_url", "changes", "sentence"),
    [
        ("127.0.0.1:8080", {}, "base_url is like https://host:port"),
        ("postgresql://host", {}, "base_url is like"),
        ("http://me:secret@host", {}, "base_url is like"),
        ("http://:secret@host", {}, "base_url is like"),
        ("http://host:secret", {}, "base_url is like"),
        ("http://host?key=secret", {}, "base_url is like"),
        (NOBODY, {"key": ""}, "key is an API key"),
        (NOBODY, {"key": "secret\r\nX: y"}, "key is an API key"),
        (NOBODY, {"attempts_max": 0}, "attempts_max is at least 1"),
        (NOBODY, {"timeout_s": 0}, "above 0"),
        (NOBODY, {"total_s_max": float("nan")}, "above 0"),
    ],
)
def test_a_client_that_cannot_work_is_not_made(base_url: str, changes: dict[str, Any], sentence: str) -> None:
    """One sentence, without what may be secret."""
    with pytest.raises(SetupError, match=sentence) as refused:
        Client(base_url, **{"key": "k", **changes})
    assert "secret" not in str(refused.value)


async def test_a_client_is_opened_first() -> None:
    """Otherwise nobody would close its session."""
    with pytest.raises(SetupError, match="async with Client"):
        await Client(NOBODY, key="k").overview()


def test_the_client_loads_nothing_of_the_server() -> None:
    """A backend that only asks needs no driver of any database."""
    loaded = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert loaded.stdout == "[]\n"


def test_the_package_offers_what_it_says() -> None:
    """Loaded when first used, all of it is there."""
    program = "import expiry; print(all(getattr(expiry, name) for name in expiry.__all__)); expiry.nonsense"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.stdout == "True\n"
    assert "AttributeError: module 'expiry' has no attribute 'nonsense'" in done.stderr


def test_the_key_is_a_secret() -> None:
    """Neither the client nor what it is made of shows it."""
    client = Client("https://host/expiry/", key="exk_secret")
    assert repr(client) == "Client('https://host/expiry/')"
    assert "exk_secret" not in repr(vars(client))
    assert client._transport.key == SecretStr("exk_secret")  # noqa: SLF001 - it is there


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda client: client.place(items=[{"resource_id": "r"}], ttl_s=60),
            r"^items\[0\]: Item\(resource_id, quantity\) is wanted, not dict$",
        ),
        (
            lambda client: client.place(items="room-12", ttl_s=60),
            "^items: a list is wanted, of Item each, not str$",
        ),
        (
            lambda client: client.place(items=Item("r"), ttl_s=60),
            "^items: a list is wanted, of Item each, not Item$",
        ),
        (
            lambda client: client.place_batch([{"resource_id": "r", "ttl_s": 60}]),
            r"^holds\[0\]: Wanted\(items=\[Item\(...\)\], ttl_s=...\) is wanted, not dict$",
        ),
        (
            lambda client: client.place_batch([Wanted(items=[("r", 1)], ttl_s=60)]),  # type: ignore[list-item]
            r"^items\[0\]: Item\(resource_id, quantity\) is wanted, not tuple$",
        ),
        (
            lambda client: client.place_batch(Wanted(items=[Item("r")])),
            "^holds: a list is wanted, of Wanted each",
        ),
        (
            lambda client: client.release_batch(str(UUID(int=1))),
            "^hold_ids: a list is wanted, of id each, not str$",
        ),
        (
            lambda client: client.release_batch(UUID(int=1)),
            "^hold_ids: a list is wanted, of id each, not UUID$",
        ),
        (lambda client: client.release_batch([7]), r"^hold_ids\[0\]: an id is wanted, not int$"),
        (
            lambda client: client.create_key(tenant_id="shop", scopes="holds"),
            "^scopes: a list is wanted, of str",
        ),
        (lambda client: client.get(hold_id="7"), "UUID"),
        (
            lambda client: client.holds_page(resource="r"),
            r"^\?resource: unknown parameter, did you mean resource_id\?",
        ),
    ],
)
async def test_what_is_of_another_kind_is_told(call: Any, said: str) -> None:  # noqa: ANN401 - any method
    """Before anything is sent: where it is, and what to pass instead."""
    async with Client(NOBODY, key="k") as client:
        with pytest.raises(InvalidError, match=said):
            await call(client)
