"""The OpenAPI 3.1 document, written from the declared operations and their models: GET /openapi.json."""

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from expiry import errors
from expiry.api.document import vocabulary
from expiry.api.document.examples import answered
from expiry.api.document.vocabulary import BY_AIOHTTP, Json
from expiry.api.operation import Operation
from expiry.wire import problems
from expiry.wire.answers import HoldAnswer, ProblemAnswer
from expiry.wire.problems import status_of
from expiry.wire.queries import Query

Refusals = Sequence[type[errors.ExpiryError]]

REF = "#/components/schemas/{model}"
PROBLEM = "application/problem+json"

_ANYBODY: Refusals = (
    problems.MalformedError,  # a header twice, NUL in the query
    problems.InvalidError,  # a parameter that it does not know
    problems.UnauthenticatedError,
    problems.ForbiddenError,
    problems.QuotaError,
    errors.BusyError,
    errors.UnavailableError,
)
_COME_AGAIN = {error.code for error in problems.COME_AGAIN}


class _Writer:
    """Writes the parts of one document; what several operations answer alike is written once."""

    def __init__(self, declared: Sequence[Operation]) -> None:
        self.refs, self.schemas = _schemas(declared)
        self.responses: Json = {}

    def operation(self, operation: Operation, others: Iterable[Operation]) -> Json:
        """Describe one operation; `others` are all that there are."""
        summary, paragraphs = _prose(operation)
        needs = f"Needs a key with the scope `{operation.scope}`."
        described: Json = {
            "operationId": _operation_id(operation),
            "tags": [operation.tag],
            "summary": summary,
            "description": "\n\n".join([*paragraphs, needs]),
            "security": [{"key": [operation.scope]}],
            "x-scope": operation.scope,
            "parameters": _parameters(operation),
            "responses": {
                str(operation.status.value): self._done(operation),
                **self.refusals(_codes(operation, others)),
            },
        }
        if not issubclass(operation.takes, Query):
            schema = operation.takes.model_json_schema()
            [example] = schema["examples"]
            described["requestBody"] = {
                "required": bool(schema.get("required") or schema.get("allOf")),
                "content": {"application/json": {"schema": self.refs[operation.takes], "example": example}},
            }
        return described

    def _done(self, operation: Operation) -> Json:
        done: Json = {"description": operation.status.phrase}
        if operation.answers is not None:
            schema = self.refs[operation.answers]
            example = answered(_operation_id(operation), _example(schema, self.schemas))
            done["content"] = {"application/json": {"schema": schema, "example": example}}
        headers: Json = {}
        if operation.answers is HoldAnswer:
            headers["ETag"] = vocabulary.ETAG
            if operation.status == HTTPStatus.CREATED:
                headers["Location"] = vocabulary.LOCATION
        if operation.takes_key:
            headers["Idempotent-Replayed"] = vocabulary.REPLAYED
        return done | ({"headers": headers} if headers else {})

    def refusals(self, codes: Mapping[str, tuple[HTTPStatus, str]]) -> Json:
        """Describe refusals by status, with their codes."""
        statuses = sorted({status for status, _ in codes.values()})
        return {
            str(s.value): self._refusal(s, {c: t for c, (of, t) in codes.items() if of == s})
            for s in statuses
        }

    def _refusal(self, status: HTTPStatus, codes: Mapping[str, str]) -> Json:
        name = ".".join([str(status.value), *sorted(codes)])
        schema = {
            "allOf": [self.refs[ProblemAnswer]],
            "properties": {"status": {"const": status.value}, "code": {"enum": sorted(codes)}},
        }
        self.responses[name] = {
            "description": "\n".join(f"- `{code}`: {codes[code]}" for code in sorted(codes)),
            "content": {PROBLEM: {"schema": schema}},
            "x-codes": {code: codes[code] for code in sorted(codes)},
        }
        if headers := _headers(status, set(codes)):
            self.responses[name]["headers"] = headers
        return {"$ref": f"#/components/responses/{name}"}

    def service(self, path: str) -> Json:
        """Describe a path that needs no key."""
        summary, media, schema = vocabulary.OPEN[path]
        refused = [problems.NotReadyError] if path == "/readyz" else []
        return {
            "operationId": "service_" + path.strip("/").partition(".")[0],
            "tags": ["service"],
            "summary": summary,
            "security": [],
            "responses": {
                "200": {"description": HTTPStatus.OK.phrase, "content": {media: {"schema": schema}}},
                **self.refusals(_by_code(refused)),
            },
        }


