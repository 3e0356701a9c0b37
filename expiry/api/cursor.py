"""Cursors: a place in a list, opaque to clients and bound to the filters that it was given for."""

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import TypeVar

from pydantic import TypeAdapter

from expiry.wire.problems import InvalidError
from expiry.wire.queries import Query

T = TypeVar("T")

_FILTERS_BYTES = 6
_PAGING = {"cursor", "after", "limit"}  # what may change from page to page


def write(place: T, kind: TypeAdapter[T], query: Query) -> str:
    """Write a place for the next page of this query."""
    return urlsafe_b64encode(_filters(query) + kind.dump_json(place)).decode().rstrip("=")


def read(cursor: str, kind: TypeAdapter[T], query: Query) -> T:
    """Read a place. Raises InvalidError for a cursor that was not given for this query."""
    try:
        raw = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        if raw[:_FILTERS_BYTES] == _filters(query):
            return kind.validate_json(raw[_FILTERS_BYTES:])
    except ValueError:  # pydantic's errors are such, too
        pass
    name = next(n for n in ("cursor", "after") if n in type(query).model_fields)
    detail = "no cursor of this query: leave it out, or use `next_cursor` with the filters that it came with"
    raise InvalidError(errors=[{"pointer": f"?{name}", "detail": detail}])


def _filters(query: Query) -> bytes:
    filters = query.model_dump_json(exclude=_PAGING)
    return hashlib.sha256(filters.encode()).digest()[:_FILTERS_BYTES]
