"""A pooled connection for one piece of work: retried where that is safe, every failure named once."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import asyncpg
import structlog

from expiry import errors
from expiry.deadletters import lies_in_row
from expiry.holds import Conn
from expiry.loops import DATABASE_ERRORS

T = TypeVar("T")

ACQUIRE_S_MAX = 2.0  # wait for a connection: who waits longer had better come again
RETRIES = 2  # of a deadlock or serialization failure; each was rolled back whole
RETRY_WITHIN_S = 3.0  # since the first attempt; a row that stays locked must not park a connection for long
RETRY_WAIT_S = 0.02  # times the attempt, with jitter

DRIVER_ERRORS = (*DATABASE_ERRORS, asyncpg.InternalClientError)
# A lock timeout is none of them: it has waited as long as anybody should hold a connection for it.
_CONFLICTS = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
# SQLSTATE classes: conflicts and locks; then what says that the database is away.
_BUSY_CLASSES = frozenset({"40", "55"})
_OUTAGE_CLASSES = frozenset({"08", "25", "28", "3D", "53", "57", "58"})

log = structlog.get_logger()


async def run(pool: "asyncpg.Pool[asyncpg.Record]", work: Callable[[Conn], Awaitable[T]]) -> T:
    """Do the work on a connection. What it does must be one statement or one transaction.

    Raises BusyError or UnavailableError for whatever the database or the way to it causes.
    """
    attempt = 0
    started_s = time.monotonic()
    while True:
        try:
            async with pool.acquire(timeout=ACQUIRE_S_MAX) as conn:
                return await work(conn)
        except errors.BusyError as error:
            if not isinstance(error.__cause__, _CONFLICTS) or not _again(attempt, started_s):
                raise
        except _CONFLICTS as error:
            if not _again(attempt, started_s):
                raise errors.BusyError from error
        except DRIVER_ERRORS as error:
            raise translated(error) from error
        attempt += 1
        await asyncio.sleep(RETRY_WAIT_S * attempt * random.uniform(0.5, 1.5))  # noqa: S311 - jitter


def _again(attempt: int, started_s: float) -> bool:
    return attempt < RETRIES and time.monotonic() - started_s < RETRY_WITHIN_S


def translated(error: Exception) -> errors.ExpiryError:
    """Name a failure of the database or of the way to it; both names mean: come again."""
    if isinstance(error, TimeoutError):
        return errors.BusyError("The database did not answer in time; try again in a moment.")
    if not isinstance(error, asyncpg.PostgresError):
        log.debug("api.database_unavailable", reason=repr(error))
        return errors.UnavailableError()
    kind = (error.sqlstate or "")[:2]
    if kind in _BUSY_CLASSES or isinstance(error, asyncpg.QueryCanceledError):
        return errors.BusyError()
    if lies_in_row(error):  # an overdue poison row that `place` would reclaim, say; its DETAIL quotes the row
        log.warning("api.row_failed", sqlstate=error.sqlstate, reason=error.args[0])
        return errors.BusyError(
            "The database refused a row, perhaps an overdue hold that cannot be ended yet; try again in a moment."
        )
    if kind not in _OUTAGE_CLASSES:  # a missing function, a missing privilege: a person has to look
        log.error("api.database_unusable", sqlstate=error.sqlstate, reason=str(error))
    return errors.UnavailableError()