def document(operations: Iterable[Operation]) -> Json:
    """Answer the document of these operations."""
    declared = list(operations)
    writer = _Writer(declared)
    paths: dict[str, Json] = {}
    for operation in declared:
        paths.setdefault(operation.path, {})[operation.method.lower()] = writer.operation(operation, declared)
    for path in vocabulary.OPEN:
        paths[path] = {"get": writer.service(path)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "expiry", "version": version("expiry"), "description": vocabulary.DESCRIPTION},
        "tags": [{"name": name, "description": text} for name, text in vocabulary.TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": writer.schemas,
            "responses": dict(sorted(writer.responses.items())),
            "securitySchemes": vocabulary.SECURITY,
        },
    }


def route(described: Json) -> web.RouteDef:
    """Answer the route of the document, which is written once."""
    body = json.dumps(described).encode()

    async def openapi(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    return web.get("/openapi.json", openapi)


def _schemas(operations: Iterable[Operation]) -> tuple[Mapping[type[BaseModel], Json], Json]:
    """Answer references to the models, and the schemas that they lead to."""
    wanted: dict[type[BaseModel], Any] = {ProblemAnswer: "validation"}  # what does not apply is not there
    for operation in operations:
        if not issubclass(operation.takes, Query):
            wanted[operation.takes] = "validation"
        if operation.answers is not None:
            wanted[operation.answers] = "serialization"
    refs, schemas = models_json_schema(list(wanted.items()), ref_template=REF)
    by_model = {model: ref for (model, _), ref in refs.items()}
    return {model: by_model[model] for model in wanted}, schemas["$defs"]


def _prose(operation: Operation) -> tuple[str, list[str]]:
    """Answer the first paragraph of the handler's docstring, and the others."""
    paragraphs = inspect.cleandoc(operation.work.__doc__ or "").split("\n\n")
    summary, *others = (" ".join(p.split()) for p in paragraphs)
    return summary, others


def _operation_id(operation: Operation) -> str:
    return f"{operation.tag}_{operation.work.__name__.strip('_')}"


def _parameters(operation: Operation) -> list[Json]:
    in_path = vocabulary.IN_PATH.items()
    found = [p | {"in": "path", "required": True} for path, p in in_path if path in operation.path]
    if issubclass(operation.takes, Query):
        found += _query(operation.takes)
    if operation.takes_key:
        found.append(vocabulary.IDEMPOTENCY_KEY | {"required": operation.key_required})
    if operation.conditional:
        found.append(vocabulary.IF_MATCH)
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


def _example(schema: Json, schemas: Json) -> Any:  # noqa: ANN401 - JSON
    """Put together what the fields give as their examples."""
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if "examples" in schema:
        return schema["examples"][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], schemas)
    if schema["type"] == "array":
        return [_example(schema["items"], schemas)]
    return {name: _example(field, schemas) for name, field in schema["properties"].items()}


def _codes(operation: Operation, others: Iterable[Operation]) -> dict[str, tuple[HTTPStatus, str]]:
    """Say how it may refuse: as anybody does, for what it reads, and for what it is."""
    found = [*_ANYBODY, *operation.refuses]
    by_aiohttp = []
    if not issubclass(operation.takes, Query):
        found.append(problems.NotJSONError)
        by_aiohttp += ["request_timeout", "too_large"]
    if operation.key_required:
        found.append(problems.KeyMissingError)
    if operation.takes_key:
        found += [errors.KeyInProgressError, errors.KeyReusedError]
    if _shadowed(operation, others):
        by_aiohttp.append("method_not_allowed")
    return _by_code(found) | {code: BY_AIOHTTP[code] for code in by_aiohttp}


def _shadowed(operation: Operation, others: Iterable[Operation]) -> bool:
    """Say whether a fixed path in place of this one's last parameter has other methods: holds/batch, no hold."""
    parent, _, last = operation.path.rpartition("/")
    return last.startswith("{") and any(
        parent == other.path.rpartition("/")[0] and not other.path.endswith("}") for other in others
    )


def _by_code(found: Iterable[type[errors.ExpiryError]]) -> dict[str, tuple[HTTPStatus, str]]:
    return {
        error.code: (
            status_of(error)[0],
            vocabulary.MEANING.get(error.code) or " ".join((error.__doc__ or "").split()),
        )
        for error in found
    }


def _headers(status: HTTPStatus, codes: set[str]) -> Json:
    if status == HTTPStatus.UNAUTHORIZED:
        return {"WWW-Authenticate": vocabulary.AUTHENTICATE}
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        return {"Allow": vocabulary.ALLOW}
    if codes & _COME_AGAIN:
        return {"Retry-After": vocabulary.retry_after(always=codes <= _COME_AGAIN)}
    return {}
