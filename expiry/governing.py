"""The governor under this service: what it is told of holds, its fleet's names, its controller in each process."""

import asyncio
import os
import secrets
import socket
from typing import Any

import asyncpg

from expiry.backlog import HoldsBacklog
from expiry.errors import SetupError
from expiry.permits import FLEET, Permits
from expiry.settings import Settings
from governor import Controller, GovernorSettings
from governor.readings import Signals


def bucket_row(governor: GovernorSettings) -> str:
    """Name the row of governor_bucket that these settings use.

    The controller has one of its own, for its epochs count leases and those of a fixed allowance are times;
    and it must not find the burst there that a fixed allowance left.
    """
    return "governed" if governor.mode == "enforce" else "fixed"


async def run(
    pool: "asyncpg.Pool[asyncpg.Record]", permits: Permits, settings: Settings, stop: asyncio.Event
) -> None:
    """Be a candidate for leading the fleet, and lead it if need be, until asked to stop.

    Raises SetupError for a GOVERNOR_SHADOW that is no law.
    """
    governor = permits.governor
    try:
        controller = Controller(
            pool,
            name=FLEET,
            holder=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}",
            primary=permits.primary,
            row=permits.fallback,
            backlog=HoldsBacklog(pool, governor.objective_s),
            settings=governor,
            outcomes=permits.outcomes,
            probes=probes(settings, governor),
        )
    except ValueError as error:
        raise SetupError(f"GOVERNOR_SHADOW: {error}.") from error
    permits.moved = lambda: permits.primary is not None and controller.home == "postgres"
    await controller.run(stop)


def probes(_settings: Settings, _governor: GovernorSettings) -> Signals | None:
    """Answer what measures the database; None: errors and timeouts alone."""
    return None


def describe(governor: GovernorSettings) -> dict[str, Any]:
    """Say the settings for the log."""
    return {**governor.model_dump(mode="json"), "hash": governor.hash}
