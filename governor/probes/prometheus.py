"""A query of Prometheus, as the p99 of checkout: what the database's clients see."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from governor.probes.sample import ProbeMissingError, Sample

_BODY_MAX = 64 << 10  # bytes; one value takes a few hundred


class PrometheusQuery:
    """An instant query over HTTP, bounded in time and size.

    Prometheus away says nothing about the database: no failure here is a reading above the target.
    """

    def __init__(
        self,
        url: str,
        query: str,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """url: of the server, as http://user:password@prometheus:9090; query: PromQL for one value."""
        self._url = url.rstrip("/") + "/api/v1/query"
        self._query = query
        self._timeout_s = timeout_s
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Connect with the first sample."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))

    async def close(self) -> None:
        """Close the session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def sample(self) -> Sample:
        """Ask for the value as of now. Raises: ProbeMissingError, whatever is wrong."""
        if self._session is None:
            raise ProbeMissingError("not started")
        at_s = self._clock()
        asked = {"query": self._query, "timeout": f"{self._timeout_s:g}"}
        try:
            async with self._session.get(self._url, params=asked, allow_redirects=False) as answer:
                body = await _body(answer)
        except (aiohttp.ClientError, asyncio.IncompleteReadError, OSError, ValueError) as error:
            # The type only: a message may quote the URL, and with it a password.
            raise ProbeMissingError(f"Prometheus does not answer: {type(error).__name__}") from error
        if answer.status != 200:  # noqa: PLR2004 - OK
            raise ProbeMissingError(f"Prometheus answers {answer.status}")
        return Sample(value=_value(body), sampled_at_s=at_s)


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_chunked(4096):
        body += chunk
        if len(body) > _BODY_MAX:
            raise ProbeMissingError(f"Prometheus answers more than {_BODY_MAX} bytes: ask for one value")
    return bytes(body)


def _value(body: bytes) -> float:
    """Return the one value of an answer.

    >>> _value(b'{"status": "success", "data": {"resultType": "scalar", "result": [1700000000, "0.25"]}}')
    0.25
    """
    try:
        data = json.loads(body)["data"]
        result = data["result"]
        if data["resultType"] == "vector":
            if len(result) != 1:
                raise ProbeMissingError(f"the query returns {len(result)} series, not one")
            return float(result[0]["value"][1])
        if data["resultType"] == "scalar":
            return float(result[1])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ProbeMissingError("Prometheus answers what is no result of a query") from error
    raise ProbeMissingError("the query returns neither a vector nor a scalar")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusProbe:
    """What a query returns, in its own unit. NaN (no traffic: 0 / 0) counts as missing."""

    name: str = "prometheus"
    target: float
    low: float = 0.0
    high: float = 1e12
    ttl_s: float
    required: bool = False
    source: PrometheusQuery

    async def sample(self) -> Sample:
        """Ask Prometheus."""
        return await self.source.sample()
