from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from io import BytesIO
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from tests.api_client import TENANT, Api, problem, read

SEAT = '"resource_id": "seat"'


async def send(api: Api, text: str | bytes, content_type: str | None = "application/json") -> Any:  # noqa: ANN401
    """Place with a body as it stands."""
    headers = {"Idempotency-Key": str(uuid4())}
    if content_type is not None:
        headers["Content-Type"] = content_type
    data = text if isinstance(text, bytes) else text.encode()
    return await api.ask("POST", "/v1/holds", headers=headers, data=BytesIO(data))


async def nothing_was_placed(pool: asyncpg.Pool[asyncpg.Record]) -> bool:
    """Say whether the store is still empty."""
    return not await pool.fetchval("SELECT count(*) FROM holds")


TTLS = [
    ("-1", 422),
    ("0", 422),
    ("0.999999", 422),
    ("true", 422),
    ('"60"', 422),
    ("null", 422),
    ("[60]", 422),
    ("1.0000001", 422),
    ("2.00000000000000000000000000000001", 422),
    ("31536001", 422),
    ("31536000.000001", 422),
    ("1e12", 422),
    ("1e38", 422),
    ("1e400", 422),
    ("-1e999999999999999999", 422),
    ("1e99999999999999999999999", 422),
    ("1" + "0" * 5000, 422),
    ("NaN", 400),
    ("Infinity", 400),
    ("-Infinity", 400),
    ("01", 400),
    ("1e6", 201),
    ("1000000", 201),
    ("1.0", 201),
    ("1.000001", 201),
    ("31536000.000000", 201),
]


async def test_e10_e11_a_ttl_is_in_range_or_refused(
    api: Api, pool: asyncpg.Pool[asyncpg.Record], subtests: pytest.Subtests
) -> None:
    """E10, E11: no ttl leads to a dead-on-arrival hold, to a far future, or to a 500."""
    for ttl, status in TTLS:
        with subtests.test(ttl=ttl[:40]):
            response = await send(api, f'{{{SEAT}, "ttl_s": {ttl}}}')
            if status == 201:
                assert (response.status, (await read(response))["state"]) == (201, "held")
            else:
                await problem(response, status, "malformed" if status == 400 else "invalid")
    placed = sum(status == 201 for _, status in TTLS)
    assert await pool.fetchval("SELECT count(*) FROM holds") == placed


DEADLINES = [
    ("9999-12-31T23:59:59Z", "out_of_range"),
    ("9999-12-31T23:59:59-12:00", "invalid"),
    ("10000-01-01T00:00:00Z", "invalid"),
    ("0001-01-01T00:00:00+14:00", "invalid"),
    ("2020-01-01T00:00:00Z", "out_of_range"),
    ("2030-02-30T00:00:00Z", "invalid"),
    ("2030-01-01T00:00:00", "invalid"),
    ("2030-01-01 00:00:00Z", "invalid"),
    ("2030-01-01T00:00:00.0000001Z", "invalid"),
    ("2030-W01-1T00:00:00Z", "invalid"),
    ("2030-01-01T00:00:00+99:99", "invalid"),
    ("tomorrow", "invalid"),
    (1893456000, "invalid"),
    (True, "invalid"),
]


async def test_e11_a_deadline_is_in_range_or_refused(api: Api, subtests: pytest.Subtests) -> None:
    """E11: year 9999 and 10000, forms that are not RFC 3339, times in the past: 422, and get still works."""
    hold = await api.placed()
    for expires_at, code in DEADLINES:
        with subtests.test(expires_at=expires_at):
            await problem(await api.place(expires_at=expires_at), 422, code)
            await problem(await api.verb(hold, "renew", expires_at=expires_at), 422, code)
    assert (await api.hold(hold))["generation"] == 1
    for query in ("state=held", "expires_before=9998-12-31T23:59:59Z"):
        listed = await read(await api.raw("GET", f"/v1/holds?{query}"))
        assert [h["id"] for h in listed["holds"]] == [hold["id"]]
    for expires_at, _code in DEADLINES[1:4]:
        response = await api.ask("GET", "/v1/holds", params={"expires_before": str(expires_at)})
        await problem(response, 422, "invalid")


