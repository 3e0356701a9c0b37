"""The probes that the environment asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from governor.probes.canary import Canary, CommitLatency
from governor.probes.custom_sql import CustomSql, SqlProbe
from governor.probes.pool_wait import PoolWait
from governor.probes.prober import Probes
from governor.probes.prometheus import PrometheusProbe, PrometheusQuery
from governor.probes.sample import Probe
from governor.probes.settings import ProbeSettings
from governor.probes.statistics import (
    Statistics,
    active_backends,
    connections,
    foreign_active,
    lock_wait,
    lock_waiters,
    own_share,
    replication_lag,
)

# Those of the statistics views, with the setting that has the target of each.
_STATISTICS = {
    "active_backends_target": active_backends,
    "lock_waiters_target": lock_waiters,
    "lock_wait_target_s": lock_wait,
    "foreign_active_target": foreign_active,
    "own_share_target": own_share,
    "connections_target": connections,
    "replication_lag_target_s": replication_lag,
}

# probe -> setting of its target, for who proposes targets
TARGETS = {probe.keywords["name"]: setting for setting, probe in _STATISTICS.items()} | {
    "commit_latency": "commit_latency_target_s",
    "pool_wait": "pool_wait_target_s",
    "custom_sql": "custom_sql_target",
    "prometheus": "prometheus_target",
}


def build(
    settings: ProbeSettings,
    *,
    database_url: str,
    interval_s: float,
    pool_wait_s: Callable[[], float] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Probes:
    """Return all probes that have a target, on their own connections to one server.

    pool_wait_s is the host program's: `Waits.longest_s`, say. A sample is believed for two intervals.
    Raises: ValueError if the probes' time-out is not below the interval.
    """
    if settings.probe_timeout_s >= interval_s:
        raise ValueError(
            f"GOVERNOR_PROBE_TIMEOUT_S ({settings.probe_timeout_s:g}) must be below the interval ({interval_s:g} s)"
        )
    probes = [
        *_of_database(settings, database_url, interval_s, clock),
        *_of_others(settings, database_url, interval_s, clock),
    ]
    if pool_wait_s is not None and settings.pool_wait_target_s is not None:
        probes.append(
            PoolWait(
                target=settings.pool_wait_target_s, ttl_s=2 * interval_s, wait_s=pool_wait_s, clock=clock
            )
        )
    return Probes(probes, interval_s=interval_s, clock=clock)


def _of_database(
    settings: ProbeSettings, database_url: str, interval_s: float, clock: Callable[[], float]
) -> Iterator[Probe]:
    statistics = Statistics(
        database_url,
        timeout_s=settings.probe_timeout_s,
        own_applications=[each.strip() for each in settings.own_applications.split(",") if each.strip()],
        clock=clock,
    )
    for setting, probe in _STATISTICS.items():
        target = getattr(settings, setting)
        if target is not None:
            yield probe(target=target, ttl_s=2 * interval_s, source=statistics)
    if settings.commit_latency_target_s is not None:
        canary = Canary(database_url, per_s=settings.canary_per_s, clock=clock)
        yield CommitLatency(target=settings.commit_latency_target_s, ttl_s=2 * interval_s, source=canary)


def _of_others(
    settings: ProbeSettings, database_url: str, interval_s: float, clock: Callable[[], float]
) -> Iterator[Probe]:
    if settings.custom_sql is not None and settings.custom_sql_target is not None:
        yield SqlProbe(
            target=settings.custom_sql_target,
            ttl_s=2 * interval_s,
            required=settings.custom_sql_required,
            source=CustomSql(
                database_url, settings.custom_sql, timeout_s=settings.probe_timeout_s, clock=clock
            ),
        )
    url, query, target = settings.prometheus_url, settings.prometheus_query, settings.prometheus_target
    if url is not None and query is not None and target is not None:
        yield PrometheusProbe(
            target=target,
            ttl_s=2 * interval_s,
            required=settings.prometheus_required,
            source=PrometheusQuery(
                url.get_secret_value(), query, timeout_s=settings.probe_timeout_s, clock=clock
            ),
        )
