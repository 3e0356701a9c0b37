"""A Redis of this machine beside the embedded Valkey, where there is one: its memory differs."""

import asyncio
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from bench.proc import started

START_S_MAX = 10.0


@asynccontextmanager
async def redis7(folder: Path) -> AsyncIterator[str | None]:
    """Run `redis-server` on the loopback interface and give its URL; None where it is missing or not 7."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=folder) as home:
        command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", home, "--save", ""]
        with started([command], {"PATH": "/usr/bin:/bin"}, folder / "redis7"):
            async with Redis.from_url(f"redis://127.0.0.1:{port}") as redis:
                version = await _version(redis)
            yield f"redis://127.0.0.1:{port}/0" if version.startswith("7.") else None


async def _version(redis: Redis) -> str:
    deadline_s = time.monotonic() + START_S_MAX
    while True:
        try:
            return str((await redis.info("server"))["redis_version"])
        except RedisError:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.05)
