"""Every test starts from an empty store and an empty queue."""

from __future__ import annotations

import asyncpg
import pytest
from redis.asyncio import Redis

from tests.helpers import eventually


@pytest.mark.parametrize("turn", ["first", "second"])
async def test_no_test_sees_what_another_wrote(
    turn: str, pool: asyncpg.Pool[asyncpg.Record], redis: Redis
) -> None:
    """The schema is there; rows and keys of an earlier test are not."""
    assert await pool.fetchval("SELECT to_regclass('expiry_schema')") is not None
    await pool.execute("CREATE TABLE mark AS SELECT $1::text AS turn", turn)
    assert await redis.set("mark", turn, nx=True)


async def test_eventually_names_the_last_value() -> None:
    """A condition that never comes true is reported with what was there instead."""

    async def check() -> list[str]:
        return []

    with pytest.raises(AssertionError, match=r"still \[\]"):
        await eventually(check, within_s=0)
