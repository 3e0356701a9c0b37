"""Places of concurrent requests in one transaction: while one runs, what comes meanwhile waits and goes together.

A request by itself waits for nobody. There are two lines: in the first no lock is waited for; whose resource somebody
has locked goes on to the second, which waits, but not for long (for another process's group, say). One transaction at
a time in each line: two of one process would only keep the rows of popular resources from each other.

Whoever is not simple places alone, and so does everybody while transactions hang: what makes one of them hang must
not keep the others waiting.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import asyncpg

from expiry.api.database import ACQUIRE_S_MAX, DRIVER_ERRORS, translated
from expiry.api.hints import Hints
from expiry.errors import BusyError, ExpiryError
from expiry.group import Ask, Left, place_group
from expiry.holds import Hold

GROUP_MAX = 64  # places in one transaction; it takes some milliseconds
TURN_S = 0.25  # after that the next transaction does not wait for this one
GROUP_S_MAX = 2.0  # after that it is cancelled, and each of the group places alone
WAIT_S_MAX = 2.0  # for a turn; who waits longer had better come again

# The way to the database, or all of it: placing alone would not fare better.
_OUTAGES = ("08", "25", "57P", "53300")


class Placer:
    """Gathers places; whoever cannot go with others is told so, and places alone."""

    def __init__(
        self,
        pool: "asyncpg.Pool[asyncpg.Record]",
        hints: Hints,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing to place; `clock` answers seconds since anything."""
        # Of each line a quarter of the connections may hang; beyond, everybody places alone.
        hanging_max = max(1, pool.get_max_size() // 4)
        self._first = _Line(pool, hints, clock, hanging_max, wait=False)
        self._second = _Line(pool, hints, clock, hanging_max, wait=True)

    async def place(self, ask: Ask) -> Hold | None:
        """Answer the hold, its wake-up handed on; None: place it alone. Raises BusyError or UnavailableError."""
        found = await self._first.place(ask)
        if found is Left.LOCKED:
            found = await self._second.place(ask)
        return None if isinstance(found, Left) else found

    async def close(self) -> None:
        """Let what is under way finish."""
        for line in (self._first, self._second):
            await line.close()


class _Waiting(NamedTuple):
    since_s: float
    ask: Ask
    answer: "asyncio.Future[Hold | Left]"


class _Line:
    """Places that wait for their turn, and the transactions that they go in."""

    def __init__(
        self,
        pool: "asyncpg.Pool[asyncpg.Record]",
        hints: Hints,
        clock: Callable[[], float],
        hanging_max: int,
        *,
        wait: bool,
    ) -> None:
        self._pool = pool
        self._hints = hints
        self._clock = clock
        self._hanging_max = hanging_max
        self._wait = wait
        self._waiting: deque[_Waiting] = deque()
        self._working: asyncio.Task[None] | None = None
        self._turns: set[asyncio.Task[None]] = set()  # that have not ended
        self._hanging = 0  # how many of them the line does not wait for any more

    async def place(self, ask: Ask) -> Hold | Left:
        if self._hanging >= self._hanging_max:
            return Left.ALONE
        answer: asyncio.Future[Hold | Left] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(self._clock(), ask, answer))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await answer

    async def close(self) -> None:
        while tasks := [t for t in (self._working, *self._turns) if t is not None]:
            await asyncio.wait(tasks)

    async def _work(self) -> None:
        try:
            while self._waiting:
                if self._hanging >= self._hanging_max:
                    _tell_all(self._waiting, Left.ALONE)
                    break
                if group := self._next():
                    await self._turn(group)
        finally:
            self._working = None
            _tell_all(self._waiting, BusyError())  # cancelled, or a bug of ours: nobody waits for ever
            self._waiting.clear()

    async def _turn(self, group: list[_Waiting]) -> None:
        """Begin a transaction; return when it has ended, or takes too long to wait for."""
        committed = asyncio.Event()
        turn = asyncio.create_task(self._place(group, committed))
        self._turns.add(turn)
        turn.add_done_callback(self._turns.discard)
        try:
            async with asyncio.timeout(TURN_S):
                await committed.wait()
        except TimeoutError:
            self._hanging += 1
            turn.add_done_callback(self._freed)

    def _freed(self, _turn: object) -> None:
        self._hanging -= 1

    def _next(self) -> list[_Waiting]:
        """Take the next ones off the line, but those that have gone or have waited too long."""
        group: list[_Waiting] = []
        while self._waiting and len(group) < GROUP_MAX:
            one = self._waiting.popleft()
            if self._clock() - one.since_s > WAIT_S_MAX:
                _tell(one, BusyError())
            elif not one.answer.done():
                group.append(one)
        return group

    async def _place(self, group: list[_Waiting], committed: asyncio.Event) -> None:
        """Place them in one transaction; each gets an answer, whatever happens, once its wake-up is handed on."""
        try:
            async with self._pool.acquire(timeout=ACQUIRE_S_MAX) as conn:
                try:
                    asks = [one.ask for one in group]
                    found = await place_group(conn, asks, wait=self._wait, timeout_s=GROUP_S_MAX)
                except (asyncpg.PostgresError, TimeoutError) as error:
                    # At once: giving the connection back may take as long as what hangs there. If it was committed
                    # all the same, placing with the same key answers that hold.
                    if not _is_outage(error):
                        _tell_all(group, Left.ALONE)
                    raise
            committed.set()
            await self._hints.enqueue([hold for hold in found if isinstance(hold, Hold)])
            for one, what in zip(group, found, strict=True):
                _tell(one, what)
        except DRIVER_ERRORS as error:
            _tell_all(group, translated(error))
        finally:
            committed.set()
            _tell_all(group, BusyError())  # cancelled, or a bug of ours


def _is_outage(error: Exception) -> bool:
    """Whether placing alone would not fare better."""
    if not isinstance(error, asyncpg.PostgresError):
        return False
    return (error.sqlstate or "").startswith(_OUTAGES)


def _tell_all(them: "list[_Waiting] | deque[_Waiting]", what: Left | ExpiryError) -> None:
    for one in them:
        _tell(one, what)


def _tell(one: _Waiting, what: Hold | Left | ExpiryError) -> None:
    if one.answer.done():  # it was answered, or who asked has gone
        return
    if isinstance(what, ExpiryError):
        one.answer.set_exception(what)
    else:
        one.answer.set_result(what)
