"""The governor's settings come from the environment, and are checked as a whole."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from governor import GovernorSettings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """GOVERNOR_* sets a field; what is not set has its documented default."""
    monkeypatch.setenv("GOVERNOR_FLOOR_PER_S", "0.5")
    monkeypatch.delenv("GOVERNOR_CEILING_PER_S", raising=False)
    settings = GovernorSettings()
    assert (settings.floor_per_s, settings.ceiling_per_s) == (0.5, 20_000)


@pytest.mark.parametrize(
    ("floor_per_s", "ceiling_per_s"), [(10, 9), (0, 10), (5, float("inf")), (float("nan"), 10)]
)
def test_settings_that_contradict_are_refused(floor_per_s: float, ceiling_per_s: float) -> None:
    """A floor of nothing or above the ceiling does not start."""
    with pytest.raises(ValidationError):
        GovernorSettings(floor_per_s=floor_per_s, ceiling_per_s=ceiling_per_s)
