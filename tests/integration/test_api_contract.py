"""The OpenAPI document: valid, whole, and kept by the API whatever schemathesis draws."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema import ValidationError as SchemaError
from openapi_spec_validator import OpenAPIV31SpecValidator

from expiry.api.app import OPERATIONS
from expiry.api.document.openapi import document
from expiry.api.document.vocabulary import BY_AIOHTTP, TAGS
from expiry.errors import ExpiryError
from expiry.wire.problems import PROBLEMS, NotPlacedError
from tests.api_client import PLATFORM, TENANT, Api, read

ROOT = Path(__file__).parents[2]
MAX_EXAMPLES = 30  # for one operation in the phase that draws at random
RUN_S_MAX = 150  # of one run on a busy machine; 25 to 45 s are usual


@pytest.fixture
async def api(start_api: Callable[..., Any]) -> Api:
    """Give the test an API without a queue: the wire is the same."""
    started: Api = await start_api(None)
    return started


async def test_the_document_is_valid(api: Api) -> None:
    """It is OpenAPI 3.1 to an independent validator, and served without a key as it was written."""
    response = await api.ask("GET", "/openapi.json", key=None)
    assert (response.status, response.content_type) == (200, "application/json")
    served = await read(response)
    OpenAPIV31SpecValidator(served).validate()
    assert served == document(OPERATIONS)


async def test_every_path_is_in_the_document(api: Api) -> None:
    """Nothing is served that is not described, and the reverse."""
    routes = api.client.app.router.routes()
    served = {(r.resource.canonical, r.method.lower()) for r in routes if r.resource and r.method != "HEAD"}
    described = {(path, method) for path, item in document(OPERATIONS)["paths"].items() for method in item}
    assert served == described


def test_every_operation_says_what_it_is() -> None:
    """Names are unique, tags are known, and text is there for whoever reads it."""
    described = document(OPERATIONS)
    operations = [o for item in described["paths"].values() for o in item.values()]
    names = [o["operationId"] for o in operations]
    assert len(set(names)) == len(names)
    assert [t["name"] for t in described["tags"]] == list(TAGS)
    for operation in operations:
        assert operation["summary"].endswith((".", "!"))
        assert set(operation["tags"]) <= TAGS.keys()
        assert ("x-scope" in operation) == bool(operation["security"])


def test_every_code_is_in_the_document() -> None:
    """A code that can reach a client is documented where it can: at an operation, or in a batch's results."""
    codes = {c for r in document(OPERATIONS)["components"]["responses"].values() for c in r["x-codes"]}
    known = {error.code for error in PROBLEMS if error not in (ExpiryError, NotPlacedError)}
    assert codes == known | BY_AIOHTTP.keys()


def test_whatever_is_asked_may_be_malformed_or_invalid() -> None:
    """A header twice, NUL in a query, a parameter that is not known: no operation needs fields for that."""
    described = document(OPERATIONS)
    for item in described["paths"].values():
        for operation in item.values():
            if operation["security"]:
                names = {r.get("$ref", "").rpartition("/")[2] for r in operation["responses"].values()}
                codes = {code for name in names if name for code in name.split(".")[1:]}
                assert {"malformed", "invalid"} <= codes, operation["operationId"]


ACCEPTED_BY_BOTH: list[dict[str, Any]] = [
    {"ttl_s": 60, "resource_id": "a"},
    {"ttl_s": 60, "resource_id": "a", "quantity": 2, "items": None, "expires_at": None},
    {"expires_at": "2126-12-24T18:00:00Z", "items": [{"resource_id": "a"}], "resource_id": None},
]
REFUSED_BY_BOTH: list[dict[str, Any]] = [
    {"ttl_s": 60, "expires_at": "2126-12-24T18:00:00Z", "resource_id": "a"},
    {"resource_id": "a"},
    {"ttl_s": None, "resource_id": "a"},
    {"ttl_s": 60},
    {"ttl_s": 60, "resource_id": "a", "items": [{"resource_id": "b"}]},
    {"ttl_s": 60, "resource_id": "a", "items": [{"resource_id": "b"}], "quantity": 1},
    {"ttl_s": 60, "items": [{"resource_id": "a"}], "quantity": 1},
    {"ttl_s": 60, "resource_id": "a", "surprise": 1},
    {"ttl_s": 0, "resource_id": "a"},
    {"ttl_s": 60, "resource_id": "x" * 256},
    {"ttl_s": 60, "resource_id": "a", "metadata": []},
]


@pytest.mark.parametrize("body", [*ACCEPTED_BY_BOTH, *REFUSED_BY_BOTH])
def test_the_schema_is_as_strict_as_the_model(body: dict[str, Any]) -> None:
    """What goes together, and what does not, is the same to a reader of the document as to the API."""
    described = document(OPERATIONS)
    schema = {"$ref": "#/components/schemas/PlaceBody", "components": described["components"]}
    [place] = [o for o in OPERATIONS if (o.method, o.path) == ("POST", "/v1/holds")]
    by_model = _accepts(lambda: place.takes.model_validate(body))
    assert (
        _accepts(lambda: Draft202012Validator(schema).validate(body))
        == by_model
        == (body in ACCEPTED_BY_BOTH)
    )


def _accepts(check: Callable[[], object]) -> bool:
    try:
        check()
    except (SchemaError, ValueError):
        return False
    return True


@pytest.mark.timeout(RUN_S_MAX + 30)
@pytest.mark.parametrize("key", [TENANT, PLATFORM])
async def test_the_api_keeps_to_the_document(api: Api, key: str, tmp_path: Path) -> None:
    """Whatever schemathesis draws from the document, good and bad, is answered as the document says; never 500."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "schemathesis.cli",
            "--config-file",
            str(ROOT / "tests/data/schemathesis.toml"),
        ),
        *("run", str(api.client.make_url("/openapi.json")), "--header", f"Authorization: Bearer {key}"),
        *("--max-examples", str(MAX_EXAMPLES), "--no-color"),
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_S_MAX):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    report = said.decode(errors="replace")
    assert process.returncode == 0, report
    [generated] = re.findall(r"^  (\d+) generated", report, re.MULTILINE)
    assert int(generated) > 1000, report
