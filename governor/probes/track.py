"""One probe over time: what is believed of its samples, and what one outlier cannot do."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from governor.probes.sample import Probe, Sample

OVERLOADED = 2.0  # saturation of what does not answer, or refuses
_MOST = 10.0  # further above the target says no more, and would take intervals to forget
_WINDOW = 3  # the middle one counts: one outlier changes nothing, a step shows with its second sample
_WEIGHT = 0.7  # of the newest in the moving average; more smoothing would only delay a cut


@dataclass(slots=True)
class Track:
    """A probe with its last samples.

    saturation = EWMA(median of the last three of min(value / target, 10)). A gap forgets them: what was
    before it says nothing about now.
    """

    probe: Probe
    value: float | None = None  # the last one that was believed
    saturation: float | None = None  # None = missing
    alert: str | None = None  # why it is missing, or above the target without a value
    _sampled_at_s: float = float("-inf")
    _window: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def take(self, sample: Sample, *, now_s: float) -> None:
        """Believe a sample, or say why not."""
        fault = self._fault(sample, now_s)
        self._sampled_at_s = max(self._sampled_at_s, sample.sampled_at_s)
        if fault:
            self.miss(fault)
            return
        self.value, self.alert = float(sample.value), None
        self._smooth(self.value / self.probe.target)

    def overload(self, why: str) -> None:
        """Take no answer for one above the target, at least as bad as the last one."""
        self.value, self.alert = None, why
        self._smooth(max(OVERLOADED, self._window[-1] if self._window else 0.0))

    def miss(self, why: str) -> None:
        """Have no reading this time."""
        self.value, self.saturation, self.alert = None, None, why
        self._window.clear()

    def _fault(self, sample: Sample, now_s: float) -> str | None:
        value, probe = sample.value, self.probe
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"implausible: {type(value).__name__} is no number"
        if not probe.low <= value <= probe.high:  # false for NaN as well
            return f"implausible: {value:g} is not within {probe.low:g}..{probe.high:g}"
        if sample.sampled_at_s <= self._sampled_at_s:
            return "does not advance: the same sample as before"
        age_s = now_s - sample.sampled_at_s
        if not 0 <= age_s <= probe.ttl_s:  # a sample from the future has a clock of its own
            return f"late: sampled {age_s:.1f} s ago, believed for {probe.ttl_s:g} s"
        return None

    def _smooth(self, saturation: float) -> None:
        self._window.append(min(max(saturation, 0.0), _MOST))
        # Of two, the lower: an outlier may not pass because it came second.
        middle = statistics.median_low(self._window)
        last = middle if self.saturation is None else self.saturation
        self.saturation = last + _WEIGHT * (middle - last)
