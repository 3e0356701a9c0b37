"""What tests of the bucket share: a clock of their own, and steps that hypothesis puts together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from governor import Bucket, Priority

FLOOR_PER_S = 5.0
CEILING_PER_S = 400.0
BURST = 100  # permits: 0.25 s of the ceiling
SECOND_US = 1_000_000
PERMIT = 1_000_000_000  # nano-permits
CEILING_MILLI = round(CEILING_PER_S * 1000)


class Clock:
    """A clock that moves only when told to, from a date like Redis's own."""

    def __init__(self) -> None:
        self.us = 1_700_000_000 * SECOND_US

    def __call__(self) -> int:
        """Answer as a bucket's clock does."""
        return self.us

    def advance(self, seconds: float) -> None:
        """Let time pass; less than 0 sets the clock back."""
        self.us += round(seconds * SECOND_US)

    def seconds(self) -> float:
        """Answer as time.monotonic does."""
        return self.us / SECOND_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Time passes, then somebody calls the bucket; the integration tests take the same steps."""

    elapsed_us: int
    operation: str
    args: dict[str, Any]

    async def on(self, bucket: Bucket) -> object:
        """Do this step, and return what the bucket said."""
        args = dict(self.args)
        if "n" in args:
            return await getattr(bucket, self.operation)(args.pop("n"), **args)
        return await getattr(bucket, self.operation)(**self.args)


def _step(operation: str, **args: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    elapsed_us = st.one_of(
        st.sampled_from([0, 1, 999, SECOND_US // 4, SECOND_US, 3_700 * SECOND_US]),
        st.integers(0, 3 * SECOND_US),
    )
    return st.builds(
        Step, elapsed_us=elapsed_us, operation=st.just(operation), args=st.fixed_dictionaries(args)
    )


COUNTS = st.integers(0, 3 * BURST)
TAKES = _step("take", n=COUNTS, priority=st.sampled_from([Priority.EXPIRE, *Priority]))
CUTS = _step("cut", factor=st.floats(0, 1), dead_time_s=st.sampled_from([0.0, 0.5, 3.0]))
PUBLISHES = _step(
    "publish",
    allowance_per_s=st.one_of(st.sampled_from([0.0, 3.0, 400.0]), st.floats(0, CEILING_PER_S)),
    ttl_s=st.sampled_from([0.0, 0.2, 6.0, 86_400.0]),
    epoch=st.integers(0, 3),
    by_us=st.sampled_from([0, 1, 2**50]),
)
STEPS = st.lists(
    st.one_of(TAKES, TAKES, PUBLISHES, CUTS, _step("refund", n=COUNTS), _step("charge", n=COUNTS)),
    max_size=40,
)


async def publish(bucket: Bucket, allowance_per_s: float, *, epoch: int = 1) -> None:
    """Set the allowance for 6 s, which must be accepted."""
    done = await bucket.publish(allowance_per_s=allowance_per_s, ttl_s=6, epoch=epoch)
    assert done.accepted


async def take(bucket: Bucket, want: int = 10**6) -> int:
    """Take permits, as many as there are or as wanted, and say how many came."""
    return (await bucket.take(want)).granted
