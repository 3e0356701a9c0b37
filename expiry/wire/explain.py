"""What is wrong with a request, as JSON pointers or parameters; nothing of what was sent is repeated."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from expiry.wanted import TEXT_MAX

ERRORS_MAX = 20  # named in one answer


def explained(error: ValidationError, model: type[BaseModel], root: str = "#/") -> list[dict[str, str]]:
    """Say what is wrong with a model's fields and where: below `#/` in a body, after `?` in a query."""
    return [
        wrong(
            (root + "/".join(escaped(str(step)) for step in found["loc"])) if found["loc"] else root[0],
            _detail(found["type"], found["msg"], found["loc"], model, root),
        )
        for found in error.errors(include_url=False, include_context=False, include_input=False)[:ERRORS_MAX]
    ]


def _detail(kind: str, message: str, loc: Sequence[int | str], model: type[BaseModel], root: str) -> str:
    if kind == "is_instance_of":
        return "Input should be a number"
    if kind == "extra_forbidden":
        return _unknown(str(loc[-1]), _model_at(model, loc[:-1]), "parameter" if root == "?" else "field")
    return message.removeprefix("Value error, ")


def _unknown(name: str, model: type[BaseModel] | None, what: str) -> str:
    known = list(model.model_fields) if model else []
    if not known:
        return f"unknown {what}; there is none here"
    near = get_close_matches(name[:TEXT_MAX], known, n=1)
    return f"unknown {what}{f', did you mean {near[0]}?' if near else ''}; known are {', '.join(known)}"


def _model_at(model: type[BaseModel] | None, steps: Sequence[int | str]) -> type[BaseModel] | None:
    """Follow the names of fields to the model that has the last; numbers are places in a list."""
    for step in steps:
        if isinstance(step, str) and model is not None:
            model = _model_in(model.model_fields[step].annotation)
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:  # noqa: ANN401 - any annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def wrong(pointer: str, detail: str) -> dict[str, str]:
    """Say one thing that is wrong."""
    return {"pointer": pointer, "detail": detail}


def escaped(step: str) -> str:
    """Say one step of a JSON pointer (RFC 6901)."""
    return step[:TEXT_MAX].replace("~", "~0").replace("/", "~1")
