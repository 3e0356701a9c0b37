"""Problem details (RFC 9457): one table from error to status and title, and the middleware that answers them.

Whatever a handler raises becomes `application/problem+json`; only a bug of ours becomes a 500.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from http import HTTPStatus
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from expiry import errors
from expiry.api.times import rfc3339

RETRY_AFTER_S = 1

log = structlog.get_logger()


class MalformedError(errors.ExpiryError):
    """The request cannot be read."""

    code = "malformed"


class KeyMissingError(errors.ExpiryError):
    """This request needs an Idempotency-Key header, so that repeating it cannot place twice."""

    code = "idempotency_key_missing"


class UnauthenticatedError(errors.ExpiryError):
    """Send a valid API key: Authorization: Bearer <key>."""

    code = "unauthenticated"


class ForbiddenError(errors.ExpiryError):
    """This API key does not have the scope that is needed here."""

    code = "forbidden"


class NotJSONError(errors.ExpiryError):
    """Send the body as JSON in UTF-8, with Content-Type: application/json."""

    code = "not_json"


class InvalidError(errors.ExpiryError):
    """A field of the request is not as it should be; see `errors`."""

    code = "invalid"


class NotReadyError(errors.ExpiryError):
    """Something that this process needs is not there; see `failing`."""

    code = "not_ready"


PROBLEMS: dict[type[errors.ExpiryError], tuple[HTTPStatus, str]] = {
    MalformedError: (HTTPStatus.BAD_REQUEST, "Malformed request"),
    KeyMissingError: (HTTPStatus.BAD_REQUEST, "Idempotency-Key missing"),
    UnauthenticatedError: (HTTPStatus.UNAUTHORIZED, "No valid API key"),
    ForbiddenError: (HTTPStatus.FORBIDDEN, "Not allowed with this API key"),
    errors.HoldNotFoundError: (HTTPStatus.NOT_FOUND, "Not found"),
    errors.AlreadyEndedError: (HTTPStatus.CONFLICT, "Already ended"),
    errors.NotConfirmedError: (HTTPStatus.CONFLICT, "Not confirmed"),
    errors.LimitReachedError: (HTTPStatus.CONFLICT, "Renewal limit reached"),
    errors.InsufficientCapacityError: (HTTPStatus.CONFLICT, "Insufficient capacity"),
    errors.KeyInProgressError: (HTTPStatus.CONFLICT, "Request in progress"),
    errors.HoldExpiredError: (HTTPStatus.GONE, "Hold expired"),
    errors.GenerationMismatchError: (HTTPStatus.PRECONDITION_FAILED, "Another generation"),
    NotJSONError: (HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Not JSON"),
    InvalidError: (HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid request"),
    errors.OutOfRangeError: (HTTPStatus.UNPROCESSABLE_ENTITY, "Out of range"),
    errors.KeyReusedError: (HTTPStatus.UNPROCESSABLE_ENTITY, "Idempotency-Key reused"),
    errors.BusyError: (HTTPStatus.SERVICE_UNAVAILABLE, "Busy"),
    errors.UnavailableError: (HTTPStatus.SERVICE_UNAVAILABLE, "Unavailable"),
    NotReadyError: (HTTPStatus.SERVICE_UNAVAILABLE, "Not ready"),
    errors.ExpiryError: (HTTPStatus.CONFLICT, "Refused"),  # what has no entry of its own
}

_COME_AGAIN = {"Retry-After": str(RETRY_AFTER_S)}
_HEADERS: dict[type[errors.ExpiryError], Mapping[str, str]] = {
    UnauthenticatedError: {"WWW-Authenticate": 'Bearer realm="expiry"'},
    errors.KeyInProgressError: _COME_AGAIN,
    errors.BusyError: _COME_AGAIN,
    errors.UnavailableError: _COME_AGAIN,
    NotReadyError: _COME_AGAIN,
}

# What aiohttp itself refuses; its other statuses are named by their phrase.
_HTTP_CODES = {
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too_large",
}
_HTTP_DETAILS = {
    HTTPStatus.NOT_FOUND: "There is nothing at this path.",
    HTTPStatus.METHOD_NOT_ALLOWED: "This path does not know the method; see Allow.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "A body has at most 1 MiB.",
}


@web.middleware
async def answer_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever is raised into a problem; nothing else reaches the client."""
    try:
        return await handler(request)
    except errors.ExpiryError as error:
        return _refused(request, error)
    except web.HTTPException as error:
        return _refused_by_aiohttp(request, error)
    except (HttpProcessingError, web.RequestPayloadError) as error:
        log.debug("api.body_unreadable", reason=repr(error))
        return _refused(request, MalformedError("The body could not be read to its end."))
    except Exception:  # the outer edge: a bug of ours, never shown to the client
        log.exception("api.failed", method=request.method, path=request.path)
        return problem(
            request,
            HTTPStatus.INTERNAL_SERVER_ERROR,
            code="internal",
            title="Internal error",
            detail="A bug of this service; what happened is in its log.",
        )


def problem(
    request: web.Request,
    status: HTTPStatus,
    *,
    code: str,
    title: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    facts: Mapping[str, object] | None = None,
) -> web.Response:
    """Answer one problem; facts that are None are left out."""
    members: dict[str, Any] = {
        "type": f"urn:expiry:problem:{code}",
        "title": title,
        "status": status.value,
        "detail": detail,
        "instance": request.rel_url.raw_path,
        "code": code,
    }
    for name, value in (facts or {}).items():
        if value is not None:
            members[name] = rfc3339(value) if isinstance(value, datetime) else value
    return web.Response(
        status=status,
        body=json.dumps(members, default=str).encode(),
        headers={"Content-Type": "application/problem+json", **(headers or {})},
    )


def _refused(request: web.Request, error: errors.ExpiryError) -> web.Response:
    status, title = next(PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS)
    return problem(
        request,
        status,
        code=error.code,
        title=title,
        detail=str(error),
        headers=_HEADERS.get(type(error)),
        facts=error.facts,
    )


def _refused_by_aiohttp(request: web.Request, error: web.HTTPException) -> web.Response:
    status = HTTPStatus(error.status)
    allow = error.headers.get("Allow")
    return problem(
        request,
        status,
        code=_HTTP_CODES.get(status, status.phrase.lower().replace(" ", "_")),
        title=status.phrase,
        detail=_HTTP_DETAILS.get(status) or status.description or status.phrase,
        headers=None if allow is None else {"Allow": allow},
    )
