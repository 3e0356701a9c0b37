"""The OpenAPI 3.1 document, written from the declared operations and their models: GET /openapi.json."""

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, get_args

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from expiry import errors
from expiry.api.operation import Operation
from expiry.wanted import TEXT_MAX
from expiry.wire import problems
from expiry.wire.answers import LoopName, ProblemAnswer
from expiry.wire.problems import status_of
from expiry.wire.requests import Query

Json = dict[str, Any]
Refusals = Sequence[type[errors.ExpiryError]]

REF = "#/components/schemas/{model}"
PROBLEM = "application/problem+json"
TAGS = {
    "holds": "Take units out of sale for a while: place, look, renew, confirm, release, return.",
    "batches": "Many holds in one request, each with a result of its own.",
    "resources": "What is held. Declare a capacity, and it cannot be oversold; undeclared ones have no limit.",
    "events": "What happened, in an order that skips nothing.",
    "keys": "API keys, for the platform's operators.",
    "operations": "How the service is doing, and pausing its loops, for the platform's operators.",
    "service": "Without a key: probes, metrics, this document.",
}
DESCRIPTION = (
    "Reservation holds that end exactly once, on time. A hold takes units of a resource out of sale until its "
    "deadline. Errors are problem details (RFC 9457) with a `code`. Times are RFC 3339 in UTC with microseconds; "
    "deadlines are counted by the database's clock, which every answer shows as `server_time`. See /docs."
)

# What aiohttp refuses by itself, in the words of the middleware.
_TOO_LARGE = {
    HTTPStatus.REQUEST_TIMEOUT: ["request_timeout"],
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ["too_large"],
}
_ANYBODY: Refusals = (
    problems.UnauthenticatedError,
    problems.ForbiddenError,
    problems.QuotaError,
    errors.BusyError,
    errors.UnavailableError,
)
_READ: Refusals = (problems.MalformedError, problems.InvalidError)

_PATHS: dict[str, Json] = {
    "/holds/{id}": {
        "name": "id",
        "description": "The hold's id.",
        "schema": {"type": "string", "format": "uuid"},
    },
    "/keys/{id}": {
        "name": "id",
        "description": "The key's public id.",
        "schema": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
    },
    "/resources/{resource_id}": {
        "name": "resource_id",
        "description": "The resource, percent-encoded (a slash is %2F).",
        "schema": {"type": "string", "minLength": 1, "maxLength": TEXT_MAX, "pattern": "^[^\\u0000]+$"},
    },
    "/loops/{name}": {
        "name": "name",
        "description": "The loop.",
        "schema": {"type": "string", "enum": list(get_args(LoopName))},
    },
}
_IF_MATCH = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": "The ETag that the hold must have; otherwise 412. `generation` in the body says the same.",
    "schema": {"type": "string", "pattern": '^("g[1-9][0-9]{0,17}"|\\*)$'},
    "example": "*",
}
_ETAG = {"ETag": {"description": '`"g` and the generation `"`, for If-Match.', "schema": {"type": "string"}}}
_LOCATION = {"Location": {"description": "Where the hold is.", "schema": {"type": "string"}}}
_REPLAYED = {
    "Idempotent-Replayed": {
        "description": "`true`: this was answered before; nothing was done now.",
        "schema": {"type": "string", "const": "true"},
    }
}
_RETRY_AFTER = {
    "Retry-After": {"description": "Come again after so many seconds.", "schema": {"type": "string"}}
}
_BEARER = {"WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}}}
_AGAIN = {"key_in_progress", "quota", "busy", "unavailable", "not_ready"}


def document(operations: Iterable[Operation]) -> Json:
    """Answer the document of these operations."""
    declared = list(operations)
    refs, schemas = _schemas(declared)
    paths: dict[str, Json] = {}
    for operation in declared:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, refs)
    for path, described in _service(refs).items():
        paths[path] = {"get": described}
    return {
        "openapi": "3.1.0",
        "info": {"title": "expiry", "version": version("expiry"), "description": DESCRIPTION},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key: `Authorization: Bearer <key>`, made with `expiry keys create`.",
                }
            },
        },
    }


def route(operations: Iterable[Operation]) -> web.RouteDef:
    """Answer the route of the document, which is written once."""
    body = json.dumps(document(operations)).encode()

    async def openapi(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    return web.get("/openapi.json", openapi)


def _schemas(operations: Iterable[Operation]) -> tuple[Mapping[type[BaseModel], Json], Json]:
    """Answer references to the models, and the schemas that they lead to."""
    wanted: dict[type[BaseModel], Any] = {ProblemAnswer: "serialization"}
    for operation in operations:
        if not issubclass(operation.takes, Query):
            wanted[operation.takes] = "validation"
        if operation.answers is not None:
            wanted[operation.answers] = "serialization"
    refs, schemas = models_json_schema(list(wanted.items()), ref_template=REF)
    by_model = {model: ref for (model, _), ref in refs.items()}
    return {model: by_model[model] for model in wanted}, schemas["$defs"]


def _operation(operation: Operation, refs: Mapping[type[BaseModel], Json]) -> Json:
    summary, _, description = inspect.cleandoc(operation.work.__doc__ or "").partition("\n\n")
    needs = f"Needs a key with the scope `{operation.scope}`."
    described: Json = {
        "operationId": f"{operation.tag}_{operation.work.__name__.strip('_')}",
        "tags": [operation.tag],
        "summary": " ".join(summary.split()),
        "description": "\n\n".join([*(" ".join(p.split()) for p in description.split("\n\n") if p), needs]),
        "security": [{"key": []}],
        "x-scope": operation.scope,
        "parameters": _parameters(operation),
        "responses": _responses(operation, refs),
    }
    if not issubclass(operation.takes, Query):
        [example] = operation.takes.model_json_schema()["examples"]
        described["requestBody"] = {
            "required": bool(operation.takes.model_json_schema().get("required") or example),
            "content": {"application/json": {"schema": refs[operation.takes], "example": example}},
        }
    return described


def _parameters(operation: Operation) -> list[Json]:
    found = [p | {"in": "path", "required": True} for path, p in _PATHS.items() if path in operation.path]
    if issubclass(operation.takes, Query):
        found += _query(operation.takes)
    if operation.key is not None:
        found.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": operation.key == "required",
                "description": "Makes the request safe to repeat: a new one for each new request, the same one for "
                "each retry; quoted or bare. Kept for a day at least.",
                "schema": {"type": "string", "minLength": 1, "maxLength": TEXT_MAX, "pattern": "^[!#-~]+$"},
            }
        )
    if operation.conditional:
        found.append(_IF_MATCH)
    return found


