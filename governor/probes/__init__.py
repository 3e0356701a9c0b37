"""Signals of a database and a process, each as value / target, for the law to act on.

`Probes` reads them all once per interval; `governor.probes.build` makes those that the environment asks
for. Only the modules that speak to PostgreSQL import its driver.
"""

from governor.probes.prober import Probes
from governor.probes.sample import (
    GrantMissingError,
    Probe,
    ProbeMissingError,
    ProbeOverloadedError,
    Sample,
    Source,
)
from governor.probes.track import OVERLOADED

__all__ = [
    "OVERLOADED",
    "GrantMissingError",
    "Probe",
    "ProbeMissingError",
    "ProbeOverloadedError",
    "Probes",
    "Sample",
    "Source",
]
