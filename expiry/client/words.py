"""What a caller asks, in the words of the wire; what no API could take is refused before anything is sent."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from decimal import Decimal
from types import UnionType
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import UUID

from pydantic import BaseModel, ValidationError

from expiry.wanted import NUL_IN_JSON, TEXT_MAX, Item, Wanted
from expiry.wire.explain import explained
from expiry.wire.problems import InvalidError
from expiry.wire.queries import Query
from expiry.wire.times import rfc3339

T = TypeVar("T")

_WANTED = {
    "Item": "Item(resource_id, quantity)",
    "Wanted": "Wanted(items=[Item(...)], ttl_s=...)",
    "id": "an id",
}


def body(model: type[BaseModel], **fields: object) -> bytes:
    """Answer the body of a request. Raises InvalidError."""
    return _encoded(_read(model, fields, "#/"))


def query(model: type[Query], **fields: object) -> dict[str, str]:
    """Answer the parameters of a request; None leaves one out. Raises InvalidError."""
    asked = _read(model, given(**fields), "?")
    _encoded(asked)
    return {name: _parameter(value) for name, value in asked.items()}


def given(**fields: object) -> dict[str, object]:
    """Answer the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def wanted_fields(wanted: Wanted) -> dict[str, object]:
    """Say a hold that is wanted in the fields of the wire."""
    return given(
        items=item_fields(wanted.items),
        ttl_s=_said(wanted.ttl_s),
        expires_at=_said(wanted.expires_at),
        holder=wanted.holder,
        external_ref=wanted.external_ref,
        metadata=wanted.metadata,
        max_renewals=wanted.max_renewals,
        max_lifetime_s=_said(wanted.max_lifetime_s),
        replaces=wanted.replaces,
    )


def item_fields(items: Sequence[Item] | None) -> list[dict[str, object]] | None:
    """Say items in the fields of the wire."""
    return None if items is None else [asdict(item) for item in several("items", items, Item)]


def several(name: str, values: Iterable[T], kind: type | UnionType) -> list[T]:
    """Answer the values as a list. Raises InvalidError for one alone, a text too, and for what is of another kind."""
    one = getattr(kind, "__name__", "id")
    if isinstance(values, str | Mapping | UUID) or not isinstance(values, Iterable):
        raise InvalidError(f"{name}: a list is wanted, of {one} each, not {type(values).__name__}")
    found = list(values)
    for index, value in enumerate(found):
        if not isinstance(value, kind):
            raise InvalidError(
                f"{name}[{index}]: {_WANTED.get(one, one)} is wanted, not {type(value).__name__}"
            )
    return found


def hold_path(hold_id: UUID | str, verb: str = "") -> str:
    """Answer the path of a hold, or of one of its verbs. Raises InvalidError for what is no UUID."""
    try:
        id_ = UUID(str(hold_id))
    except ValueError:
        raise InvalidError("hold_id: a hold is named by a UUID") from None
    return f"/v1/holds/{id_}{verb and '/'}{verb}"


def path(under: str, name: str) -> str:
    """Answer the path of what has this name, a resource or a key. Raises InvalidError."""
    _encoded(name)
    if not 1 <= len(name) <= TEXT_MAX:
        raise InvalidError(f"a name in the path has 1 to {TEXT_MAX} characters")
    return f"{under}/{quote(name, safe='')}"


def header_key(key: str) -> str:
    """Answer an Idempotency-Key as a header says it, quoted, so that no character is lost. Raises InvalidError."""
    if not 1 <= len(key) <= TEXT_MAX or not key.isprintable():
        raise InvalidError(f"idempotency_key: 1 to {TEXT_MAX} printable characters")
    escaped = key.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def _read(model: type[BaseModel], fields: dict[str, object], root: str) -> dict[str, Any]:
    """Let the model that the API reads with check what is asked. Raises InvalidError."""
    try:
        asked = model.model_validate({name: _said(value) for name, value in fields.items()})
    except ValidationError as error:
        wrong = explained(error, model, root)
        message = "; ".join(f"{one['pointer']}: {one['detail']}" for one in wrong)
        raise InvalidError(message, errors=wrong) from None
    except (TypeError, RecursionError) as error:
        raise InvalidError(f"metadata is what JSON can say: {error}") from None
    return asked.model_dump(exclude_unset=True)


def _said(value: object) -> object:
    """Say a float as its digits, a duration and a time exactly: the models round nothing and guess nothing."""
    match value:
        case float():
            return Decimal(str(value))
        case timedelta():
            return Decimal(value // timedelta(microseconds=1)).scaleb(-6)
        case datetime():
            return value.isoformat()
    return value


def _encoded(document: object) -> bytes:
    try:
        text = json.dumps(
            document, ensure_ascii=False, allow_nan=False, default=_plain, separators=(",", ":")
        )
        raw = text.encode()
    except UnicodeEncodeError:
        raise InvalidError("a text has a lone surrogate, which is no character") from None
    except ValueError as error:
        raise InvalidError(f"metadata is what JSON can say: {error}") from None
    if NUL_IN_JSON.search(text):
        raise InvalidError("a text has a NUL character, which PostgreSQL cannot keep")
    return raw


def _plain(value: object) -> object:
    if isinstance(value, Decimal):
        # A year of seconds with six decimals has 14 digits; a float keeps and prints up to 15 as they are.
        return int(value) if value == value.to_integral_value() else float(value)
    return rfc3339(value) if isinstance(value, datetime) else str(value)


def _parameter(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return rfc3339(value) if isinstance(value, datetime) else str(value)
