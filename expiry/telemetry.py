"""Logs and metrics: one canonical line per batch, bounded labels, no secret in either.

Metrics are declared in the module that moves them; this one sets up the log and what several share.
"""

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Literal

import structlog
from prometheus_client import Counter, Gauge

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

_PASSWORD_IN_URL = re.compile(r"(\w+://[^\s:/@]*):[^\s@/]*@")


def mask(text: str) -> str:
    """Answer the text with the passwords of its URLs replaced by ***."""
    return _PASSWORD_IN_URL.sub(r"\1:***@", text)


def _mask_values(
    _logger: Any,  # noqa: ANN401 - structlog's type
    _method: str,
    event: MutableMapping[str, Any],
) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = mask(value)
    return event


def set_up_logging(form: Literal["auto", "json", "console"] = "auto", level: str = "info") -> None:
    """Write events to stderr: JSON unless it is a terminal. Standard library logs join them."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _mask_values,
    ]
    final: list[Any] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if console
        else [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    )
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
    root.setLevel(logging.WARNING)  # arq and aiohttp log each job and request at INFO
