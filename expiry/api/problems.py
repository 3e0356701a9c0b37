"""The middleware that answers problem details: whatever a handler raises; only a bug of ours becomes a 500."""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from http import HTTPStatus
from typing import Any, get_args

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from expiry import errors
from expiry.wire.answers import LoopName
from expiry.wire.problems import (
    COME_AGAIN,
    RETRY_AFTER_S,
    TYPE,
    MalformedError,
    PathNotFoundError,
    UnauthenticatedError,
    status_of,
)
from expiry.wire.times import rfc3339

log = structlog.get_logger()

CODING = "Content-Encoding: gzip or deflate, or send the body as it is."

# What aiohttp itself refuses; its other statuses are named by their phrase.
_HTTP_CODES = {
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too_large",
}
_HTTP_DETAILS = {
    HTTPStatus.METHOD_NOT_ALLOWED: "This path does not know the method; see Allow.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "A body has at most {bytes_max:,} bytes.",
}


# Paths that nearly are one of ours, and what they lack. (A route takes only what can be an id.)
_NEARLY: tuple[tuple[re.Pattern[str], errors.NotFoundError], ...] = (
    (
        re.compile(r"/v1/holds/[^/]+(/(history|renew|confirm|release|return))?"),
        errors.HoldNotFoundError("There is no such hold: its id is a UUID."),
    ),
    (
        re.compile(r"/v1/keys/[^/]+"),
        errors.KeyNotFoundError("There is no such API key: its id has 16 hexadecimal digits."),
    ),
    (
        re.compile(r"/v1/loops/[^/]+/(pause|resume)"),
        errors.LoopNotFoundError(f"There is no such loop: it is one of {', '.join(get_args(LoopName))}."),
    ),
    (
        re.compile(r"/v1/resources/.+/.*"),
        PathNotFoundError("There is nothing at this path; a slash in the id of a resource is %2F."),
    ),
    (
        re.compile(r"/v1/v1(/.*)?"),
        PathNotFoundError("There is nothing at this path: /v1 is there twice; a base URL goes without it."),
    ),
)


@web.middleware
async def answer_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever is raised into a problem; nothing else reaches the client."""
    try:
        return await handler(request)
    except errors.ExpiryError as error:
        return refused(request, error)
    except web.HTTPException as error:
        return _refused_by_aiohttp(request, error)
    except (HttpProcessingError, web.RequestPayloadError) as error:
        log.debug("api.body_unreadable", reason=repr(error))
        return refused(request, MalformedError("The body could not be read to its end."))
    except Exception:  # the outer edge: a bug of ours, never shown to the client
        log.exception("api.failed", method=request.method, path=request.path)
        return problem(
            request,
            HTTPStatus.INTERNAL_SERVER_ERROR,
            code="internal",
            title="Internal error",
            detail="A bug of this service; what happened is in its log.",
        )


def refused(request: web.BaseRequest, error: errors.ExpiryError) -> web.Response:
    """Answer a refusal."""
    headers = {}
    if isinstance(error, COME_AGAIN):
        headers["Retry-After"] = str(error.facts.get("retry_after_s", RETRY_AFTER_S))
    elif isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = 'Bearer realm="expiry"'
    return _response(refusal(error, request.rel_url.raw_path), headers)


def refusal(error: errors.ExpiryError, instance: str) -> dict[str, Any]:
    """Describe a refusal; `instance` is the path of what was asked."""
    status, title = status_of(type(error))
    missing = {"missing": error.missing} if isinstance(error, errors.NotFoundError) else {}
    return _document(status, error.code, title, str(error), instance, {**missing, **error.facts})


def problem(
    request: web.BaseRequest,
    status: HTTPStatus,
    *,
    code: str,
    title: str,
    detail: str,
    allow: str | None = None,
) -> web.Response:
    """Answer a problem that no error of ours names."""
    document = _document(status, code, title, detail, request.rel_url.raw_path, {})
    return _response(document, {} if allow is None else {"Allow": allow})


def _document(
    status: HTTPStatus, code: str, title: str, detail: str, instance: str, facts: Mapping[str, object]
) -> dict[str, Any]:
    members: dict[str, Any] = {
        "type": TYPE + code,
        "title": title,
        "status": status.value,
        "detail": detail,
        "instance": instance,
        "code": code,
    }
    for name, value in facts.items():
        if value is not None:
            members[name] = rfc3339(value) if isinstance(value, datetime) else value
    return members


def _response(document: Mapping[str, Any], headers: Mapping[str, str]) -> web.Response:
    return web.Response(
        status=document["status"],
        body=json.dumps(document, default=str).encode(),
        headers={"Content-Type": "application/problem+json", **headers},
    )


def _not_found(request: web.Request) -> errors.NotFoundError:
    path = request.rel_url.raw_path
    if path == "/" and any(found.canonical == "/docs" for found in request.app.router.resources()):
        return PathNotFoundError("There is nothing at this path; the guide is at /docs.")
    return next((error for nearly, error in _NEARLY if nearly.fullmatch(path)), PathNotFoundError())


def _refused_by_aiohttp(request: web.Request, error: web.HTTPException) -> web.Response:
    if isinstance(error, web.HTTPNotFound):
        return refused(request, _not_found(request))
    status = HTTPStatus(error.status)
    known = _HTTP_DETAILS.get(status, "").format(bytes_max=request.client_max_size)
    return problem(
        request,
        status,
        code=_HTTP_CODES.get(status, status.phrase.lower().replace(" ", "_")),
        title=status.phrase,
        detail=known or status.description or status.phrase,
        allow=error.headers.get("Allow"),
    )
