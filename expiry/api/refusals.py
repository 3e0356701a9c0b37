"""Problems for what never becomes a request of ours: heads that cannot be read, are too large or do not come."""

import json
import re
from http import HTTPStatus

import structlog
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong

from expiry.api.problems import CODING, problem, refused
from expiry.wire.problems import NotJSONError

# aiohttp's parser says what is wrong, and then quotes the request: only the first part is for an answer
# or a log, for what it quotes may be a key.
_SAID = re.compile(r"[A-Za-z][A-Za-z0-9 ,'/-]*")
_TOO_MANY = "Too many headers"

log = structlog.get_logger()


def unreadable(request: web.BaseRequest, error: HttpProcessingError) -> web.Response:
    """Answer a head that the parser refused: 400, 431 if it is too large, 415 for a coding."""
    said = _SAID.match(error.message)
    reason = said[0].strip() if said else "it cannot be read"
    log.debug("http.unreadable", kind=type(error).__name__, reason=reason)
    if isinstance(error, LineTooLong) or error.message.startswith(_TOO_MANY):
        return problem(
            request,
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            code="headers_too_large",
            title="Headers too large",
            detail="The request line or a header is too long, or there are too many headers.",
        )
    if isinstance(error, ContentEncodingError):  # one that aiohttp knows, but has no library for
        return refused(request, NotJSONError(CODING))
    return problem(
        request,
        HTTPStatus.BAD_REQUEST,
        code="malformed",
        title="Malformed request",
        detail=f"This is no request of HTTP/1.1: {reason}.",
    )


def by_aiohttp(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """Answer what aiohttp itself refused before any middleware ran."""
    status = HTTPStatus(error.status)
    return problem(
        request,
        status,
        code=status.phrase.lower().replace(" ", "_"),
        title=status.phrase,
        detail=status.description or status.phrase,
    )


def internal(request: web.BaseRequest) -> web.Response:
    """Answer a fault of ours."""
    return problem(
        request,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        code="internal",
        title="Internal error",
        detail="A bug of this service; what happened is in its log.",
    )


def _raw(status: HTTPStatus, *, code: str, title: str, detail: str) -> bytes:
    """Answer a whole response, for a connection on which no request came together."""
    members = {
        "type": f"urn:expiry:problem:{code}",
        "title": title,
        "status": status.value,
        "detail": detail,
        "instance": "/",
        "code": code,
    }
    body = json.dumps(members).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/problem+json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


HEAD_LATE = _raw(
    HTTPStatus.REQUEST_TIMEOUT,
    code="request_timeout",
    title="Request timeout",
    detail="The head of the request did not come in time.",
)
HEADERS_TOO_LARGE = _raw(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    code="headers_too_large",
    title="Headers too large",
    detail="The head of the request is too large.",
)
