"""The GOVERNOR_* environment: every field with unit, default, range and why."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from governor.bucket import RATE_PER_S_MAX, RATE_PER_S_MIN
from governor.law import LawSettings

# Where nothing else is set, of the ceiling: for holds 1,000/s, 3 % of a core at 29 us each.
START_SHARE = 0.05


def hash_of(settings: LawSettings) -> str:
    """Tell the settings of a law apart from others: its history counts under equal ones only."""
    return digest(asdict(settings))


def digest(values: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return 12 hex digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


class GovernorSettings(BaseSettings):
    """Read the GOVERNOR_* environment once, in the composition root, and check it as a whole.

    Raises: pydantic.ValidationError, naming the field, its range and what was given.
    """

    model_config = SettingsConfigDict(env_prefix="GOVERNOR_", frozen=True)

    mode: Literal["enforce", "observe", "off"] = Field(
        default="enforce",
        description=(
            "enforce: the controller's allowance counts; observe: it decides and journals, the allowance stays "
            "fixed at the ceiling; off: fixed, and nobody decides."
        ),
    )
    floor_per_s: float = Field(
        default=5.0,
        ge=RATE_PER_S_MIN,
        le=RATE_PER_S_MAX,
        allow_inf_nan=False,
        description=(
            "Capacity reserved for expiry, permits/s, at most the ceiling: it flows when no allowance is "
            "published, when signals are missing and whatever is charged, so the database must bear it on "
            "its worst day."
        ),
    )
    ceiling_per_s: float = Field(
        default=20_000.0,
        ge=RATE_PER_S_MIN,
        le=RATE_PER_S_MAX,
        allow_inf_nan=False,
        description=(
            "The most that is ever allowed, permits/s, at least the floor, however healthy the database "
            "looks: it bounds what a wrong signal can do. The bucket holds 0.25 s of it as burst."
        ),
    )
    start_per_s: float | None = Field(
        default=None,
        ge=RATE_PER_S_MIN,
        le=RATE_PER_S_MAX,
        allow_inf_nan=False,
        description=(
            "Safe without any history, permits/s, floor to ceiling: the first allowance after one complete "
            f"reading, and what an idle fleet keeps. Unset: {START_SHARE:.0%} of the ceiling, or the floor."
        ),
    )
    objective_s: float = Field(
        default=30.0,
        ge=0.1,
        le=86_400,
        description=(
            "What is due should be done within this, s: it says how urgent a backlog is, and never overrides "
            "a cut."
        ),
    )
    interval_s: float = Field(
        default=2.0,
        ge=0.05,
        le=60,
        description=(
            "Between two decisions, s: long enough for the last one to show in the signals. The lease lasts "
            "four, a published allowance six of them."
        ),
    )
    shadow: str | None = Field(
        default=None,
        min_length=1,
        max_length=500,
        description=(
            "A candidate beside the law, journalled and never enforced: module:Class, or settings of the law "
            "as name=value,name=value."
        ),
    )
    journal_rows_max: int = Field(
        default=50_000,
        ge=10,
        le=10_000_000,
        description="Decisions that are kept, at most: a day at the default interval, some 2 kB each.",
    )
    journal_age_s_max: float = Field(
        default=7 * 86_400,
        ge=60,
        le=366 * 86_400,
        description="Decisions are kept this long, s.",
    )

    @property
    def law(self) -> LawSettings:
        """The part that the law is told."""
        start = START_SHARE * self.ceiling_per_s if self.start_per_s is None else self.start_per_s
        return LawSettings(
            floor_per_s=self.floor_per_s,
            ceiling_per_s=self.ceiling_per_s,
            start_per_s=min(max(start, self.floor_per_s), self.ceiling_per_s),
            objective_s=self.objective_s,
            interval_s=self.interval_s,
        )

    @property
    def hash(self) -> str:
        """What tells these settings apart from others."""
        return digest(self.model_dump(mode="json"))

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.floor_per_s > self.ceiling_per_s:
            message = (
                f"GOVERNOR_FLOOR_PER_S ({self.floor_per_s}) must be at most "
                f"GOVERNOR_CEILING_PER_S ({self.ceiling_per_s})"
            )
            raise ValueError(message)
        if self.start_per_s is not None and not self.floor_per_s <= self.start_per_s <= self.ceiling_per_s:
            message = (
                f"GOVERNOR_START_PER_S ({self.start_per_s}) must be between GOVERNOR_FLOOR_PER_S "
                f"({self.floor_per_s}) and GOVERNOR_CEILING_PER_S ({self.ceiling_per_s})"
            )
            raise ValueError(message)
        return self