PLACES = [
    '{"ttl_s": 5, "resource_id": "%s"}',
    f'{{"ttl_s": 5, {SEAT}, "holder": "%s"}}',
    f'{{"ttl_s": 5, {SEAT}, "external_ref": "%s"}}',
    f'{{"ttl_s": 5, {SEAT}, "%s": 1}}',
    f'{{"ttl_s": 5, {SEAT}, "metadata": {{"%s": 1}}}}',
    f'{{"ttl_s": 5, {SEAT}, "metadata": {{"a": [{{"b": "%s"}}]}}}}',
    f'{{"ttl_s": 5, {SEAT}, "metadata": {{"a": [{{"%s": {{}}}}]}}}}',
    '"%s"',
]


async def test_f12_no_nul_and_no_lone_surrogate(
    api: Api, pool: asyncpg.Pool[asyncpg.Record], subtests: pytest.Subtests
) -> None:
    """F12: PostgreSQL cannot keep them: 400, wherever they are, keys and nested values too."""
    for body in PLACES:
        for text in (r"\u0000", r"a\u0000b", r"\ud800", r"\udfff", r"\udc00\ud800", r"\ud83dx"):
            with subtests.test(body=body, text=text):
                await problem(await send(api, body % text), 400, "malformed")
    assert await nothing_was_placed(pool)


async def test_paired_surrogates_are_a_character(api: Api) -> None:
    """An escaped emoji is that emoji; an escaped backslash before u0000 is text."""
    response = await send(
        api, f'{{"ttl_s": 5, {SEAT}, "holder": "\\ud83d\\ude00", "external_ref": "\\\\u0000"}}'
    )
    hold = await read(response)
    assert (hold["holder"], hold["external_ref"]) == ("\U0001f600", "\\u0000")
    assert (await api.hold(hold))["holder"] == "\U0001f600"


NOT_JSON = [
    b"{",
    b"}",
    b"{'ttl_s': 5}",
    b'{"ttl_s": 5,}',
    b'{"a": "\x00"}',
    b'{"a": "\xff"}',
    b'{"a": "\xed\xa0\x80"}',
    b'\xef\xbb\xbf{"a": 1}',
    '{"a": 1}'.encode("utf-16"),
    b"[" * 100_000,
    b'{"metadata": ' + b'{"a":' * 100_000,
]


async def test_what_is_not_json_is_400(api: Api, subtests: pytest.Subtests) -> None:
    """Broken, of another encoding, or nested beyond any parser; nothing at all lacks its fields."""
    for body in NOT_JSON:
        with subtests.test(body=body[:40]):
            await problem(await send(api, body), 400, "malformed")
    await problem(await send(api, b""), 422, "invalid")


WRONG_FIELDS: list[tuple[dict[str, object], str]] = [
    ({"quantity": 0}, "#/quantity"),
    ({"quantity": -1}, "#/quantity"),
    ({"quantity": 1_000_000_001}, "#/quantity"),
    ({"quantity": 10**30}, "#/quantity"),
    ({"quantity": 1.0}, "#/quantity"),
    ({"quantity": True}, "#/quantity"),
    ({"quantity": "1"}, "#/quantity"),
    ({"quantity": None}, "#/quantity"),
    ({"resource_id": ""}, "#/resource_id"),
    ({"resource_id": "x" * 256}, "#/resource_id"),
    ({"resource_id": 7}, "#/resource_id"),
    ({"resource_id": None}, "#"),
    ({"holder": ""}, "#/holder"),
    ({"holder": "x" * 256}, "#/holder"),
    ({"external_ref": "x" * 256}, "#/external_ref"),
    ({"external_ref": 1}, "#/external_ref"),
    ({"metadata": []}, "#/metadata"),
    ({"metadata": "x"}, "#/metadata"),
    ({"metadata": {"a": "x" * (8193 - len('{"a":""}'))}}, "#/metadata"),
    ({"max_renewals": -1}, "#/max_renewals"),
    ({"max_renewals": 2**31}, "#/max_renewals"),
    ({"max_lifetime_s": 59}, "#"),
    ({"max_lifetime_s": 1e9}, "#/max_lifetime_s"),
    ({"replaces": "x"}, "#/replaces"),
    ({"replaces": 5}, "#/replaces"),
    ({"expires_at": "2030-01-01T00:00:00Z", "ttl_s": 5}, "#"),
    ({"items": []}, "#/items"),
    ({"items": [{"resource_id": "a"}]}, "#"),
    ({"surprise": 1}, "#/surprise"),
    ({"a/b~c": 1}, "#/a~1b~0c"),
    ({"id": str(uuid4())}, "#/id"),
    ({"reminders": [{"before_s": 5}]}, "#/reminders"),
]


