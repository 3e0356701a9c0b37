"""What a caller asks to be held, checked before any database sees it."""

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, TypeAlias
from uuid import UUID

from expiry import errors

Seconds: TypeAlias = int | float | Decimal | timedelta

ITEMS_MAX = 50
TTL_S_MAX = 31_536_000  # a year
TEXT_MAX = 255
QUANTITY_MAX = 1_000_000_000
INT_MAX = 2**31 - 1
YEAR_MAX = 9998
METADATA_BYTES_MAX = 8192
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
NUL_IN_JSON = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def uuid7() -> UUID:
    """Answer a time-ordered id (RFC 9562 version 7), so that new rows share index pages."""
    millis = time.time_ns() // 1_000_000
    tail = int.from_bytes(os.urandom(10), "big") & ~(0xF << 76) & ~(0x3 << 62)
    return UUID(int=millis << 80 | tail | 0x7 << 76 | 0x2 << 62)


@dataclass(frozen=True, slots=True)
class Item:
    """So many units of one resource."""

    resource_id: str
    quantity: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a caller asks to be held: give `ttl_s` (at most six decimals) or `expires_at`."""

    items: Sequence[Item]
    ttl_s: Seconds | None = None
    expires_at: datetime | None = None
    holder: str | None = None
    external_ref: str | None = None
    metadata: dict[str, Any] | None = None
    max_renewals: int | None = None
    max_lifetime_s: Seconds | None = None
    replaces: UUID | None = None
    id: UUID = field(default_factory=uuid7)


def request_of(wanted: Wanted) -> dict[str, Any]:
    """Say it as expiry_place reads it. Raises OutOfRangeError for what no database need see."""
    ids = [i.resource_id for i in wanted.items]
    if not 1 <= len(ids) <= ITEMS_MAX or len(set(ids)) != len(ids):
        raise errors.OutOfRangeError(f"a hold takes 1 to {ITEMS_MAX} resources, none of them twice")
    for item in wanted.items:
        _check_text("resource_id", item.resource_id)
        if type(item.quantity) is not int or not 1 <= item.quantity <= QUANTITY_MAX:
            raise errors.OutOfRangeError(f"quantity is from 1 to {QUANTITY_MAX}")
    for name in ("holder", "external_ref"):
        _check_text(name, getattr(wanted, name))
    if wanted.max_renewals is not None and not 0 <= wanted.max_renewals <= INT_MAX:
        raise errors.OutOfRangeError(f"max_renewals is from 0 to {INT_MAX}")
    if wanted.metadata is not None:
        _check_metadata(wanted.metadata)
    lifetime = wanted.max_lifetime_s
    return {
        "id": str(wanted.id),
        "ttl_us": one_deadline(wanted.ttl_s, wanted.expires_at),
        "expires_at": None if wanted.expires_at is None else wanted.expires_at.isoformat(),
        "resource_ids": ids,
        "quantities": [i.quantity for i in wanted.items],
        "holder": wanted.holder,
        "external_ref": wanted.external_ref,
        "metadata": wanted.metadata,
        "max_renewals": wanted.max_renewals,
        "max_lifetime_us": None if lifetime is None else micros(lifetime, "max_lifetime_s"),
        "replaces": None if wanted.replaces is None else str(wanted.replaces),
    }


def kept_bytes(text: str) -> int:
    """Answer how many bytes this JSON takes as PostgreSQL says it: 1e300 has 301 digits there."""
    size = len(text.encode())
    if size > METADATA_BYTES_MAX:
        return size  # too many already

    def unfold(number: str) -> None:
        nonlocal size
        size += len(f"{Decimal(number):f}") - len(number)

    json.loads(text, parse_float=unfold)
    return size


def _check_metadata(metadata: dict[str, Any]) -> None:
    try:
        text = json.dumps(metadata, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = kept_bytes(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.OutOfRangeError(f"metadata is what JSON can say: {error}") from error
    if size > METADATA_BYTES_MAX or NUL_IN_JSON.search(text):
        raise errors.OutOfRangeError(f"metadata is JSON of at most {METADATA_BYTES_MAX} bytes, without NUL")


def _check_text(name: str, text: str | None) -> None:
    if text is None:
        return
    if not 1 <= len(text) <= TEXT_MAX or _UNSTORABLE.search(text):
        raise errors.OutOfRangeError(f"{name} has 1 to {TEXT_MAX} characters, no NUL, no lone surrogate")


def one_deadline(ttl_s: Seconds | None, expires_at: datetime | None) -> int | None:
    """Answer ttl_s in microseconds, None for expires_at; raises OutOfRangeError unless one of them is given."""
    if (ttl_s is None) == (expires_at is None):
        raise errors.OutOfRangeError("give either ttl_s or expires_at")
    if expires_at is not None and expires_at.tzinfo is None:
        raise errors.OutOfRangeError("expires_at needs a time zone")
    if expires_at is not None and expires_at.year > YEAR_MAX:  # its UTC form may not exist
        raise errors.OutOfRangeError(f"expires_at is before the year {YEAR_MAX + 1}")
    return None if ttl_s is None else micros(ttl_s, "ttl_s")


def micros(seconds: Seconds, name: str) -> int:
    """Answer whole microseconds, exactly as written: 0.1 means 100000, not its binary neighbour."""
    if isinstance(seconds, timedelta):
        exact = Decimal(seconds // timedelta(microseconds=1)) / 1_000_000
    elif isinstance(seconds, bool) or not isinstance(seconds, int | float | Decimal):
        raise errors.OutOfRangeError(f"{name} is a number of seconds")
    else:
        exact = seconds if isinstance(seconds, Decimal) else Decimal(str(seconds))
    if not exact.is_finite() or not 1 <= exact <= TTL_S_MAX:
        raise errors.OutOfRangeError(f"{name} is from 1 to {TTL_S_MAX} seconds")
    whole = int(exact * 1_000_000)
    if whole != exact * 1_000_000:
        raise errors.OutOfRangeError(f"{name} has at most six decimals")
    return whole
