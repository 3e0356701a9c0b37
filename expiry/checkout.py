"""A shop's checkout: each of its events becomes a request to the HTTP API, or two, retried where that is safe."""

import asyncio
import hashlib
import json
import random
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import quote
from uuid import UUID

import aiohttp

from expiry.errors import SetupError
from expiry.live import Tally
from expiry.shop import Event

ATTEMPTS_MAX = 8
RETRY_S = 0.1  # wait before the second attempt; doubles with each, with jitter
RETRY_S_MAX = 3.0
LANES_MAX = 200_000  # products in carts that are remembered; the oldest are forgotten

_COME_AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_KEY_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_GONE = ("hold_expired", "already_ended", "not_found")


class Answer(NamedTuple):
    """What the API answered; status 0: nothing, after all attempts."""

    status: int
    body: dict[str, Any]

    @property
    def code(self) -> str:
        """The problem's code."""
        return str(self.body.get("code", self.status or "no_answer"))


@dataclass(slots=True)
class _Lane:
    """One product in one cart: its events wait for each other, in order."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    hold_id: str | None = None
    steps: int = 0


class Checkout:
    """Turns events into requests, those of one product in one cart in order."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        api_url: str,
        ttl_s: float,
        capacities: Callable[[str], int],
        on_progress: Callable[[Tally], None],
    ) -> None:
        """Place holds of `ttl_s`; each product is declared once, with what `capacities` says."""
        self.tally = Tally()
        self._client = client
        self._api_url = api_url
        self._ttl_s = ttl_s
        self._capacities = capacities
        self._on_progress = on_progress
        # What one replay sold and sent is none of the next one's business.
        self._run = uuid.uuid4().hex[:8]
        self._lanes: OrderedDict[tuple[str, str], _Lane] = OrderedDict()
        self._declared: dict[str, asyncio.Task[None]] = {}

    async def take(self, event: Event) -> None:
        """Do what the event says, after all earlier ones of its lane."""
        lane = self._lane(event)
        async with lane.lock:
            if event.kind == "cart":
                await self._cart(event, lane)
            elif lane.hold_id is None:
                self.tally.unmatched += 1
            elif event.kind == "purchase":
                await self._end(lane, "confirm")
            else:
                await self._end(lane, "release")
        self._on_progress(self.tally)

    def _lane(self, event: Event) -> _Lane:
        lane = self._lanes.setdefault((event.session, event.product_id), _Lane())
        if len(self._lanes) > LANES_MAX:
            self._lanes.popitem(last=False)
        return lane

    async def _cart(self, event: Event, lane: _Lane) -> None:
        if lane.hold_id is not None:
            answer = await self._post(event, lane, f"/v1/holds/{lane.hold_id}/renew", {"ttl_s": self._ttl_s})
            if answer.status == HTTPStatus.OK:
                self.tally.renewed += 1
                return
            if answer.code not in _GONE:
                self.tally.refused[answer.code] += 1
                return
            lane.hold_id = None  # take it anew
        await self._declare(event.product_id)
        body = {
            "resource_id": self._resource(event.product_id),
            "ttl_s": self._ttl_s,
            "external_ref": event.session,
        }
        answer = await self._post(event, lane, "/v1/holds", body)
        if answer.status == HTTPStatus.CREATED:
            lane.hold_id = answer.body["id"]
            self.tally.hold_ids.add(UUID(lane.hold_id))
            self.tally.placed += 1
        elif answer.code == "insufficient_capacity":
            self.tally.sold_out += 1
        else:
            self.tally.refused[answer.code] += 1

    async def _end(self, lane: _Lane, verb: str) -> None:
        # Both may be repeated as they are, without a key.
        answer = await self._ask("POST", f"/v1/holds/{lane.hold_id}/{verb}", {}, {})
        lane.hold_id = None
        if answer.status == HTTPStatus.OK:
            if verb == "confirm":
                self.tally.confirmed += 1
            else:
                self.tally.released += 1
        elif answer.code in _GONE:
            self.tally.too_late += 1
        else:
            self.tally.refused[answer.code] += 1

    async def _declare(self, product_id: str) -> None:
        """Declare the product's capacity once, whoever asks first."""
        if product_id not in self._declared:
            self._declared[product_id] = asyncio.create_task(self._put(product_id))
        await self._declared[product_id]

    async def _put(self, product_id: str) -> None:
        path = f"/v1/resources/{quote(self._resource(product_id), safe='')}"
        answer = await self._ask("PUT", path, {"capacity": self._capacities(product_id)}, {})
        if answer.status != HTTPStatus.OK:
            self.tally.refused[answer.code] += 1

    def _resource(self, product_id: str) -> str:
        return f"{self._run}-{product_id}"

    async def _post(self, event: Event, lane: _Lane, path: str, body: dict[str, Any]) -> Answer:
        """Post under a key that is the event's own, so that a second attempt has no second effect."""
        lane.steps += 1
        name = f"{self._run} {event.session} {event.product_id} {lane.steps}"
        return await self._ask(
            "POST", path, body, {"Idempotency-Key": hashlib.sha256(name.encode()).hexdigest()}
        )

    async def _ask(self, method: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        answer = Answer(0, {})
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                self.tally.retries += 1
                wait_s = min(RETRY_S * 2 ** (attempt - 1), RETRY_S_MAX)
                await asyncio.sleep(wait_s * random.uniform(0.5, 1))  # noqa: S311 - spreads retries
            answer = await self._once(method, path, body, headers)
            if answer.status in _KEY_REFUSED:
                raise SetupError(f"The API refuses the key ({answer.code}): give one with the scope holds.")
            if answer.status and answer.status not in _COME_AGAIN and answer.code != "key_in_progress":
                break
        return answer

    async def _once(self, method: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        started_s = time.perf_counter()
        self.tally.requests += 1
        try:
            async with self._client.request(
                method, self._api_url + path, data=json.dumps(body).encode(), headers=headers
            ) as response:
                return Answer(response.status, json.loads(await response.read()))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return Answer(0, {})
        finally:
            self.tally.latencies_ms.append((time.perf_counter() - started_s) * 1000)
