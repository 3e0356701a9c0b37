"""Places of concurrent requests in one transaction: while one runs, what comes meanwhile waits and goes together.

A request by itself waits for nobody. One transaction at a time: two of one process would only keep the rows of popular
resources from each other.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import asyncpg

from expiry.api.database import ACQUIRE_S_MAX, DRIVER_ERRORS, translated
from expiry.api.hints import Hints
from expiry.deadletters import lies_in_row
from expiry.errors import BusyError, ExpiryError
from expiry.group import Ask, place_group
from expiry.holds import Hold

GROUP_MAX = 64  # places in one transaction; it takes some milliseconds
_CONFLICTS = ("40", "55")  # classes of SQLSTATE
WAIT_S_MAX = 2.0  # for a turn; who waits longer had better come again


class Placer:
    """Gathers places; whoever is not simple is told so, and places by himself."""

    def __init__(
        self,
        pool: "asyncpg.Pool[asyncpg.Record]",
        hints: Hints,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing to place; `clock` answers seconds since anything."""
        self._pool = pool
        self._hints = hints
        self._clock = clock
        self._waiting: deque[tuple[float, Ask, asyncio.Future[Hold | None]]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._hinting: set[asyncio.Task[None]] = set()

    async def place(self, ask: Ask) -> Hold | None:
        """Answer the hold, its wake-up handed on; None: place it alone. Raises BusyError or UnavailableError."""
        answer: asyncio.Future[Hold | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._clock(), ask, answer))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await answer

    async def close(self) -> None:
        """Let what is under way finish."""
        if tasks := [t for t in (self._working, *self._hinting) if t is not None]:
            await asyncio.wait(tasks)

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._turn()
        finally:
            self._working = None
            while self._waiting:  # cancelled, or a bug of ours
                _tell(self._waiting.popleft()[2], BusyError())

    async def _turn(self) -> None:
        """Place the next ones; each of them gets an answer, whatever happens."""
        asks: list[Ask] = []
        answers: list[asyncio.Future[Hold | None]] = []
        while self._waiting and len(asks) < GROUP_MAX:
            since, ask, answer = self._waiting.popleft()
            if answer.cancelled():
                continue
            if self._clock() - since > WAIT_S_MAX:
                answer.set_exception(BusyError())
                continue
            asks.append(ask)
            answers.append(answer)
        if not asks:
            return
        try:
            async with self._pool.acquire(timeout=ACQUIRE_S_MAX) as conn:
                holds = await place_group(conn, asks)
        except DRIVER_ERRORS as error:
            refusal = None if _one_spoils_all(error) else translated(error)
            for answer in answers:
                _tell(answer, refusal)
        except BaseException:
            for answer in answers:
                _tell(answer, BusyError())
            raise
        else:
            task = asyncio.create_task(self._hand_on(holds, answers))
            self._hinting.add(task)
            task.add_done_callback(self._hinting.discard)

    async def _hand_on(
        self, holds: Sequence[Hold | None], answers: Sequence[asyncio.Future[Hold | None]]
    ) -> None:
        try:
            await self._hints.enqueue([hold for hold in holds if hold is not None])
        finally:
            for hold, answer in zip(holds, answers, strict=True):
                _tell(answer, hold)


def _one_spoils_all(error: Exception) -> bool:
    """Whether another group, or each of these alone, may fare better."""
    if not isinstance(error, asyncpg.PostgresError):
        return False
    return lies_in_row(error) or (error.sqlstate or "")[:2] in _CONFLICTS


def _tell(answer: "asyncio.Future[Hold | None]", what: Hold | ExpiryError | None) -> None:
    if answer.done():  # who asked has gone
        return
    if isinstance(what, ExpiryError):
        answer.set_exception(what)
    else:
        answer.set_result(what)
