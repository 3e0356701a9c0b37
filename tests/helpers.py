"""What several tests need."""

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01

MEMORY = Path("/dev/shm")  # noqa: S108 - directories in it are made by tempfile
MEMORY_BYTES_MIN = 4 << 30  # the log of changes alone may take 1 GiB


def data_parent() -> Path | None:
    """Return where servers of tests keep their data: in memory if there is enough of it.

    A test's database is created there in 14 ms, on a disk (ext4) in 330 ms.
    """
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES_MIN:
        return MEMORY
    return None


async def eventually(check: Callable[[], Awaitable[T]], *, within_s: float = 10) -> T:
    """Return the first true value of check; fail with the last one if there is none in time."""
    deadline_s = time.monotonic() + within_s
    while not (value := await check()):
        assert time.monotonic() < deadline_s, f"still {value!r} after {within_s} s"
        await asyncio.sleep(POLL_S)
    return value