async def test_a_wrong_field_is_named(
    api: Api, pool: asyncpg.Pool[asyncpg.Record], subtests: pytest.Subtests
) -> None:
    """422 points at the field; nothing is placed."""
    for change, pointer in WRONG_FIELDS:
        with subtests.test(change=str(change)[:80]):
            document = {"ttl_s": 60, "resource_id": "seat"} | change
            found = await problem(await send(api, json.dumps(document)), 422, "invalid")
            assert pointer in [e["pointer"] for e in found["errors"]]
            assert all(e["detail"] for e in found["errors"])
    assert await nothing_was_placed(pool)


WRONG_ITEMS: list[tuple[object, str]] = [
    ([{"resource_id": "a", "quantity": 0}], "#/items/0/quantity"),
    ([{"resource_id": "a"}, {"resource_id": "b", "x": 1}], "#/items/1/x"),
    ([{"resource_id": "a"}, {"resource_id": "a"}], "#"),
    ([{"resource_id": f"r{n}"} for n in range(51)], "#/items"),
    ([7], "#/items/0"),
    ({"resource_id": "a"}, "#/items"),
]


WORDS: list[tuple[dict[str, object], str]] = [
    ({"replaces": 5}, "#/replaces: a UUID is wanted, as a string"),
    ({"replaces": "x"}, "#/replaces: a UUID is wanted, as a string"),
    ({"ttl_s": "60"}, "#/ttl_s: Input should be a number"),
    (
        {"expires_at": "soon"},
        "#/expires_at: a time in RFC 3339 with a zone, like 2026-12-24T18:00:00Z, is needed",
    ),
    ({"expires_at": "2026-13-01T00:00:00Z"}, "#/expires_at: month must be in 1..12"),
]


@pytest.mark.parametrize(("change", "detail"), WORDS)
async def test_what_is_wrong_is_said_in_the_terms_of_the_wire(
    api: Api, change: dict[str, object], detail: str
) -> None:
    """Not in those of the library that found it."""
    document = {"ttl_s": 60, "resource_id": "seat"} | change
    found = await problem(await send(api, json.dumps(document)), 422, "invalid")
    assert found["detail"].startswith(detail)


async def test_a_wrong_item_is_named(api: Api, subtests: pytest.Subtests) -> None:
    """The pointer leads into the list."""
    for items, pointer in WRONG_ITEMS:
        with subtests.test(items=str(items)[:80]):
            found = await problem(await api.place(items=items), 422, "invalid")
            assert pointer in [e["pointer"] for e in found["errors"]]


@pytest.mark.parametrize("body", ["[]", "null", "true", "1", '"x"'])
async def test_a_body_is_an_object(api: Api, body: str) -> None:
    """Any other JSON is 422."""
    await problem(await send(api, body), 422, "invalid")


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (f'{{"ttl_s": 5, "ttl_s": 6, {SEAT}}}', "#/ttl_s"),
        (f'{{"ttl_s": 5, {SEAT}, "metadata": {{"a": [0, {{"b": 1, "b": 1}}]}}}}', "#/metadata/a/1/b"),
        (f'{{"ttl_s": 5, {SEAT}, "metadata": {{"a/": {{"": {{}}, "": 0}}}}}}', "#/metadata/a~1/"),
        (f'{{"ttl_s": 5, {SEAT}, "tt\\u006c_s": 5}}', "#/ttl_s"),
        ('{"items": [' + '{"a": 1}, ' * 9 + '{"b": 1, "a": 1, "b": 2}]}', "#/items/9/b"),
        ('{"a": ' * 500 + '{"b": 1, "b": 2}' + "}" * 500, "#" + "/a" * 32),
    ],
)
async def test_a_field_twice_is_refused(api: Api, body: str, pointer: str) -> None:
    """Which of the two counts would be anybody's guess."""
    found = await problem(await send(api, body), 422, "invalid")
    assert [e["pointer"] for e in found["errors"]] == [pointer]


