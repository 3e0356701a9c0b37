"""A shop's checkout: each of its events becomes a call of the API's client, or two."""

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

from expiry import errors
from expiry.client import Attempt, Client
from expiry.live import Tally
from expiry.shop import Event
from expiry.wire.problems import ForbiddenError, UnauthenticatedError

LANES_MAX = 200_000  # products in carts that are remembered; the oldest are forgotten

_GONE = (errors.HoldExpiredError, errors.AlreadyEndedError, errors.HoldNotFoundError)


@dataclass(slots=True)
class _Lane:
    """One product in one cart: its events wait for each other, in order."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    hold_id: UUID | None = None


def counting(tally: Tally) -> Callable[[Attempt], None]:
    """Answer what counts a client's requests in the tally."""

    def count(attempt: Attempt) -> None:
        tally.requests += 1
        tally.retries += attempt.number > 1
        tally.latencies_ms.append(attempt.seconds * 1000)

    return count


class Checkout:
    """Turns events into calls, those of one product in one cart in order."""

    def __init__(
        self,
        client: Client,
        tally: Tally,
        ttl_s: float,
        capacities: Callable[[str], int],
        on_progress: Callable[[Tally], None],
    ) -> None:
        """Place holds of `ttl_s`; each product is declared once, with what `capacities` says."""
        self.tally = tally
        self._client = client
        self._ttl_s = ttl_s
        self._capacities = capacities
        self._on_progress = on_progress
        self._run = uuid.uuid4().hex[:8]  # what one replay sold is none of the next one's business
        self._lanes: OrderedDict[tuple[str, str], _Lane] = OrderedDict()
        self._declared: dict[str, asyncio.Task[None]] = {}

    async def take(self, event: Event) -> None:
        """Do what the event says, after all earlier ones of its lane."""
        lane = self._lane(event)
        async with lane.lock:
            with self._counted():
                if event.kind == "cart":
                    await self._cart(event, lane)
                elif lane.hold_id is None:
                    self.tally.unmatched += 1
                else:
                    await self._end(event, lane, lane.hold_id)
        self._on_progress(self.tally)

    def _lane(self, event: Event) -> _Lane:
        lane = self._lanes.setdefault((event.session, event.product_id), _Lane())
        if len(self._lanes) > LANES_MAX:
            self._lanes.popitem(last=False)
        return lane

    async def _cart(self, event: Event, lane: _Lane) -> None:
        if lane.hold_id is not None:
            try:
                await self._client.renew(lane.hold_id, ttl_s=self._ttl_s)
            except _GONE:
                lane.hold_id = None  # take it anew
            else:
                self.tally.renewed += 1
                return
        await self._declare(event.product_id)
        try:
            hold = await self._client.place(
                self._resource(event.product_id), ttl_s=self._ttl_s, external_ref=event.session
            )
        except errors.InsufficientCapacityError:
            self.tally.sold_out += 1
            return
        lane.hold_id = hold.id
        self.tally.hold_ids.add(hold.id)
        self.tally.placed += 1

    async def _end(self, event: Event, lane: _Lane, hold_id: UUID) -> None:
        lane.hold_id = None
        try:
            if event.kind == "purchase":
                await self._client.confirm(hold_id)
                self.tally.confirmed += 1
            else:
                await self._client.release(hold_id)
                self.tally.released += 1
        except _GONE:
            self.tally.too_late += 1

    async def _declare(self, product_id: str) -> None:
        """Declare the product's capacity once, whoever asks first."""
        if product_id not in self._declared:
            self._declared[product_id] = asyncio.create_task(self._put(product_id))
        await self._declared[product_id]

    async def _put(self, product_id: str) -> None:
        with self._counted():
            await self._client.declare(self._resource(product_id), capacity=self._capacities(product_id))

    def _resource(self, product_id: str) -> str:
        return f"{self._run}-{product_id}"

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a refusal by its code and go on; a key that is refused ends the replay (SetupError)."""
        try:
            yield
        except errors.SetupError:
            raise
        except (UnauthenticatedError, ForbiddenError) as error:
            raise errors.SetupError(
                f"The API refuses the key ({error.code}): give one with the scope holds."
            ) from error
        except errors.ExpiryError as error:
            self.tally.refused[error.code] += 1
