"""The hold service from Python, over HTTP: typed answers, errors by name, retries that cannot do a thing twice.

    async with Client("http://127.0.0.1:8080", key="demo") as client:
        hold = await client.place(resource_id="room-12", ttl_s=900)
        await client.confirm(hold.id)

It needs aiohttp and pydantic and imports nothing of the server.
"""

from expiry.client.client import Client
from expiry.client.refusals import as_error
from expiry.client.transport import Attempt
from expiry.wanted import Item, Wanted
from expiry.wire.problems import (
    CursorExpiredError,
    ForbiddenError,
    InvalidError,
    PathNotFoundError,
    QuotaError,
    UnauthenticatedError,
)

__all__ = [
    "Attempt",
    "Client",
    "CursorExpiredError",
    "ForbiddenError",
    "InvalidError",
    "Item",
    "PathNotFoundError",
    "QuotaError",
    "UnauthenticatedError",
    "Wanted",
    "as_error",
]
