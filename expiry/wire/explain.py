"""What is wrong with a request, as JSON pointers or parameters; nothing of what was sent is repeated."""

from pydantic import ValidationError

from expiry.wanted import TEXT_MAX

ERRORS_MAX = 20  # named in one answer


def explained(error: ValidationError, root: str = "#/") -> list[dict[str, str]]:
    """Say what is wrong where: below `#/` in a body, after `?` in a query."""
    return [
        wrong(
            (root + "/".join(escaped(str(step)) for step in found["loc"])) if found["loc"] else root[0],
            "Input should be a number"
            if found["type"] == "is_instance_of"
            else found["msg"].removeprefix("Value error, "),
        )
        for found in error.errors(include_url=False, include_context=False, include_input=False)[:ERRORS_MAX]
    ]


def wrong(pointer: str, detail: str) -> dict[str, str]:
    """Say one thing that is wrong."""
    return {"pointer": pointer, "detail": detail}


def escaped(step: str) -> str:
    """Say one step of a JSON pointer (RFC 6901)."""
    return step[:TEXT_MAX].replace("~", "~0").replace("/", "~1")
