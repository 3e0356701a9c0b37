"""The governor under this service: what it is told of holds, its fleet's names, its controller in each process."""

import asyncio
from typing import Any

import asyncpg
import structlog

from expiry.backlog import HoldsBacklog
from expiry.errors import SetupError
from expiry.permits import FLEET, Permits
from expiry.settings import Settings
from governor import Controller, GovernorSettings
from governor.probes.build import build
from governor.probes.settings import ProbeSettings
from governor.settings import digest

log = structlog.get_logger()


def bucket_row(governor: GovernorSettings) -> str:
    """Name the row of governor_bucket that these settings use.

    The controller has one of its own, for its epochs count leases and those of a fixed allowance are times;
    and it must not find the burst there that a fixed allowance left.
    """
    return "governed" if governor.mode == "enforce" else "fixed"


async def run(
    pool: "asyncpg.Pool[asyncpg.Record]",
    permits: Permits,
    settings: Settings,
    stop: asyncio.Event,
    *,
    measured: ProbeSettings | None = None,
) -> None:
    """Be a candidate for leading the fleet, and lead it if need be, until asked to stop.

    Without `measured` nothing measures the database: errors and timeouts are all that limits.
    Raises SetupError for a GOVERNOR_SHADOW that is no law, and for probes that outlast the interval.
    """
    governor = permits.governor
    try:
        probes = None
        if settings.database_pooler:
            log.warning("governor.measures_nothing", why="the probes need the server itself, not a pooler")
        elif measured is not None:
            probes = build(
                measured,
                database_url=settings.database_url.get_secret_value(),
                interval_s=governor.interval_s,
                pool_wait_s=permits.waits.longest_s,
            )
        controller = Controller(
            pool,
            name=FLEET,
            primary=permits.primary,
            row=permits.fallback,
            backlog=HoldsBacklog(pool, governor.objective_s),
            settings=governor,
            outcomes=permits.outcomes,
            probes=probes,
            settings_hash=settings_hash(governor, measured),
        )
    except ValueError as error:
        raise SetupError(f"The governor cannot start: {error}.") from error
    permits.moved = lambda: permits.primary is not None and controller.home == "postgres"
    await controller.run(stop)


def settings_hash(governor: GovernorSettings, measured: ProbeSettings | None) -> str:
    """Tell all GOVERNOR_* settings of a process apart from others."""
    return digest([each.model_dump(mode="json") for each in (governor, measured) if each is not None])


def describe(governor: GovernorSettings, measured: ProbeSettings | None) -> dict[str, Any]:
    """Say the settings for the log, secrets masked."""
    probes = {} if measured is None else measured.model_dump(mode="json", exclude_none=True)
    return {**governor.model_dump(mode="json"), **probes, "hash": settings_hash(governor, measured)}
