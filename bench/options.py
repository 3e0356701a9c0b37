"""What a caller may choose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.contenders import Contender


@dataclass(frozen=True, slots=True)
class Options:
    """Of one call of the bench."""

    peers: frozenset[str] = frozenset()  # names of contenders; none named: all
    runs: int = 3
    holds: int = 50_000
    limit_s: float = 60.0  # a drain is cut off after this, and its rate is that of what was done
    quiet_s: float = 60.0  # before each lone hold
    lone: int = 2  # lone holds in each run
    idle_s: float = 20.0
    size: int = 10_000_000  # of the largest table
    minutes: float = 60.0  # of churn
    drain_s: float = 150.0  # so long the best fixed rate needs for a governed clearance
    courses: frozenset[str] = frozenset()  # of a governed clearance, by name; none named: all

    def of(self, part: str) -> dict[str, Any]:
        """Answer those that matter to a part."""
        names = {
            "drain": ("runs", "holds", "limit_s"),
            "lag": ("runs", "lone", "quiet_s"),
            "enqueue": ("runs", "holds"),
            "idle": ("runs", "idle_s"),
            "scale": ("runs", "size"),
            "churn": ("minutes",),
            "governor": ("drain_s",),
        }
        return {name: getattr(self, name) for name in names.get(part, ("runs",))}

    def chosen(self, contenders: Sequence[Contender]) -> list[Contender]:
        """Answer those that take part, in the given order."""
        return [c for c in contenders if not self.peers or c.name in self.peers]
