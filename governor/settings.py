"""The GOVERNOR_* environment: every field with unit, default, range and why."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from governor.bucket import RATE_PER_S_MAX, RATE_PER_S_MIN


class GovernorSettings(BaseSettings):
    """Read the GOVERNOR_* environment once, in the composition root, and check it as a whole.

    Raises: pydantic.ValidationError, naming the field, its range and what was given.
    """

    model_config = SettingsConfigDict(env_prefix="GOVERNOR_", frozen=True)

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

    @model_validator(mode="after")
    def _floor_within_ceiling(self) -> Self:
        if self.floor_per_s > self.ceiling_per_s:
            message = (
                f"GOVERNOR_FLOOR_PER_S ({self.floor_per_s}) must be at most "
                f"GOVERNOR_CEILING_PER_S ({self.ceiling_per_s})"
            )
            raise ValueError(message)
        return self
