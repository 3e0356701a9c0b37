"""A statement of the operator's that returns one number."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from governor.probes.link import Link
from governor.probes.sample import ProbeMissingError, Sample

APPLICATION_NAME = "governor-custom"


class CustomSql:
    """A statement on a connection of its own, read-only: a slow one delays nothing but itself."""

    def __init__(
        self,
        database_url: str,
        statement: str,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """statement: one SELECT without parameters; of its answer the first value counts."""
        self._link = Link(
            database_url,
            application_name=APPLICATION_NAME,
            timeout_s=timeout_s,
            settings={"default_transaction_read_only": "on"},
            clock=clock,
        )
        self._statement = statement
        self._clock = clock

    async def start(self) -> None:
        """Connect with the first sample."""

    async def close(self) -> None:
        """Disconnect."""
        await self._link.close()

    async def sample(self) -> Sample:
        """Run the statement; raises as Link.fetchrow does, and ProbeMissingError without a number."""
        at_s = self._clock()
        row = await self._link.fetchrow(self._statement)
        value = row[0] if row else None
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            raise ProbeMissingError(f"the statement returned no number but {type(value).__name__}")
        return Sample(value=float(value), sampled_at_s=at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlProbe:
    """What an operator's statement returns, in its own unit; time-outs read above the target."""

    name: str = "custom_sql"
    target: float
    low: float = 0.0
    high: float = 1e12
    ttl_s: float
    required: bool = False
    source: CustomSql

    async def sample(self) -> Sample:
        """Run the statement."""
        return await self.source.sample()
