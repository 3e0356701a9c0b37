"""A quota for each key: so many requests a second, and a second's worth of them at once.

Each process counts for itself, in memory: a store asked at every request would cost more than it protects.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from expiry.wire.problems import QuotaError

ROUNDING_S = 1e-6
KEYS_MAX = 10_000  # that are remembered; who was quiet longest is forgotten, and may begin anew


class Quota:
    """Lets each key make `rate_per_s` requests; None lets everybody do everything."""

    def __init__(self, rate_per_s: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with every key's second unspent."""
        self._interval_s = None if rate_per_s is None else 1 / rate_per_s
        self._burst_s = max(1.0, self._interval_s or 0)
        self._clock = clock
        # When each key will have paid for all that it did, at one request an interval.
        self._paid_at_s: OrderedDict[str, float] = OrderedDict()

    def take(self, key_id: str, n: int = 1, *, owed: bool = False) -> None:
        """Count n requests. Raises QuotaError, unless `owed`: then later requests wait for it."""
        if self._interval_s is None:
            return
        now_s = self._clock()
        paid_at_s = max(self._paid_at_s.get(key_id, 0.0), now_s) + n * self._interval_s
        late_s = paid_at_s - now_s - self._burst_s
        if late_s > ROUNDING_S and not owed:
            raise QuotaError(retry_after_s=max(1, math.ceil(late_s)))
        self._paid_at_s[key_id] = paid_at_s
        self._paid_at_s.move_to_end(key_id)
        if len(self._paid_at_s) > KEYS_MAX:
            self._paid_at_s.popitem(last=False)
