"""The part of the GOVERNOR_* environment that says what is measured, and which value is too much."""

from __future__ import annotations

from typing import Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class ProbeSettings(BaseSettings):
    """A target for each probe: the value that counts as saturation 1.0; `off` turns the probe off.

    `governor calibrate` proposes targets from ordinary traffic.
    Raises: pydantic.ValidationError, naming the field and its range, without the secrets.
    """

    model_config = SettingsConfigDict(
        env_prefix="GOVERNOR_",
        env_parse_none_str="off",
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    active_backends_target: float | None = Field(
        default=4.0,
        gt=0,
        le=10_000,
        description="Mean backends at work: the cores of the database server; beyond them statements queue "
        "for a processor.",
    )
    commit_latency_target_s: float | None = Field(
        default=0.025,
        gt=0,
        le=60,
        description="Mean latency of the canary's commit, s: some times that of a quiet server (1-5 ms on an "
        "SSD, 5-10 ms with a synchronous standby), as every writer waits that long.",
    )
    canary_per_s: float = Field(
        default=8.0,
        ge=5,
        le=10,
        description="Commits of the canary, 1/s: fewer say little about an interval, more are load.",
    )
    lock_waiters_target: float | None = Field(
        default=5.0,
        gt=0,
        le=10_000,
        description="Backends that wait for a lock: one or two are ordinary wherever rows are hot, a queue "
        "is not.",
    )
    lock_wait_target_s: float | None = Field(
        default=1.0,
        gt=0,
        le=3600,
        description="Longest wait for a lock, s: by then a customer notices.",
    )
    foreign_active_target: float | None = Field(
        default=None,
        gt=0,
        le=10_000,
        description="Backends at work that are not ours. Off by default: one look an interval is noisy, and "
        "active_backends counts them with ours.",
    )
    own_share_target: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of ours in the backends at work, 0..1. Off by default: at night we may be alone.",
    )
    own_applications: str = Field(
        default="expiry-%",
        max_length=1000,
        description="LIKE patterns, separated by commas, of the application_name of our own connections; "
        "tells ours from foreign backends.",
    )
    pool_wait_target_s: float | None = Field(
        default=0.1,
        gt=0,
        le=60,
        description="Longest wait for a connection of the program's own pool, s, where it tells: more work "
        "would only queue there.",
    )
    connections_target: float | None = Field(
        default=0.8,
        gt=0,
        le=0.95,
        description="Share of the connections that ordinary roles may have, 0..0.95: at 1 the next customer "
        "is refused.",
    )
    replication_lag_target_s: float | None = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="Replay lag of the slowest streaming replica, s: reads from it are as old, and a "
        "failover takes as long. 0 is read without replicas; off where one lags on purpose.",
    )
    custom_sql: str | None = Field(
        default=None,
        min_length=1,
        max_length=10_000,
        description="A SELECT that returns one number of 0 or more; runs each interval, read-only, with a "
        "time-out, on a connection of its own. Needs its target.",
    )
    custom_sql_target: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="What counts as too much of it, in its own unit.",
    )
    custom_sql_required: bool = Field(
        default=False,
        description="True: the fleet falls to its floor while the number cannot be had.",
    )
    prometheus_url: SecretStr | None = Field(
        default=None,
        description="Prometheus, as http://user:password@prometheus:9090. Needs query and target.",
    )
    prometheus_query: str | None = Field(
        default=None,
        min_length=1,
        max_length=10_000,
        description="PromQL for one value of 0 or more: the p99 of checkout, say, the signal closest to what "
        "is protected.",
    )
    prometheus_target: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="What counts as too much of it, in its own unit.",
    )
    prometheus_required: bool = Field(
        default=False,
        description="True: the fleet falls to its floor while Prometheus is away.",
    )
    probe_timeout_s: float = Field(
        default=1.0,
        ge=0.2,
        le=30,
        description="Longest wait for one probe, connect included, s, below the interval: a database that "
        "needs longer for this is read as above its target.",
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for names in (("custom_sql", "custom_sql_target"), PROMETHEUS):
            there = [name for name in names if getattr(self, name) is not None]
            if there and len(there) < len(names):
                wanted = ", ".join(f"GOVERNOR_{name.upper()}" for name in names)
                raise ValueError(f"{wanted}: set all or none; {', '.join(there)} alone measures nothing")
        return self


PROMETHEUS = ("prometheus_url", "prometheus_query", "prometheus_target")