def _query(model: type[Query]) -> list[Json]:
    schema = model.model_json_schema()
    example = (schema.get("examples") or [{}])[0]
    found = []
    for name, field in schema.get("properties", {}).items():
        options = [option for option in field.pop("anyOf", []) if option.get("type") != "null"]
        described = {k: v for k, v in field.items() if k not in ("title", "description", "examples")}
        if described.get("default", 0) is None:
            del described["default"]
        ref = (options[0] if options else {}).get("$ref", "").rpartition("/")[2]
        parameter = {
            "name": name,
            "in": "query",
            "required": False,
            "description": field["description"],
            "schema": described | (schema["$defs"][ref] if ref else options[0] if options else {}),
        }
        found.append(parameter | ({"example": example[name]} if name in example else {}))
    return found


def _responses(operation: Operation, refs: Mapping[type[BaseModel], Json]) -> Json:
    done: Json = {"description": operation.status.phrase}
    if operation.answers is not None:
        done["content"] = {"application/json": {"schema": refs[operation.answers]}}
    headers: Json = {}
    if operation.answers is not None and operation.answers.__name__ == "HoldAnswer":
        headers |= _ETAG
    if operation.path == "/v1/holds" and operation.method == "POST":
        headers |= _LOCATION
    if operation.key is not None:
        headers |= _REPLAYED
    if headers:
        done["headers"] = headers
    return {str(operation.status.value): done} | refusals(_refusals(operation), refs, _by_aiohttp(operation))


def _refusals(operation: Operation) -> Refusals:
    """Say how it may refuse: as anybody does, for what it reads, and for what it is."""
    found = [*_ANYBODY, *operation.refuses]
    if operation.takes.model_fields or operation.key is not None or "{resource_id}" in operation.path:
        found += _READ
    else:
        found.append(problems.InvalidError)  # a parameter that it does not know
    if not issubclass(operation.takes, Query):
        found.append(problems.NotJSONError)
    if operation.key == "required":
        found.append(problems.KeyMissingError)
    if operation.key is not None:
        found += [errors.KeyInProgressError, errors.KeyReusedError]
    return found


def _by_aiohttp(operation: Operation) -> Mapping[HTTPStatus, Sequence[str]]:
    return {} if issubclass(operation.takes, Query) else _TOO_LARGE


def refusals(
    found: Refusals,
    refs: Mapping[type[BaseModel], Json],
    more: Mapping[HTTPStatus, Sequence[str]] | None = None,
) -> Json:
    """Describe refusals by status, with their codes."""
    codes: dict[HTTPStatus, dict[str, str]] = {}
    for error in found:
        status, _ = status_of(error)
        codes.setdefault(status, {})[error.code] = " ".join((error.__doc__ or "").split())
    for status, names in (more or {}).items():
        codes.setdefault(status, {}).update(dict.fromkeys(names, status.phrase))
    return {str(s.value): _refusal(s, codes[s], refs[ProblemAnswer]) for s in sorted(codes)}


def _refusal(status: HTTPStatus, codes: Mapping[str, str], schema: Json) -> Json:
    described: Json = {
        "description": "\n".join(f"- `{code}`: {text}" for code, text in sorted(codes.items())),
        "content": {PROBLEM: {"schema": schema}},
        "x-codes": sorted(codes),
    }
    headers = (_BEARER if status == HTTPStatus.UNAUTHORIZED else {}) | (
        _RETRY_AFTER if _AGAIN & set(codes) else {}
    )
    return described | ({"headers": headers} if headers else {})


def _service(refs: Mapping[type[BaseModel], Json]) -> dict[str, Json]:
    """Describe what needs no key."""
    status = {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}
    open_to_all = {
        "/healthz": ("The process runs.", "application/json", status),
        "/readyz": ("The process can do its work.", "application/json", status),
        "/metrics": ("Metrics in Prometheus's text format.", "text/plain", {"type": "string"}),
        "/openapi.json": ("This document.", "application/json", {"type": "object"}),
        "/docs": ("This document, to be read.", "text/html", {"type": "string"}),
    }
    found: dict[str, Json] = {}
    for path, (summary, media, schema) in open_to_all.items():
        responses = {"200": {"description": "OK", "content": {media: {"schema": schema}}}}
        if path == "/readyz":
            responses |= refusals([problems.NotReadyError], refs)
        found[path] = {
            "operationId": "service_" + path.strip("/").partition(".")[0],
            "tags": ["service"],
            "summary": summary,
            "security": [],
            "responses": responses,
        }
    return found
