"""How this process's attempts ended, until the controller adds it to the fleet's totals."""

from __future__ import annotations

from governor.bucket import Attempts
from governor.evidence import lower_bound

_BURST = 0.5  # share of timed-out attempts, lower confidence bound, that is cut at once


class Outcomes:
    """Counts attempts: `failed` are transient errors of the dependency only, never contended, stale or poison."""

    def __init__(self) -> None:
        """Start without any."""
        self._counted = Attempts()

    def note(self, *, completed: int = 0, failed: int = 0, timed_out: int = 0) -> None:
        """Count attempts that ended."""
        kept = self._counted
        self._counted = Attempts(
            completed=kept.completed + completed,
            failed=kept.failed + failed,
            timed_out=kept.timed_out + timed_out,
        )

    def drain(self) -> Attempts:
        """Return what was counted, and forget it."""
        counted, self._counted = self._counted, Attempts()
        return counted

    def put_back(self, attempts: Attempts) -> None:
        """Count again what could not be reported."""
        self.note(completed=attempts.completed, failed=attempts.failed, timed_out=attempts.timed_out)

    @property
    def burst(self) -> bool:
        """Whether most of the latest attempts timed out: a reason not to wait for the next interval."""
        counted = self._counted
        total = counted.completed + counted.failed + counted.timed_out
        return lower_bound(counted.timed_out, total) >= _BURST