@pytest.mark.parametrize(
    "metadata",
    [
        '{"a": 1e400}',
        '{"a": [-1e999]}',
        '{"a": 1e99999999999999999999}',
        '{"a": ' + "[" * 40 + "]" * 40 + "}",
    ],
)
async def test_metadata_that_no_reader_could_read_is_refused(api: Api, metadata: str) -> None:
    """Numbers beyond a double, and nesting beyond 32 levels: 422."""
    await problem(await send(api, f'{{"ttl_s": 5, {SEAT}, "metadata": {metadata}}}'), 422, "invalid")


async def test_metadata_comes_back_as_it_went(api: Api) -> None:
    """Big integers, fractions, empty things and any character; up to 8 KiB to the byte."""
    metadata = {
        "n": 10**30,
        "f": -0.1,
        "e": {},
        "l": [[], None, False],
        "ü/~": "\u2028\u00e9\U0001f600\\",
        "": "x",
    }
    hold = await api.placed(metadata=metadata)
    assert hold["metadata"] == (await api.hold(hold))["metadata"] == metadata
    deep: dict[str, Any] = {"a": 1}
    for _ in range(29):
        deep = {"a": deep}
    assert (await api.placed(metadata=deep))["metadata"] == deep
    full = {"a": "é" * ((8192 - len('{"a":""}')) // 2)}
    assert (await api.placed(metadata=full))["metadata"] == full


@pytest.mark.parametrize("number", ["1e308", "-1e16", "5e-324", "1.5e-7", "1.7976931348623157e308"])
async def test_metadata_is_measured_as_it_is_kept(
    api: Api, pool: asyncpg.Pool[asyncpg.Record], number: str
) -> None:
    """A number with an exponent is written out by PostgreSQL, and so in answers: 8 KiB are that much."""
    written_out = await pool.fetchval("SELECT $1::text::jsonb::text", number)
    used = len('{"a":["",]}') + len(",".join([written_out] * 20))
    for size, status in ((8192, 201), (8193, 422)):
        metadata = f'{{"a":["{"x" * (size - used)}",{",".join([number] * 20)}]}}'
        response = await send(api, f'{{"ttl_s": 5, {SEAT}, "metadata": {metadata}}}')
        assert response.status == status, await response.text()
    kept = await pool.fetchval("SELECT metadata::text FROM holds")
    assert len(kept.replace(", ", ",").replace(": ", ":")) == 8192


async def test_a_body_over_a_mebibyte_is_413(api: Api) -> None:
    """Announced, chunked or compressed; exactly 1 MiB is read."""
    body = json.dumps({"ttl_s": 5, "resource_id": "seat"}).encode()
    full = body + b" " * (1_048_576 - len(body))
    assert (await send(api, full)).status == 201
    await problem(await send(api, full + b" "), 413, "too_large")
    headers = {"Idempotency-Key": "z", "Content-Type": "application/json", "Content-Encoding": "gzip"}
    bomb = gzip.compress(b" " * 50_000_000)
    response = await api.ask("POST", "/v1/holds", headers=headers, data=bomb)
    await problem(response, 413, "too_large")
    broken = await api.ask("POST", "/v1/holds", headers=headers, data=b"no gzip at all")
    await problem(broken, 400, "malformed")


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/json; charset=utf-16", 415),
        ("nonsense", 415),
        ("application/json; charset=UTF-8", 201),
        ("application/vnd.shop+json", 201),
    ],
)
async def test_a_body_is_json_or_415(api: Api, content_type: str, status: int) -> None:
    """The content type must say JSON in UTF-8."""
    response = await send(api, f'{{"ttl_s": 5, {SEAT}}}', content_type)
    if status == 415:
        await problem(response, 415, "not_json")
    assert response.status == status


async def test_an_id_has_one_spelling(api: Api) -> None:
    """What is no UUID, and another spelling of one that is there, is 404 as any id that is not there."""
    id_ = (await api.placed())["id"]
    for other in (
        "1",
        "%00",
        "é" * 36,
        f"%7B{id_}%7D",
        f"urn:uuid:{id_}",
        id_.replace("-", ""),
        str(uuid4()),
    ):
        await problem(await api.ask("GET", f"/v1/holds/{other}"), 404, "not_found")
        await problem(await api.ask("POST", f"/v1/holds/{other}/confirm"), 404, "not_found")


