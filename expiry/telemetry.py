"""Logs and metrics: one canonical line per batch, bounded labels, no secret in either.

Metrics are declared in the module that moves them; this one sets up the log and what several share.
"""

import logging
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import structlog
from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString


class BatchHistogram(Collector):
    """A histogram that takes in a whole batch: a search for each bound instead of two locks for each value."""

    def __init__(self, name: str, documentation: str, *, by: Sequence[str], buckets: Sequence[float]) -> None:
        """Register it with a label `by`, whose values are known; `buckets` are upper bounds, ascending."""
        self._name = name
        self._documentation = documentation
        self._labelnames = ("by",)  # as prometheus_client's own have them; README's table is made from it
        self._bounds = (*buckets, INF)
        self._counts = {value: [0] * len(self._bounds) for value in by}  # cumulative, as Prometheus has them
        self._sums = dict.fromkeys(by, 0.0)
        REGISTRY.register(self)

    def observe(self, by: str, values: Iterable[float]) -> None:
        """Take in these values."""
        ordered = sorted(values)
        counts = self._counts[by]
        for n, bound in enumerate(self._bounds):
            counts[n] += bisect_right(ordered, bound)
        self._sums[by] += sum(ordered)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Answer what Prometheus reads."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=["by"])
        for by, counts in self._counts.items():
            named = zip(map(floatToGoString, self._bounds), counts, strict=True)
            family.add_metric([by], [*named], self._sums[by])
        yield family


LOOP_ERRORS = Counter(
    "expiry_loop_errors", "Rounds of a loop that failed and were backed off.", ["loop", "kind"]
)
LOOP_PAUSED = Gauge("expiry_loop_paused", "1 while an operator has paused the loop.", ["loop"])
LOOP_LAST = Gauge(
    "expiry_loop_last_round_timestamp_seconds", "When the loop last finished a round.", ["loop"]
)
for _loop in ("worker", "promoter", "sweep", "prune"):
    LOOP_PAUSED.labels(_loop)
    LOOP_LAST.labels(_loop)
    for _kind in ("database", "redis", "bug"):
        LOOP_ERRORS.labels(_loop, _kind)

# To the last @, for a password may hold one, or a slash, that nobody encoded.
_PASSWORD_IN_URL = re.compile(r"(\w+://[^\s:/@]*:)\S*@|(\bpassword=)[^\s&]+")


def mask(text: str) -> str:
    """Answer the text with the passwords of its URLs replaced by ***."""
    return _PASSWORD_IN_URL.sub(lambda found: f"{found[1]}***@" if found[1] else f"{found[2]}***", text)


def _mask_line(
    _logger: Any,  # noqa: ANN401 - structlog's type
    _method: str,
    line: str,
) -> str:
    """Mask the finished line: a traceback or a nested value may hold a URL as well."""
    return mask(line)


_TRACEBACKS = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)


def set_up_logging(form: Literal["auto", "json", "console"] = "auto", level: str = "info") -> None:
    """Write events to stderr: JSON unless it is a terminal. Standard library logs join them."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks without local variables: those hold keys, passwords and metadata of holds.
    plain = structlog.dev.plain_traceback
    final: list[Any] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
        if console
        else [_TRACEBACKS, structlog.processors.JSONRenderer()]
    )
    final.append(_mask_line)
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # arq and aiohttp log each job and request at INFO.
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
