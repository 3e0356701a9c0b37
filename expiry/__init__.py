"""Reservation holds that end exactly once, on time.

The path of a hold:

holds.place      a row `held` and its event, in the caller's transaction; units are taken
wakeups.enqueue  after the commit: a score in Redis, the deadline in ms
promoter         brings later deadlines to Redis when they come near
worker           claims what is due, with permits (governor), in one call ...
expire.expire    ... and ends it in one statement: the row decides, once
wakeups.settle   the wake-up leaves Redis, after the commit
sweep            finds what the queue forgot and calls the same expire
deadletters      keeps what fails by its own fault until a person looks
outbox           holds one event per verb and generation, written with the change
"""

from importlib import import_module
from typing import TYPE_CHECKING

from expiry.errors import (
    AlreadyEndedError,
    BusyError,
    ExpiryError,
    GenerationMismatchError,
    HoldExpiredError,
    HoldNotFoundError,
    InsufficientCapacityError,
    LimitReachedError,
    OutOfRangeError,
)
from expiry.wanted import Item, Wanted

if TYPE_CHECKING:
    from expiry.holds import Hold, Placement, confirm, get, place, place_many, release, renew, return_
    from expiry.resources import declare
    from expiry.settings import Settings
    from expiry.wakeups import Wakeups, connect_redis, transaction

__all__ = [
    "AlreadyEndedError",
    "BusyError",
    "ExpiryError",
    "GenerationMismatchError",
    "Hold",
    "HoldExpiredError",
    "HoldNotFoundError",
    "InsufficientCapacityError",
    "Item",
    "LimitReachedError",
    "OutOfRangeError",
    "Placement",
    "Settings",
    "Wakeups",
    "Wanted",
    "confirm",
    "connect_redis",
    "declare",
    "get",
    "place",
    "place_many",
    "release",
    "renew",
    "return_",
    "transaction",
]

# Loaded when first used: who only asks over HTTP (`expiry.client`) loads no driver of any server.
_HOMES = {
    "expiry.holds": "Hold Placement confirm get place place_many release renew return_",
    "expiry.resources": "declare",
    "expiry.settings": "Settings",
    "expiry.wakeups": "Wakeups connect_redis transaction",
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