async def test_paths_and_methods_that_are_not_there(api: Api) -> None:
    """404 and 405 are problems too; 405 names what is allowed."""
    await problem(await api.ask("GET", "/nothing"), 404, "not_found")
    await problem(await api.ask("GET", "/v1/nothing", key=None), 404, "not_found")
    for path, missing, hint in (
        ("/", "path", "the guide is at /docs"),
        ("/v1/v1/holds", "path", "a base URL goes without it"),
        ("/v1/holds/77", "hold", "its id is a UUID"),
        (f"/v1/holds/{'-' * 36}", "hold", "its id is a UUID"),
        (f"/v1/holds/{uuid4()}", "hold", "There is no such hold."),
        ("/v1/holds/77/history", "hold", "its id is a UUID"),
        ("/v1/holds/77/cancel", "path", "There is nothing at this path."),
        ("/v1/resources/room-12/2026-12-24", "path", "is %2F"),
        ("/v1/resources/room-12", "resource", "never declared"),
        ("/v1/keys/nope", "key", "16 hexadecimal digits"),
        ("/v1/loops/Sweep/pause", "loop", "worker, promoter, sweep, prune"),
    ):
        found = await problem(await api.ask("GET", path), 404, "not_found")
        assert (found["missing"], hint in found["detail"]) == (missing, True), found
    for method, path, allowed in (
        ("DELETE", "/v1/holds", "GET,HEAD,POST"),
        ("GET", "/v1/holds/batch", "POST"),
        ("DELETE", "/v1/keys", "GET,HEAD,POST"),
    ):
        response = await api.ask(method, path)
        await problem(response, 405, "method_not_allowed")
        assert response.headers["Allow"] == allowed


async def test_a_body_that_does_not_come_is_408(start_api: Callable[..., Any]) -> None:
    """Who announces more than is sent does not keep the connection."""
    api: Api = await start_api(None, api_body_timeout_s=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", api.client.port)
    writer.write(
        f"POST /v1/holds HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TENANT}\r\nIdempotency-Key: k\r\n"
        "Content-Type: application/json\r\nContent-Length: 50\r\nConnection: close\r\n\r\n{".encode()
    )
    answer = await reader.readuntil(b"\r\n\r\n")  # the end comes when the server has lingered for 10 s
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"application/problem+json" in answer
    assert b"Connection: close" in answer


async def test_many_fields_take_no_time(api: Api) -> None:
    """A body of 60,000 fields, one of them twice: refused as fast as it is read."""
    fields = ",".join(f'"f{n}":1' for n in range(60_000))
    async with asyncio.timeout(2):
        found = await problem(await send(api, f'{{{fields},"f7":1}}'), 422, "invalid")
    assert found["errors"][0]["pointer"] == "#/f7"


async def test_a_field_that_is_unknown_is_told_with_those_that_are_not(api: Api) -> None:
    """The nearest of them too, in whatever it stands; and what is missing is said beside it."""
    headers = {"Idempotency-Key": "k"}
    asked = {"ttl": 60, "items": [{"resource": "r", "quantity": 1}]}
    found = await problem(await api.ask("POST", "/v1/holds", headers=headers, json=asked), 422, "invalid")
    said = {one["pointer"]: one["detail"] for one in found["errors"]}
    assert said["#/ttl"].startswith(
        "unknown field, did you mean ttl_s?; known are ttl_s, expires_at, resource_id"
    )
    assert said["#/items/0/resource"] == (
        "unknown field, did you mean resource_id?; known are resource_id, quantity"
    )
    assert said["#/items/0/resource_id"] == "Field required"
    assert "#/items/0/resource_id: Field required" in found["detail"]
    found = await problem(
        await api.ask("POST", "/v1/holds/batch", headers=headers, json={"holds": [{"x": 1}]}), 422, "invalid"
    )
    assert found["errors"][0]["detail"].startswith("unknown field; known are ttl_s")
    found = await problem(await api.ask("GET", "/v1/holds?resource=r"), 422, "invalid")
    assert found["errors"][0]["detail"].startswith(
        "unknown parameter, did you mean resource_id?; known are limit"
    )
    found = await problem(await api.ask("GET", f"/v1/holds/{uuid4()}?full=1"), 422, "invalid")
    assert found["detail"] == "?full: unknown parameter; there is none here"
    many = {f"x{n}": 1 for n in range(9)}
    found = await problem(await api.ask("PUT", "/v1/resources/r", json=many), 422, "invalid")
    assert found["detail"].startswith("#/capacity: Field required; ")
    assert found["detail"].endswith(" (and 7 more)")
