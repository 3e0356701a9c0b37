"""Times on the wire: RFC 3339, UTC, exactly six decimals, Z."""

import re
from datetime import UTC, datetime

# The T and the zone are required, and nothing finer than PostgreSQL keeps: what comes in is not rounded.
RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)", re.ASCII)


def rfc3339(at: datetime) -> str:
    """Write an aware time."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def rfc3339_or_none(at: datetime | None) -> str | None:
    """Write an aware time that may be missing."""
    return None if at is None else rfc3339(at)


def parse_rfc3339(text: str) -> datetime:
    """Read a time as UTC. Raises ValueError for any other form, and for times that UTC cannot say."""
    if not RFC3339.fullmatch(text):
        raise ValueError("a time in RFC 3339 with a zone, like 2026-12-24T18:00:00Z, is needed")
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except OverflowError:
        raise ValueError("the time is beyond the years 1 to 9999") from None
