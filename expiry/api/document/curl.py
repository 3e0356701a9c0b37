"""Operations as commands: curl lines that work when pasted beside `expiry dev --api-key demo`, as they stand."""

import json
import shlex
from typing import Any
from urllib.parse import quote, urlencode

BASE_URL = "http://127.0.0.1:8080"
KEY = "demo"
DATA_DIR = "expiry-data"
LINE_CHARS_MAX = 100

_JSON = "-H 'Content-Type: application/json'"
_KEPT_ID = r"""| sed 's/.*"id": "\([^"]*\)".*/\1/')"""
_PLATFORM_KEY = rf"""PLATFORM_KEY=$(sed -n 's/.*"platform_key": "\([^"]*\)".*/\1/p' {DATA_DIR}/dev.json)"""
_HOLD = (
    "HOLD=$(curl -s",
    f'"{BASE_URL}/v1/holds"',
    f"-H 'Authorization: Bearer {KEY}'",
    _JSON,
    '-H "Idempotency-Key: order-$RANDOM$RANDOM"',
    """-d '{"resource_id": "table-4", "ttl_s": 900}'""",
    _KEPT_ID,
)
# What must be there first, by a part of the path: each command makes its own.
_FIRST = {
    "/holds/{id}": _HOLD,
    "/holds/release-batch": _HOLD,
    "/holds/{id}/return": (
        "curl -s -o /dev/null -X POST",
        f'"{BASE_URL}/v1/holds/$HOLD/confirm"',
        f"-H 'Authorization: Bearer {KEY}'",
    ),
    "/keys/{id}": (
        "KEY_ID=$(curl -s",
        f'"{BASE_URL}/v1/keys"',
        '-H "Authorization: Bearer $PLATFORM_KEY"',
        _JSON,
        """-d '{"tenant_id": "shop"}'""",
        _KEPT_ID,
    ),
}
_VARIABLES = {"/holds/{id}": "$HOLD", "/keys/{id}": "$KEY_ID"}


def command(method: str, path: str, operation: dict[str, Any]) -> str:
    """Write the operation with the examples of its parameters and body."""
    lines = []
    if operation.get("x-scope") == "platform":
        lines.append(_PLATFORM_KEY)
    if (method, path) == ("GET", "/v1/resources/{resource_id}"):
        body = """-d '{"capacity": 100}'"""
        lines.append(
            _joined(["curl -s -o /dev/null -X PUT", _url(path, operation), *_auth(operation), _JSON, body])
        )
    lines += [_joined(words) for part, words in _FIRST.items() if part in path]
    return "\n".join([*lines, _joined(_words(method, path, operation))])


def _words(method: str, path: str, operation: dict[str, Any]) -> list[str]:
    words = ["curl -i" if method in ("GET", "POST") else f"curl -i -X {method}"]
    media = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if method == "POST" and not (media and media["example"]):
        words[0] += " -X POST"
    words += [_url(path, operation), *_auth(operation)]
    if any(p["name"] == "Idempotency-Key" and p["required"] for p in operation.get("parameters", ())):
        words.append('-H "Idempotency-Key: order-$RANDOM$RANDOM"')
    if media and media["example"]:
        text = shlex.quote(json.dumps(media["example"], ensure_ascii=False))
        for id_ in media["example"].get("ids", ()):  # the hold that was placed first
            text = text.replace(id_, "'$HOLD'")
        words += [_JSON, f"-d {text}"]
    return words


def _auth(operation: dict[str, Any]) -> list[str]:
    scope = operation.get("x-scope")
    if scope is None:
        return []
    return [
        '-H "Authorization: Bearer $PLATFORM_KEY"'
        if scope == "platform"
        else f"-H 'Authorization: Bearer {KEY}'"
    ]


def _url(path: str, operation: dict[str, Any]) -> str:
    query = {}
    for parameter in operation.get("parameters", ()):
        if "example" not in parameter:
            continue
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", quote(parameter["example"], safe=""))
        elif parameter["in"] == "query":
            query[parameter["name"]] = parameter["example"]
    for part, variable in _VARIABLES.items():
        path = path.replace(part, part.replace("{id}", variable))
    url = BASE_URL + path + (f"?{urlencode(query)}" if query else "")
    return f'"{url}"'  # for ?, for $HOLD, and for the brackets of an IPv6 address


def _joined(words: list[str] | tuple[str, ...]) -> str:
    """Break a long command where a shell reads on."""
    line = " ".join(words)
    return line if len(line) <= LINE_CHARS_MAX else " \\\n  ".join([" ".join(words[:2]), *words[2:]])
