"""How refusals are named on the wire (RFC 9457): one table from error to status and title."""

from collections.abc import Mapping
from http import HTTPStatus

from expiry import errors

TYPE = "urn:expiry:problem:"  # and the code
RETRY_AFTER_S = 1
SAID_MAX = 3  # errors that the message repeats


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


class PathNotFoundError(errors.NotFoundError):
    """There is nothing at this path."""

    missing = "path"


class CursorExpiredError(errors.ExpiryError):
    """Events after this cursor are gone; read the holds as they are now, then follow from the newest event."""

    code = "cursor_expired"


class NotJSONError(errors.ExpiryError):
    """Send the body as JSON in UTF-8, with Content-Type: application/json."""

    code = "not_json"


class InvalidError(errors.ExpiryError):
    """A field of the request is not as it should be; see `errors`."""

    code = "invalid"

    def __init__(self, message: str | None = None, **facts: object) -> None:
        """Say the first few of the errors, for whoever reads no further."""
        found = facts.get("errors")
        if message is None and isinstance(found, list) and found:
            message = "; ".join(f"{one['pointer']}: {one['detail']}" for one in found[:SAID_MAX])
            if len(found) > SAID_MAX:
                message += f" (and {len(found) - SAID_MAX} more)"
        super().__init__(message, **facts)


class NotPlacedError(errors.ExpiryError):
    """Another hold of this atomic batch was refused, so this one was not placed either."""

    code = "not_placed"


class QuotaError(errors.ExpiryError):
    """This API key asks too often; come again after Retry-After."""

    code = "quota"


class NotReadyError(errors.ExpiryError):
    """Something that this process needs is not there; see `failing`."""

    code = "not_ready"


PROBLEMS: Mapping[type[errors.ExpiryError], tuple[HTTPStatus, str]] = {
    MalformedError: (HTTPStatus.BAD_REQUEST, "Malformed request"),
    KeyMissingError: (HTTPStatus.BAD_REQUEST, "Idempotency-Key missing"),
    UnauthenticatedError: (HTTPStatus.UNAUTHORIZED, "No valid API key"),
    ForbiddenError: (HTTPStatus.FORBIDDEN, "Not allowed with this API key"),
    errors.NotFoundError: (HTTPStatus.NOT_FOUND, "Not found"),
    errors.AlreadyEndedError: (HTTPStatus.CONFLICT, "Already ended"),
    errors.NotConfirmedError: (HTTPStatus.CONFLICT, "Not confirmed"),
    errors.LimitReachedError: (HTTPStatus.CONFLICT, "Renewal limit reached"),
    errors.InsufficientCapacityError: (HTTPStatus.CONFLICT, "Insufficient capacity"),
    errors.KeyInProgressError: (HTTPStatus.CONFLICT, "Request in progress"),
    errors.HoldExpiredError: (HTTPStatus.GONE, "Hold expired"),
    CursorExpiredError: (HTTPStatus.GONE, "Cursor expired"),
    errors.GenerationMismatchError: (HTTPStatus.PRECONDITION_FAILED, "Another generation"),
    NotJSONError: (HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Not JSON"),
    InvalidError: (HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid request"),
    errors.OutOfRangeError: (HTTPStatus.UNPROCESSABLE_ENTITY, "Out of range"),
    errors.KeyReusedError: (HTTPStatus.UNPROCESSABLE_ENTITY, "Idempotency-Key reused"),
    NotPlacedError: (HTTPStatus.FAILED_DEPENDENCY, "Not placed"),
    QuotaError: (HTTPStatus.TOO_MANY_REQUESTS, "Too many requests"),
    errors.BusyError: (HTTPStatus.SERVICE_UNAVAILABLE, "Busy"),
    errors.UnavailableError: (HTTPStatus.SERVICE_UNAVAILABLE, "Unavailable"),
    NotReadyError: (HTTPStatus.SERVICE_UNAVAILABLE, "Not ready"),
    errors.ExpiryError: (HTTPStatus.CONFLICT, "Refused"),  # what has no entry of its own
}

# Asking again a little later may help: answered with Retry-After, and asked again by the client.
COME_AGAIN = (errors.KeyInProgressError, QuotaError, errors.BusyError, errors.UnavailableError, NotReadyError)


def status_of(error: type[errors.ExpiryError]) -> tuple[HTTPStatus, str]:
    """Answer status and title, of the nearest class that has an entry."""
    return next(PROBLEMS[kind] for kind in error.__mro__ if kind in PROBLEMS)
