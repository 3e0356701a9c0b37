"""What the OpenAPI document says in fixed words: tags, parameters, headers, and the paths that need no key."""

from http import HTTPStatus
from typing import Any, get_args

from expiry.wanted import TEXT_MAX
from expiry.wire.answers import LoopName
from expiry.wire.fields import NO_NUL

Json = dict[str, Any]

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
    "deadlines are counted by the database's clock, which every answer with a deadline shows as `server_time`. "
    "Every GET answers HEAD as well; another method is 405 with `Allow`. The guide is at /docs."
)
SECURITY = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key: `Authorization: Bearer <key>`, made with `expiry keys create` or POST /v1/keys.",
    }
}

# By the part of the path that they stand in.
IN_PATH: dict[str, Json] = {
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
        "schema": {"type": "string", "minLength": 1, "maxLength": TEXT_MAX, "pattern": NO_NUL},
        "example": "room-12/2026-12-24",
    },
    "/loops/{name}": {
        "name": "name",
        "description": "The loop.",
        "schema": {"type": "string", "enum": list(get_args(LoopName))},
        "example": "sweep",
    },
}
IDEMPOTENCY_KEY: Json = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "Makes the request safe to repeat: a new one for each new request, the same one for each retry; "
    "quoted or bare. Kept for a day at least.",
    "schema": {"type": "string", "minLength": 1, "maxLength": TEXT_MAX, "pattern": "^[!-~]([ -~]*[!-~])?$"},
}
IF_MATCH: Json = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": 'The ETag that the hold must have, like `"g1"`; otherwise 412. `generation` in the body says '
    "the same.",
    "schema": {"type": "string", "pattern": '^(\\*|(W/)?"[!#-~]*")$'},
    "example": "*",
}

ETAG: Json = {
    "description": "`g` and the generation, quoted: for If-Match.",
    "required": True,
    "schema": {"type": "string", "pattern": '^"g[1-9][0-9]*"$'},
    "example": '"g1"',
}
LOCATION: Json = {
    "description": "Where the hold is.",
    "required": True,
    "schema": {"type": "string", "format": "uri-reference", "pattern": "^/v1/holds/[0-9a-f-]{36}$"},
}
REPLAYED: Json = {
    "description": "`true`: this was answered before; nothing was done now.",
    "schema": {"type": "string", "const": "true"},
}
AUTHENTICATE: Json = {
    "description": "The scheme to use.",
    "required": True,
    "schema": {"type": "string", "pattern": "^Bearer "},
}
ALLOW: Json = {
    "description": "The methods that the path knows.",
    "required": True,
    "schema": {"type": "string", "pattern": "^[A-Z]+(,[A-Z]+)*$"},
}


def retry_after(*, always: bool) -> Json:
    """Describe Retry-After; it is not on refusals that waiting would not help."""
    return {
        "description": "Come again after so many seconds.",
        "required": always,
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    }


# Where a code is used more widely than the docstring of its error says.
MEANING = {"not_found": "There is no such thing, or it belongs to another tenant."}
# Codes of refusals that aiohttp makes by itself, with their status and meaning.
BY_AIOHTTP: dict[str, tuple[HTTPStatus, str]] = {
    "method_not_allowed": (HTTPStatus.METHOD_NOT_ALLOWED, "This path does not know the method; see Allow."),
    "request_timeout": (HTTPStatus.REQUEST_TIMEOUT, "The body did not come to its end in time."),
    "too_large": (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "A body has at most 1 MiB."),
}
# Codes that any request may get, before anything of it is looked at, or through a fault of ours.
ANYWHERE: dict[str, tuple[HTTPStatus, str]] = {
    "headers_too_large": (
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        "The request line or a header is too long, or there are too many headers.",
    ),
    "internal": (
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "A bug of this service; what happened is in its log. Look at the hold before you ask again.",
    ),
}

_STATUS: Json = {
    "type": "object",
    "properties": {"status": {"type": "string", "enum": ["ok", "ready"]}},
    "required": ["status"],
}
# Paths that need no key: what they are, media type and schema of the answer.
OPEN: dict[str, tuple[str, str, Json]] = {
    "/healthz": ("Ask whether the process runs.", "application/json", _STATUS),
    "/readyz": (
        "Ask whether the process can do its work, and what fails if not.",
        "application/json",
        _STATUS,
    ),
    "/metrics": ("Read the metrics in Prometheus's text format.", "text/plain", {"type": "string"}),
    "/openapi.json": ("Read this document.", "application/json", {"type": "object"}),
    "/docs": ("Read the guide and this document as a page.", "text/html", {"type": "string"}),
}
