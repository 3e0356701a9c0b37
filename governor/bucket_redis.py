"""The bucket in one Redis or Valkey hash; bucket.lua has its arithmetic."""

from __future__ import annotations

import asyncio
from importlib.resources import files
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from governor.bucket import BucketState, BucketUnavailable, Form

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.asyncio import Redis
    from redis.commands.core import AsyncScript


def bucket_library() -> str:
    """Return bucket.lua, for the front of a script that takes permits and does its work in one."""
    return files("governor").joinpath("bucket.lua").read_text(encoding="utf-8")


class RedisBucket(Form):
    """A bucket in one Redis or Valkey hash, on the server's clock; one round trip per operation.

    A lost key starts empty, at the floor, and accepts any epoch.
    """

    # Numbers come back as integer replies: exact to 64 bits, and no string to parse.
    _BODY = """
local args = {}
for i = 2, #ARGV do args[i - 1] = tonumber(ARGV[i]) end
local outcome, _, s = bucket[ARGV[1]](KEYS[1], unpack(args))
return {outcome, s.tokens, s.debt, s.micros, s.rate, s.floor, s.epoch, s.lapse, s.cut_until,
  s.spent, s.unmet, s.unmet_until}
"""
    # Beside the bucket in its hash: lost and found with it.
    _COUNT = """
return {
  redis.call('HINCRBY', KEYS[1], 'completed', ARGV[1]),
  redis.call('HINCRBY', KEYS[1], 'failed', ARGV[2]),
  redis.call('HINCRBY', KEYS[1], 'timed_out', ARGV[3]),
}
"""

    def __init__(
        self,
        client: Redis,
        key: str,
        *,
        floor_per_s: float,
        timeout_s: float = 1.0,
        clock_us: Callable[[], int] | None = None,
    ) -> None:
        """Use `key` of `client`; `clock_us` replaces the server's clock (tests, simulation)."""
        super().__init__(floor_per_s)
        self._script = client.register_script(bucket_library() + self._BODY)
        self._totals = client.register_script(self._COUNT)
        self._key = key
        self._timeout_s = timeout_s
        self._clock_us = clock_us

    async def _call(self, operation: str, *args: int) -> tuple[int, BucketState]:
        now_us = () if self._clock_us is None else (self._clock_us(),)
        argv: list[str | float] = [operation, *args, self._floor / 1000, *now_us]
        outcome, *fields = await self._run(self._script, argv)
        return outcome, BucketState.of(fields)

    async def _count(self, completed: int, failed: int, timed_out: int) -> tuple[int, int, int]:
        first, second, third = await self._run(self._totals, [completed, failed, timed_out])
        return first, second, third

    async def _run(self, script: AsyncScript, argv: list[str | float]) -> list[int]:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer: list[int] = await script(keys=[self._key], args=argv)
        except (RedisError, OSError, TimeoutError) as error:
            raise BucketUnavailable from error
        return answer
