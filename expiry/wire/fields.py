"""Fields of requests: what a number of seconds, a time, a text or a cursor may be, and how each describes itself."""

import json
import math
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from expiry.wanted import METADATA_BYTES_MAX, QUANTITY_MAX, TEXT_MAX, TTL_S_MAX, kept_bytes
from expiry.wire.times import parse_rfc3339

INT64_MAX = 2**63 - 1
PAGE_MAX = 200
CURSOR_CHARS_MAX = 1024
# As a pattern of JSON Schema: PostgreSQL keeps no NUL. Lone surrogates are refused as well; no pattern can say so.
NO_NUL = "^[^\\u0000]*$"


def _number(value: object) -> object:
    """Let whole numbers be seconds as well; nothing else is changed, so true and "60" are refused."""
    return Decimal(value) if type(value) is int else value


def _time(value: object) -> object:
    if not isinstance(value, str):
        raise PydanticCustomError("time_type", "a time is a string in RFC 3339")
    return parse_rfc3339(value)


def _uuid(value: object) -> object:
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value if isinstance(value, str) else "")
    except ValueError:
        raise PydanticCustomError("uuid", "a UUID is wanted, as a string") from None


def _metadata(value: dict[str, Any]) -> dict[str, Any] | None:
    """Check what is kept. An empty object is None: holds without metadata are answered with one."""
    plain: dict[str, Any] = _plain(value)
    size = kept_bytes(json.dumps(plain, ensure_ascii=False, separators=(",", ":")))
    if size > METADATA_BYTES_MAX:
        raise PydanticCustomError(
            "metadata_size",
            "metadata takes {size} bytes of at most {max}",
            {"size": size, "max": METADATA_BYTES_MAX},
        )
    return plain or None


def _plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Make floats of the decimals, as any reader of the metadata would; nested no deeper than a body may be."""
    if isinstance(value, Decimal):
        number = float(value)
        if not math.isfinite(number):
            raise PydanticCustomError("metadata_number", "a number in metadata is out of range")
        return number + 0.0  # jsonb knows no -0.0
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def text(chars_max: int, pattern: str = NO_NUL) -> WithJsonSchema:
    """Describe a text of at least one character."""
    return WithJsonSchema({"type": "string", "minLength": 1, "maxLength": chars_max, "pattern": pattern})


Seconds = Annotated[
    Decimal,
    BeforeValidator(_number),
    Field(ge=1, le=TTL_S_MAX, decimal_places=6),
    WithJsonSchema({"type": "number", "minimum": 1, "maximum": TTL_S_MAX, "multipleOf": 0.000001}),
]
OVERRIDE_S_MAX = 7 * 86_400
OverrideSeconds = Annotated[
    Decimal,
    BeforeValidator(_number),
    Field(ge=1, le=OVERRIDE_S_MAX),
    WithJsonSchema({"type": "number", "minimum": 1, "maximum": OVERRIDE_S_MAX}),
]
RATE_PER_S_MAX = 1_000_000
Rate = Annotated[
    Decimal,
    BeforeValidator(_number),
    Field(ge=Decimal("0.001"), le=RATE_PER_S_MAX),
    WithJsonSchema({"type": "number", "minimum": 0.001, "maximum": RATE_PER_S_MAX}),
]
Time = Annotated[datetime, BeforeValidator(_time), WithJsonSchema({"type": "string", "format": "date-time"})]
Id = Annotated[UUID, BeforeValidator(_uuid), WithJsonSchema({"type": "string", "format": "uuid"})]
Text = Annotated[str, Field(min_length=1, max_length=TEXT_MAX), text(TEXT_MAX)]
Quantity = Annotated[int, Field(ge=1, le=QUANTITY_MAX)]
Generation = Annotated[int, Field(ge=1, le=INT64_MAX)]
Metadata = Annotated[
    dict[str, Any],
    AfterValidator(_metadata),
    WithJsonSchema({"type": "object", "propertyNames": {"pattern": NO_NUL}, "additionalProperties": True}),
]


# A query's values are strings: numbers are read from their digits, and nothing else is.


def digits(value: object) -> object:
    """Read a number; what is none is left to be refused."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def _flag(value: object) -> object:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def up_to(most: int) -> WithJsonSchema:
    """Describe a number of things on a page."""
    return WithJsonSchema({"type": "integer", "minimum": 1, "maximum": most})


Limit = Annotated[int, BeforeValidator(digits), Field(ge=1, le=PAGE_MAX), up_to(PAGE_MAX)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Cursor = Annotated[
    str, Field(min_length=1, max_length=CURSOR_CHARS_MAX), text(CURSOR_CHARS_MAX, "^[A-Za-z0-9_-]+$")
]


def described(*rules: dict[str, Any], example: dict[str, Any]) -> ConfigDict:
    """Configure a model with an example, and with rules that its types do not say."""
    return ConfigDict(json_schema_extra={"examples": [example], **({"allOf": [*rules]} if rules else {})})


class Strict(BaseModel):
    """Strict: no field is converted, no field is unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
