"""One request and its attempts: what may be repeated is, under the same key, within bounds."""

import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import aiohttp
from pydantic import SecretStr, ValidationError
from yarl import URL

from expiry.client.refusals import refusal
from expiry.errors import ExpiryError, SetupError, UnavailableError
from expiry.wire.answers import Answer
from expiry.wire.problems import COME_AGAIN

A = TypeVar("A", bound=Answer)

RETRY_S = 0.1  # wait before the second attempt; doubles with each, with jitter
RETRY_S_MAX = 3.0
LEAST_S = 0.001  # of a timeout: aiohttp takes 0 for none at all

# 408: the request did not come whole, so on another connection it may.
_COME_AGAIN = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_KEY = re.compile(r"[\x21-\x7e]+")


class Attempt(NamedTuple):
    """One attempt of a request, for whoever counts them."""

    method: str
    path: str
    number: int  # from 1; above that it is a retry
    status: int | None  # None: there was no answer
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked; every attempt sends it as it is."""

    method: str
    path: str  # percent-encoded
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    idempotency_key: str | None = None  # the one in the headers, as the caller knows it
    longer_s: float = 0.0  # than others the API may work on it


class Refused(NamedTuple):
    """No answer that was hoped for, and whether to ask again."""

    error: ExpiryError
    again: bool
    retry_after_s: float = 0.0


@dataclass(kw_only=True)
class Transport:
    """Asks one API with one key. Its `repr` does not show the key, nor does any error."""

    base_url: URL
    key: SecretStr
    timeout_s: float
    attempts_max: int
    total_s_max: float
    session: aiohttp.ClientSession | None
    on_attempt: Callable[[Attempt], None] = field(repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)

    def __post_init__(self) -> None:
        """Raise SetupError for what could never work."""
        url = self.base_url
        if url.scheme not in ("http", "https") or not url.host or "@" in url.authority or url.query_string:
            raise SetupError("base_url is like https://host:port, without user, password or query.")
        if not _KEY.fullmatch(self.key.get_secret_value()):
            raise SetupError("key is an API key: visible ASCII characters, no spaces.")
        if self.attempts_max < 1 or not (self.timeout_s > 0 and self.total_s_max > 0):
            raise SetupError("attempts_max is at least 1, timeout_s and total_s_max are above 0.")

    async def ask(self, request: Request, answers: type[A]) -> A:
        """Answer what the API answers; the waits between attempts double, with jitter, after any Retry-After.

        Raises what the API refuses with, UnavailableError where it does not answer; where asking again may help,
        the fact `idempotency_key` says with which key.
        """
        until_s = self.clock() + self.total_s_max + request.longer_s
        for number in itertools.count(1):
            left_s = max(until_s - self.clock(), LEAST_S)
            timeout_s = min(self.timeout_s + request.longer_s, left_s)
            came = await self._attempt(request, answers, number, timeout_s)
            if not isinstance(came, Refused):
                return came
            wait_s = came.retry_after_s + backoff_s(number)
            if not came.again or number == self.attempts_max or self.clock() + wait_s >= until_s:
                if came.again and request.idempotency_key is not None:
                    came.error.facts["idempotency_key"] = request.idempotency_key
                raise came.error
            await self.sleep(wait_s)
        raise AssertionError  # the count does not end

    async def _attempt(
        self, request: Request, answers: type[A], number: int, timeout_s: float
    ) -> A | Refused:
        if self.session is None:
            raise SetupError("Use it as `async with Client(...) as client`, or give it a session.")
        started_s, status = self.clock(), None
        try:
            async with self.session.request(
                request.method,
                URL(f"{str(self.base_url).rstrip('/')}{request.path}", encoded=True).with_query(
                    request.query
                ),
                data=request.body,
                headers={"Authorization": f"Bearer {self.key.get_secret_value()}", **request.headers},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
                raise_for_status=False,
            ) as response:
                raw = await response.read()
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            # Their text only: such errors carry the request's headers, and in them the key.
            reason = str(error) or f"nothing within {timeout_s:.1f} s"
        finally:
            seconds = self.clock() - started_s
            self.on_attempt(Attempt(request.method, request.path, number, status, seconds))
        if status is None:
            return self._lost(reason)
        return self._read(status, response.headers, raw, answers)

    def _read(self, status: int, headers: Mapping[str, str], raw: bytes, answers: type[A]) -> A | Refused:
        if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            try:
                answer = answers.model_validate_json(raw or b"{}")
            except ValidationError:
                return self._lost(f"{status}, but no {answers.__name__}")
            if headers.get("Idempotent-Replayed") == "true":
                answer.mark_replayed()
            return answer
        problem = _problem(raw)
        if problem is None:
            # What stands before the API may answer in its place, and in its own words.
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _COME_AGAIN:
                return self._lost(f"{status}")._replace(retry_after_s=_retry_after_s(headers))
            return Refused(
                ExpiryError(f"{self.base_url} answers {status}, and not as this API does."), again=False
            )
        error = refusal(problem)
        again = status in _COME_AGAIN or isinstance(error, COME_AGAIN)
        return Refused(error, again, _retry_after_s(headers))

    def _lost(self, reason: str) -> Refused:
        return Refused(
            UnavailableError(
                f"No answer from {self.base_url} ({reason}); what was asked may be done all the same."
            ),
            again=True,
        )


def backoff_s(number: int) -> float:
    """Answer how long to wait after so many attempts."""
    longest_s = min(RETRY_S * 2.0 ** (number - 1), RETRY_S_MAX)
    return longest_s * random.uniform(0.5, 1)  # noqa: S311 - spreads retries


def _problem(raw: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "code" in document else None


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Answer the seconds that the API asks for; the other form, a date, is for browsers."""
    text = headers.get("Retry-After", "")
    return float(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0.0
