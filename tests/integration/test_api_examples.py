"""The examples in the OpenAPI document work as they stand, and are answered as the document says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
from aiohttp import ClientResponse
from jsonschema import Draft202012Validator, FormatChecker
from yarl import URL

from expiry.api.app import OPERATIONS
from expiry.api.document.openapi import document
from tests.api_client import PLATFORM, TENANT, Api, read

DOCUMENT = document(OPERATIONS)
# Texts that the example says as they come, and numbers that depend on what was done before.
PLAIN = {"state", "type", "what", "resource_id", "external_ref", "reason", "name", "tenant_id", "scopes"}
WHOLE = ("results", "items", "history", "scopes")
COUNTS = {"held", "confirmed", "available", "eligible", "expired", "queue_depth"}
# What must have been done before; apart from these, each example stands alone.
FIRST = {"holds_return": "holds_confirm", "resources_get": "resources_put"}


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Answer method, path and description of each operation, in the order of the document."""
    for path, item in DOCUMENT["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def resolved(found: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference within the document."""
    while "$ref" in found:
        node = DOCUMENT
        for step in found["$ref"].removeprefix("#/").split("/"):
            node = node[step]
        found = node
    return found


def check(value: object, schema: dict[str, Any]) -> None:
    """Raise unless the value is as a schema of the document has it."""
    whole = {**schema, "components": DOCUMENT["components"]}
    Draft202012Validator(whole, format_checker=FormatChecker()).validate(value)


async def send(api: Api, name: str, ids: dict[str, str]) -> ClientResponse:
    """Send the example of this operation, with ids of earlier answers in the place of path parameters."""
    method, path, operation = next(o for o in operations() if o[2]["operationId"] == name)
    query: dict[str, str] = {}
    headers: dict[str, str] = {}
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            value = ids.get(path.split("{")[0]) or parameter["example"]
            check(value, parameter["schema"])
            path = path.replace(f"{{{parameter['name']}}}", quote(value, safe=""))
        elif "example" in parameter:
            check(parameter["example"], parameter["schema"])
            (query if parameter["in"] == "query" else headers)[parameter["name"]] = str(parameter["example"])
        elif parameter["name"] == "Idempotency-Key":
            headers["Idempotency-Key"] = str(uuid4())
    body: dict[str, Any] = {}
    if "requestBody" in operation:
        media = operation["requestBody"]["content"]["application/json"]
        check(media["example"], media["schema"])
        body["json"] = media["example"] | ({"ids": [ids[path]]} if path in ids else {})
    if scope := operation.get("x-scope"):
        headers["Authorization"] = f"Bearer {PLATFORM if scope == 'platform' else TENANT}"
    url = URL(str(api.client.make_url("/")).rstrip("/") + path, encoded=True).update_query(query)
    response = await api.client.session.request(method, url, headers=headers, **body)
    await response.read()
    return response


def facts(found: Any, name: str = "") -> Any:  # noqa: ANN401 - JSON
    """Answer what an answer says apart from ids, times and counts: which fields, which are null, what came of it.

    Of most lists the last member stands for all: they are as long as what was done before made them.
    """
    if isinstance(found, dict):
        return {key: facts(value, key) for key, value in found.items()}
    if isinstance(found, list):
        return [facts(one, name) for one in (found if name in WHOLE else found[-1:])]
    if isinstance(found, str) and name not in PLAIN:
        return "text"
    if isinstance(found, float) or name in COUNTS:
        return bool(found) if name == "expires_in_s" else "number"
    return found


async def conforms(response: ClientResponse, operation: dict[str, Any]) -> dict[str, Any]:
    """Check status, media type, headers and body of an answer by the document; answer what it says."""
    described = resolved(operation["responses"][str(response.status)])
    for name, header in described.get("headers", {}).items():
        assert name in response.headers or not header.get("required"), name
        if name in response.headers:
            check(response.headers[name], header["schema"])
    if "content" not in described:
        assert await response.read() == b""
        return {}
    media = described["content"][response.content_type]
    if not response.content_type.endswith("json"):
        return {}
    found = await read(response)
    check(found, media["schema"])
    return found


async def test_every_example_runs(api: Api, subtests: pytest.Subtests) -> None:
    """Sent exactly as documented, each is answered with its success, and the answer is as documented."""
    ran = set()
    for _method, _path, operation in operations():
        name = operation["operationId"]
        with subtests.test(operation=name):
            hold = await read(await send(api, "holds_place", {}))
            ids = {"/v1/holds/": hold["id"], "/v1/holds/release-batch": hold["id"]}
            if name == "keys_revoke":
                ids["/v1/keys/"] = (await read(await send(api, "keys_create", {})))["id"]
            if name in FIRST:
                assert (await send(api, FIRST[name], ids)).ok
            response = await send(api, name, ids)
            assert response.status == min(map(int, operation["responses"])), await response.text()
            found = await conforms(response, operation)
            media = resolved(operation["responses"][str(response.status)]).get("content", {})
            # How a database is doing is no consequence of the request.
            if name != "operations_get_governor" and "example" in media.get("application/json", {}):
                assert facts(found) == facts(media["application/json"]["example"])
            ran.add(name)
    assert ran == {o["operationId"] for _, _, o in operations()}


def test_every_example_answer_is_as_documented(subtests: pytest.Subtests) -> None:
    """What the document shows as an answer has the schema beside it, and no field without an example."""
    shown = 0
    for _method, _path, operation in operations():
        for status, response in operation["responses"].items():
            for media in resolved(response).get("content", {}).values():
                if "example" in media:
                    with subtests.test(operation=operation["operationId"], status=status):
                        check(media["example"], media["schema"])
                        shown += 1
    assert shown == sum(o.answers is not None for o in OPERATIONS)
