"""What can go wrong, by name. The docstring is the default message; `code` is the one on the wire."""

from typing import ClassVar, Literal, TypeAlias

Missing: TypeAlias = Literal["hold", "resource", "key", "loop", "path"]


class ExpiryError(Exception):
    """Something went wrong with a hold."""

    code: str = "error"

    def __init__(self, message: str | None = None, **facts: object) -> None:
        """Keep `facts` (for example `available=0`) for whoever reports the error."""
        super().__init__(message or (self.__doc__ or "").strip())
        self.facts = facts


class NotFoundError(ExpiryError):
    """There is no such thing."""

    code = "not_found"
    missing: ClassVar[Missing | None] = None  # what it is that is not there: beside the code on the wire


class HoldNotFoundError(NotFoundError):
    """There is no such hold."""

    missing = "hold"


class ResourceNotFoundError(NotFoundError):
    """This resource was never declared; it has no limit."""

    missing = "resource"


class KeyNotFoundError(NotFoundError):
    """There is no such API key."""

    missing = "key"


class LoopNotFoundError(NotFoundError):
    """There is no such loop."""

    missing = "loop"


class HoldExpiredError(ExpiryError):
    """The hold is past its deadline; place a new one."""

    code = "hold_expired"


class AlreadyEndedError(ExpiryError):
    """The hold has already ended in another way."""

    code = "already_ended"


class NotConfirmedError(ExpiryError):
    """Only a confirmed hold can be returned; this one is still held: release it instead."""

    code = "not_confirmed"


class GenerationMismatchError(ExpiryError):
    """The hold has another generation than the one given; read it again and decide anew."""

    code = "generation_mismatch"


class LimitReachedError(ExpiryError):
    """The hold may not be renewed any further (number of renewals or lifetime)."""

    code = "limit_reached"


class InsufficientCapacityError(ExpiryError):
    """The resource has too few units left."""

    code = "insufficient_capacity"


class KeyInProgressError(ExpiryError):
    """A request with this idempotency key is still running; try again in a moment."""

    code = "key_in_progress"


class KeyReusedError(ExpiryError):
    """This idempotency key was used with another body; use a new key for a new request."""

    code = "key_reused"


class OutOfRangeError(ExpiryError):
    """A value is out of its range."""

    code = "out_of_range"


class BusyError(ExpiryError):
    """Rows are locked by another transaction for too long; try again in a moment."""

    code = "busy"


class UnavailableError(ExpiryError):
    """The database cannot be reached; try again in a moment."""

    code = "unavailable"


class SetupError(ExpiryError):
    """The program cannot start like this: the message says what to do. The CLI exits with status 2."""

    code = "setup"
