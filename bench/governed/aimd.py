"""`expiry worker` under AIMD instead of our law: the same probes, the same bucket, another formula.

python -m bench.governed.aimd ADD_PER_S FACTOR
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from expiry.__main__ import app
from governor import controller
from governor.law import Decision, Law, LawSettings
from governor.reading import Reading
from governor.simulate.peers import Aimd


class AimdLaw(Law):
    """What the controller takes for its law; what it explains is ours, what it allows is AIMD's."""

    def __init__(self, settings: LawSettings) -> None:
        super().__init__(settings)
        self._peer = Aimd(settings, add_per_s=float(sys.argv[1]), factor=float(sys.argv[2]))

    @classmethod
    def restore(cls, settings: LawSettings, snapshot: Mapping[str, Any]) -> Self:
        """Begin anew: AIMD remembers nothing but its rate."""
        del snapshot
        return cls(settings)

    def step(self, reading: Reading) -> Decision:
        """Decide by AIMD."""
        decision, other = super().step(reading), self._peer.step(reading)
        return replace(decision, allowance_per_s=other.allowance_per_s, limited_by="demand", reason="AIMD")


if __name__ == "__main__":
    setattr(controller, "Law", AimdLaw)  # noqa: B010 - the controller has no say in its law, and needs none elsewhere
    app(["worker"])
