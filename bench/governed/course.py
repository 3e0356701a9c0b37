"""The courses that a run may take, and who clears the holds meanwhile."""

import math
import sys
from dataclasses import dataclass, field

from bench.contenders import WORKER
from bench.governed import faults
from bench.governed.faults import Fault

BEGINS_S = 20.0  # after the holds have become due, something goes wrong
CALM_S = 60.0  # of the shop alone, where nothing goes wrong


@dataclass(frozen=True, slots=True)
class Course:
    """What goes wrong."""

    name: str
    title: str
    fault: Fault | None = None
    lasts_s: float = 0.0
    doubles: bool = False  # whether twice as many orders come from BEGINS_S on

    @property
    def span(self) -> tuple[float, float] | None:
        """From when to when it is wrong, s after the start; None where nothing is."""
        if self.doubles:
            return BEGINS_S, math.inf
        return (BEGINS_S, BEGINS_S + self.lasts_s) if self.fault else None

    @property
    def alone_s(self) -> float:
        """How long the shop alone is watched: as long after the fault as before it."""
        return 2 * BEGINS_S + self.lasts_s if self.fault else CALM_S


COURSES = (
    Course("calm", "nothing goes wrong"),
    Course("storm", "lock storm, 30 s", faults.lock_storm, 30.0),
    Course("slow", "database slow for 60 s", faults.slow_down, 60.0),
    Course("outage", "outage of 30 s", faults.outage, 30.0),
    Course("double", "twice as many orders", doubles=True),
)


@dataclass(frozen=True, slots=True)
class Clearer:
    """Who ends the holds, and by which allowance."""

    name: str
    title: str
    command: tuple[str, ...] = WORKER
    env: dict[str, str] = field(default_factory=dict)
    fixed_per_s: float | None = None

    @property
    def governed(self) -> bool:
        """Whether a controller decides, and journals."""
        return bool(self.command) and self.fixed_per_s is None


# The holds are overdue by minutes before the start, and it is the queue's wake-ups that are to bring them.
_COMMON = {"EXPIRY_METRICS_PORT": "0", "EXPIRY_SWEEP_GRACE_S": "3600"}
_MOST_PER_S = 1_000_000.0
# The best point of the simulation's grid, by the same shares of the ceiling.
AIMD_ADD, AIMD_FACTOR = 200.0, 0.7

ALONE = Clearer("alone", "the shop alone", command=())


def fixed(name: str, title: str, per_s: float) -> Clearer:
    """Answer a fixed allowance: what most fleets have."""
    env = {**_COMMON, "GOVERNOR_MODE": "off", "GOVERNOR_CEILING_PER_S": f"{per_s:.0f}"}
    return Clearer(name, title, env=env, fixed_per_s=per_s)


UNGOVERNED = fixed("ungoverned", "ungoverned", _MOST_PER_S)


def clearers(best_per_s: float, targets: dict[str, str]) -> list[Clearer]:
    """Answer all that clear, given the best fixed rate of the calm course and the probes' targets."""
    return [
        UNGOVERNED,
        fixed("fixed", f"fixed at {best_per_s:,.0f}/s", best_per_s),
        Clearer(
            "aimd",
            "AIMD",
            (sys.executable, "-m", "bench.governed.aimd", str(AIMD_ADD), str(AIMD_FACTOR)),
            _COMMON | targets,
        ),
        Clearer("governed", "expiry, governed", env=_COMMON | targets),
    ]
