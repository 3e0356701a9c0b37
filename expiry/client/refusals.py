"""Problems of the wire as the errors of the Python API: the class by `code`, the detail, the facts."""

from collections.abc import Mapping
from typing import Any

from expiry.errors import (
    ExpiryError,
    HoldNotFoundError,
    KeyNotFoundError,
    LoopNotFoundError,
    NotFoundError,
    ResourceNotFoundError,
)
from expiry.wire.answers import ProblemAnswer
from expiry.wire.problems import PROBLEMS, PathNotFoundError
from expiry.wire.times import RFC3339, parse_rfc3339

# Reversed: of two classes with one code the first of the table says more.
_KINDS: dict[str, type[ExpiryError]] = {kind.code: kind for kind in reversed(tuple(PROBLEMS))}
# What is the error's class, its message, or the same for each: no facts.
_MEMBERS = frozenset(("type", "title", "status", "detail", "instance", "code", "missing"))
_MISSING: dict[str | None, type[ExpiryError]] = {
    kind.missing: kind
    for kind in (
        HoldNotFoundError,
        ResourceNotFoundError,
        KeyNotFoundError,
        LoopNotFoundError,
        PathNotFoundError,
    )
}
_TIMES = ("expired_at", "server_time")


def refusal(problem: Mapping[str, Any]) -> ExpiryError:
    """Answer the error that this problem is; ExpiryError with its code where no class has that."""
    code = str(problem["code"])
    kind = _KINDS.get(code, ExpiryError)
    if kind is NotFoundError:
        kind = _MISSING.get(str(problem.get("missing")), kind)
    error = kind(str(problem.get("detail") or "") or None)
    error.code = code
    error.facts.update((n, _fact(n, v)) for n, v in problem.items() if n not in _MEMBERS)
    wrong = problem.get("errors")
    for one in wrong if isinstance(wrong, list) else ():  # shown below the message of a traceback
        error.add_note(f"{one['pointer']}: {one['detail']}" if "pointer" in one else str(one))
    return error


def as_error(problem: ProblemAnswer) -> ExpiryError:
    """Answer the error that the problem of one hold of a batch would have been for that hold alone."""
    return refusal(problem.model_dump(mode="json", exclude_none=True))


def _fact(name: str, value: Any) -> object:  # noqa: ANN401 - JSON
    return parse_rfc3339(value) if name in _TIMES and RFC3339.fullmatch(str(value)) else value
