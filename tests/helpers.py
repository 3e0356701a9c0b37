"""What several tests need."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01


async def eventually(check: Callable[[], Awaitable[T]], *, within_s: float = 10) -> T:
    """Return the first true value of check; fail with the last one if there is none in time."""
    deadline_s = time.monotonic() + within_s
    while not (value := await check()):
        assert time.monotonic() < deadline_s, f"still {value!r} after {within_s} s"
        await asyncio.sleep(POLL_S)
    return value
