"""Who calls, and whether they may: bearer keys with scopes. Without a mark by `needs`, /v1 is closed."""

from collections.abc import Callable
from typing import Literal

from aiohttp import web
from aiohttp.typedefs import Handler

from expiry.api.database import DRIVER_ERRORS, translated
from expiry.api.problems import ForbiddenError, UnauthenticatedError
from expiry.api.state import KEYS
from expiry.keys import KEY_CHARS_MAX, Principal

Scope = Literal["holds", "read", "operate", "platform"]

PRINCIPAL = web.RequestKey("PRINCIPAL", Principal)

_scopes: dict[Handler, Scope] = {}


def needs(scope: Scope) -> Callable[[Handler], Handler]:
    """Mark a handler: only keys with this scope reach it."""

    def mark(handler: Handler) -> Handler:
        _scopes[handler] = scope
        return handler

    return mark


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request through to a marked handler if its key has the scope; note who it is."""
    info = request.match_info
    resource = info.route.resource
    if resource is None or not resource.canonical.startswith("/v1/"):
        return await handler(request)  # nothing there (404, 405), or open to everybody
    scope = _scopes.get(info.handler)
    try:
        principal = await request.app[KEYS].verify(_bearer(request))
    except DRIVER_ERRORS as error:
        raise translated(error) from error
    if principal is None:
        raise UnauthenticatedError
    if scope not in principal.scopes:
        raise ForbiddenError(f"This needs a key with the scope {scope!r}.", scope=scope)
    request[PRINCIPAL] = principal
    return await handler(request)


def tenant_of(request: web.Request) -> str:
    """Answer the caller's tenant. Raises ForbiddenError for a platform key: it has none."""
    tenant_id = request[PRINCIPAL].tenant_id
    if tenant_id is None:
        raise ForbiddenError("A platform key has no tenant; use a key of the tenant.")
    return tenant_id


def name_of(request: web.Request) -> str:
    """Name the caller for the record: `ended_by`, events, who paused a loop."""
    return f"api:{request[PRINCIPAL].key_id}"


def _bearer(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not 1 <= len(key) <= KEY_CHARS_MAX:
        raise UnauthenticatedError
    return key
