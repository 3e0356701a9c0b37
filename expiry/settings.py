"""Every setting of the service, with its unit, default, range and reason: `EXPIRY_*` in the environment.

Only the command line reads the environment (`Settings()`); everything else is handed what it needs.
"""

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

Mode = Literal["hybrid", "queue", "sweep"]
SCHEMES = {
    "database_url": ("postgresql", "postgres"),
    "redis_url": ("redis", "rediss", "unix"),
}


class Settings(BaseSettings):
    """Validated once at start, printed with secrets masked."""

    model_config = SettingsConfigDict(
        env_prefix="EXPIRY_", extra="ignore", frozen=True, hide_input_in_errors=True
    )

    # --- stores
    database_url: SecretStr = Field(
        default=SecretStr("postgresql://localhost/expiry"),
        description="PostgreSQL 14 or newer, where holds live.",
    )
    redis_url: SecretStr = Field(
        default=SecretStr("redis://localhost:6379/0"),
        description="Redis 6.2 or newer, or Valkey, where wake-ups live (not needed in sweep mode).",
    )
    redis_required_at_start: bool = Field(
        default=True,
        description="False: start although Redis is away (hybrid mode: the sweep works, wake-ups follow).",
    )
    database_pool_max: int = Field(
        default=10,
        ge=2,
        le=1000,
        description="Connections to PostgreSQL, at most; in `expiry dev` twice as many.",
    )
    database_pooler: bool = Field(
        default=False,
        description="True behind a pooler in transaction mode (PgBouncer): no prepared statements, "
        "no session settings.",
    )
    statement_timeout_s: float = Field(
        default=10,
        gt=0,
        le=600,
        description="Longest statement, s; one that hangs must not hold its locks.",
    )
    redis_timeout_s: float = Field(
        default=2,
        gt=0,
        le=60,
        description="Longest wait for one answer of Redis, s; wake-ups are hints, nobody waits long.",
    )

    # --- the two ways to the same door
    mode: Mode = Field(
        default="hybrid",
        description="hybrid: queue and sweep; queue: no sweep; sweep: no Redis at all.",
    )
    queue: str = Field(
        default="expiry:wakeups",
        min_length=1,
        max_length=200,
        description="Sorted set of the wake-ups in Redis; services that share a Redis need one each.",
    )
    horizon_s: float = Field(
        default=900,
        ge=10,
        le=86_400,
        description="Only deadlines this near live in Redis, s; bounds its memory.",
    )
    lease_s: float = Field(
        default=30,
        ge=1,
        le=3600,
        description="A claimed wake-up comes due again after this, s, unless settled: a killed worker's "
        "holds wait no longer.",
    )
    batch_max: int = Field(default=500, ge=1, le=5000, description="Holds expired by one statement, at most.")
    batches_in_flight_max: int = Field(
        default=3,
        ge=1,
        le=16,
        description="Batches of one worker under way at once, at most: some run while others are claimed or settled.",
    )
    worker_enabled: bool = Field(default=True, description="Run the worker loop in this process.")
    promoter_enabled: bool = Field(default=True, description="Run the promoter loop in this process.")
    promoter_interval_s: float = Field(
        default=5,
        ge=0.1,
        le=300,
        description="Time between two slices loaded into Redis, and between two checks for a Redis "
        "that lost its data, s.",
    )
    sweep_enabled: bool = Field(default=True, description="Run the sweep loop in this process.")
    sweep_interval_s: float = Field(
        default=1,
        ge=0.05,
        le=3600,
        description="Time between two passes over what is overdue, s; part of the bound on lateness "
        "when Redis is away.",
    )
    sweep_grace_s: float | None = Field(
        default=None,
        ge=0,
        le=3600,
        description="The sweep leaves this long to the queue, s; unset: 2, and 0 in sweep mode.",
    )
    attempts_max: int = Field(
        default=5,
        ge=1,
        le=100,
        description="Failures of one row, by its own fault, before it becomes a dead letter.",
    )
    retry_base_s: float = Field(
        default=1,
        gt=0,
        le=3600,
        description="Wait after a row's first failure, s; doubles with each, at most 300, with jitter.",
    )

    # --- keeping the tables small
    prune_enabled: bool = Field(default=True, description="Run the prune loop in this process.")
    prune_interval_s: float = Field(default=60, ge=1, le=86_400, description="Time between two prunings, s.")
    retention_s: float = Field(
        default=30 * 86_400,
        ge=86_400,
        le=10 * 365 * 86_400,
        description="Ended holds and their events are kept this long, s; after that a confirmed hold cannot be "
        "returned any more. Idempotency keys are kept for two days.",
    )

    # --- HTTP
    api_host: str = Field(default="127.0.0.1", description="Address of the API, and of a worker's metrics.")
    api_port: int = Field(default=8080, ge=0, le=65_535, description="Port of the API; 0 picks a free one.")
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65_535,
        description="Port for /healthz, /readyz and /metrics of a process without the API; unset: "
        "none there, and on the API's own port otherwise.",
    )

    api_rate_per_s: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Requests that one API key may make in a second, and a second's worth of them at once, in each "
        "API process; a batch counts its holds. Unset: any number.",
    )

    # --- what one client may ask of the server
    api_connections_max: int = Field(
        default=800,
        ge=1,
        le=100_000,
        description="Connections of clients, at most; below the 1,024 files that a process may usually open. The next "
        "ones wait with the kernel until one ends.",
    )
    api_line_bytes_max: int = Field(
        default=8190,
        ge=4096,
        le=65_536,
        description="Longest request line, bytes; a resource id takes up to 3,060, and proxies seldom pass on 8,192.",
    )
    api_header_bytes_max: int = Field(
        default=8190,
        ge=2048,
        le=65_536,
        description="Longest header, bytes; as long as the line, for what proxies add.",
    )
    api_headers_max: int = Field(
        default=64,
        ge=16,
        le=1000,
        description="Headers of one request, at most; ours are four, a browser and its proxies add two or three dozen.",
    )
    api_body_bytes_max: int = Field(
        default=1_048_576,
        ge=16_384,
        le=67_108_864,
        description="Longest body, bytes; the contract's 1 MiB, enough for a batch of 500 holds.",
    )
    api_json_depth_max: int = Field(
        default=32,
        ge=8,
        le=200,
        description="Levels of nesting in a body; far below where the parsers of Python and PostgreSQL give up.",
    )
    api_head_timeout_s: float = Field(
        default=10,
        gt=0,
        le=600,
        description="Time for the head of a request, s, on a new connection with the wait for it; a head is a packet "
        "or two, and who needs longer is lost or hostile.",
    )
    api_body_timeout_s: float = Field(
        default=30,
        gt=0,
        le=600,
        description="Time for the body of a request, s; 1 MiB within it needs 35 kB/s.",
    )
    api_answer_timeout_s: float = Field(
        default=30,
        gt=0,
        le=600,
        description="Time for a client to take an answer, beyond what the kernel keeps for it, s; then it is cut off.",
    )
    api_idle_timeout_s: float = Field(
        default=75,
        gt=0,
        le=3600,
        description="A connection may idle between two requests so long, s; longer than a load balancer's (often 60), "
        "so that the side that sends is the one that closes.",
    )
    api_drain_s: float = Field(
        default=5,
        ge=0,
        le=600,
        description="After SIGTERM the API is not ready, yet answers so long, s, before EXPIRY_STOP_GRACE_S begins: "
        "at least what load balancers need to notice. Kubernetes needs a second or two; Docker kills after 10, "
        "which has to be more than the two together.",
    )

    # --- logging and stopping
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto: console on a terminal, json otherwise."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe event that is written."
    )
    stop_grace_s: float = Field(
        default=4,
        gt=0,
        le=600,
        description="After SIGTERM, running requests and batches get this long to finish, s.",
    )

    @property
    def queue_used(self) -> bool:
        """Whether wake-ups are written and read at all."""
        return self.mode != "sweep"

    @property
    def grace_s(self) -> float:
        """How long an overdue hold is left to the queue before the sweep takes it, s."""
        if self.sweep_grace_s is not None:
            return self.sweep_grace_s
        return 0 if self.mode == "sweep" else 2

    @property
    def enqueue_within_s(self) -> float:
        """Deadlines nearer than this are enqueued by whoever places or renews, s.

        Past the horizon by more than the promoter needs for two rounds, so that a hold is in reach of
        one of the two at any time.
        """
        return self.horizon_s + 2 * self.promoter_interval_s + 10

    @field_validator("database_url", "redis_url")
    @classmethod
    def _is_url(cls, url: SecretStr, info: ValidationInfo) -> SecretStr:
        """Refuse what no driver could read; never shows it, for it may hold a password."""
        schemes = SCHEMES[str(info.field_name)]
        try:
            parts = urlsplit(url.get_secret_value())
            if "," not in parts.netloc:  # several hosts are for the driver to read
                int(parts.port or 0)
        except ValueError:
            raise ValueError("cannot be read: in a password write %2F for / and %40 for @") from None
        if parts.scheme not in schemes:
            raise ValueError(f"must start with {' or '.join(f'{s}://' for s in schemes)}")
        return url

    @model_validator(mode="after")
    def _some_way_out(self) -> Self:
        if self.mode == "queue" and self.sweep_grace_s is not None:
            raise ValueError("EXPIRY_SWEEP_GRACE_S has no meaning in queue mode: unset it")
        return self
