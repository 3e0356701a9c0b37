"""Loaded by schemathesis: makes what it draws say what JSON Schema cannot, and nothing else.

Only requests that are meant to be accepted are touched; what is meant to be refused goes as it was drawn.
"""

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import schemathesis
from hypothesis import strategies as st
from schemathesis.core.parameters import ParameterLocation

from expiry import keys
from tests.api_client import PLATFORM

LINE_BYTES_MAX = 8000  # aiohttp's limit is 8190

_numbers = itertools.count(1)
_from = datetime.now(UTC) + timedelta(hours=1)

# A well-formed deadline in the past is 422 by contract: those that are drawn lie ahead, less than a year.
schemathesis.openapi.format(
    "date-time",
    st.integers(0, 300 * 86_400).map(lambda s: (_from + timedelta(seconds=s)).isoformat(timespec="seconds")),
)


@schemathesis.hook
def filter_case(_context: Any, case: Any) -> bool:  # noqa: ANN401 - schemathesis's own
    """Leave out request lines that no HTTP parser of ours reads: they are refused before the API sees them."""
    return len(quote(str(case.query or ""))) < LINE_BYTES_MAX


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:  # noqa: ANN401 - schemathesis's own
    """Fit the parts that were drawn to be accepted."""
    if case.meta is None:
        return
    if (case.path_parameters or {}).get("id") == keys.key_id(PLATFORM):
        case.path_parameters["id"] = (
            "0" * 16
        )  # a run that revokes its own key sees nothing but 401 from then on
    meant = {place for place in ParameterLocation if not case.meta.is_negative_at(place)}
    if ParameterLocation.HEADER in meant and case.headers:
        _fit_headers(case.headers)
    if ParameterLocation.QUERY in meant and case.query:
        # No schema tells a cursor that this API gave for these filters.
        case.query = {k: v for k, v in case.query.items() if k not in ("cursor", "after")}
    if ParameterLocation.BODY in meant and isinstance(case.body, dict):
        case.body = _fitted(case.body)
        if ParameterLocation.HEADER in meant and case.body.get("generation") is not None:  # may not differ
            case.headers = {k: v for k, v in (case.headers or {}).items() if k != "If-Match"}


def _fit_headers(headers: Any) -> None:  # noqa: ANN401 - schemathesis's own mapping
    if "Idempotency-Key" in headers:  # a key goes with one request: with another body it is 422 by contract
        headers["Idempotency-Key"] = f"{headers['Idempotency-Key'][:200]}{next(_numbers):08}"
    if headers.get("If-Match", "*")[-1:] not in ("*", '"'):
        headers["If-Match"] = "*"  # beside a body, schemathesis 4.32 takes "0" for good whatever the pattern


def _fitted(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, float) and value.is_integer():
        return int(value)  # to JSON Schema 1.0 is an integer; this API reads what is written
    if isinstance(value, str):
        return value.replace("\0", "")  # in metadata, where no pattern reaches every string
    if isinstance(value, list):
        return [_fitted(one) for one in value]
    return _fitted_object(value) if isinstance(value, dict) else value


def _fitted_object(value: dict[str, Any]) -> dict[str, Any]:
    fitted = {name.replace("\0", ""): _fitted(inner) for name, inner in value.items()}
    if isinstance(fitted.get("expires_at"), str):  # taken from an earlier answer, it may have passed
        fitted["expires_at"] = max(fitted["expires_at"], _from.isoformat(), key=datetime.fromisoformat)
    for name in {"ttl_s", "max_lifetime_s"} & fitted.keys():
        if isinstance(fitted[name], float):  # 1.1 is no multiple of 0.000001 in binary
            fitted[name] = round(fitted[name], 6)
    ttl_s, lifetime_s = fitted.get("ttl_s"), fitted.get("max_lifetime_s")
    if lifetime_s is not None and (ttl_s is None or ttl_s > lifetime_s):
        fitted["max_lifetime_s"] = 31_536_000  # a deadline past the lifetime is refused
    if isinstance(fitted.get("items"), list):  # no resource twice
        fitted["items"] = list({one["resource_id"]: one for one in fitted["items"]}.values())
    return fitted
