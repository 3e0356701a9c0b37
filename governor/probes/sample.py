"""What a probe is: one signal with a target, and the two ways in which it can fail to answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class ProbeOverloadedError(Exception):
    """What is measured did not answer in time, or refused: a reading above the target, not a missing one."""


class ProbeMissingError(Exception):
    """The signal cannot be had, which says nothing about what it measures."""


class GrantMissingError(ProbeMissingError):
    """The role of the probes may not see what others do; the message has the GRANT that is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value as measured, in the probe's own unit, and when; s on the prober's monotonic clock."""

    value: float
    sampled_at_s: float


class Probe(Protocol):
    """One signal. A probe with a connection, a session or a task has a `source` as well, which is a Source."""

    @property
    def name(self) -> str:
        """As in `limited_by`: saturation:<name>."""

    @property
    def target(self) -> float:
        """The value that counts as saturation 1.0; above 0."""

    @property
    def low(self) -> float:
        """The least plausible value."""

    @property
    def high(self) -> float:
        """The greatest plausible value, far above what overload can reach: beyond it is a broken sensor."""

    @property
    def ttl_s(self) -> float:
        """How old a sample may be, s."""

    @property
    def required(self) -> bool:
        """Whether the fleet falls to its floor while this is missing; an optional probe raises an alert."""

    async def sample(self) -> Sample:
        """Measure.

        Raises: ProbeOverloadedError, TimeoutError or OSError for a reading above the target; anything
        else counts as missing.
        """


class Source(Protocol):
    """What probes draw on; several may share one."""

    async def start(self) -> None:
        """Open what is needed. Raises: GrantMissingError."""

    async def close(self) -> None:
        """Close it, within a bound."""
