"""Who calls, and whether they may: bearer keys with scopes, and a quota for each key."""

from typing import Literal

from aiohttp import web

from expiry.api import body
from expiry.api.database import DRIVER_ERRORS, translated
from expiry.api.state import KEYS, QUOTA
from expiry.keys import KEY_CHARS_MAX, Principal
from expiry.wire.problems import ForbiddenError, UnauthenticatedError

Scope = Literal["holds", "read", "operate", "platform"]


async def authorize(request: web.Request, scope: Scope) -> Principal:
    """Answer who calls. Raises MalformedError, UnauthenticatedError, ForbiddenError or QuotaError.

    The quota comes before the scope: who only collects refusals uses it up as well.
    """
    try:
        principal = await request.app[KEYS].verify(_bearer(request))
    except DRIVER_ERRORS as error:
        raise translated(error) from error
    if principal is None:
        raise UnauthenticatedError
    request.app[QUOTA].take(principal.key_id)
    if scope not in principal.scopes:
        raise ForbiddenError(f"This needs a key with the scope {scope!r}.", scope=scope)
    return principal


def _bearer(request: web.Request) -> str:
    given = body.header(request, "Authorization") or ""
    scheme, _, key = given.partition(" ")
    key = key.strip()
    if given and scheme.lower() != "bearer":
        raise UnauthenticatedError("Authorization begins with the word Bearer: Authorization: Bearer <key>.")
    if not given or not 1 <= len(key) <= KEY_CHARS_MAX:
        raise UnauthenticatedError
    return key
