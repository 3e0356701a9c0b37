"""GET /docs: the guide and every operation on one page, made from the OpenAPI document; it loads nothing."""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from aiohttp import web

from expiry.api.document.curl import BASE_URL, command
from expiry.api.document.python import CALLS
from expiry.api.document.vocabulary import ANYWHERE
from expiry.wire.problems import NotPlacedError, status_of

Json = dict[str, Any]

_PACKAGE = files("expiry.api.document")
# A name or an address, and a port: nothing that means anything to a shell or in HTML.
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[\w.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?", re.ASCII)
_BOUNDS = {"minimum": "≥ {:,}", "maximum": "≤ {:,}", "minItems": "{:,} or more", "maxItems": "at most {:,}"}


def route(document: Json) -> web.RouteDef:
    """Answer the route of the page, which is made once; its commands ask whichever host the page was asked of."""
    style, script = _asset("docs.css"), _asset("docs.js")
    text = page(document, style=style, script=script)
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-store",  # for another it may say another host
        "Content-Security-Policy": f"default-src 'none'; style-src '{_hash(style)}'; "
        f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    async def docs(request: web.Request) -> web.Response:
        return web.Response(body=text.replace(BASE_URL, base_url(request.headers)).encode(), headers=headers)

    return web.get("/docs", docs)


def base_url(headers: Mapping[str, str]) -> str:
    """Answer where the request was sent, as far as its head says so in a form that can be shown."""
    host = headers.get("Host", "")
    if not _HOST.fullmatch(host):
        return BASE_URL
    # Whoever forges this is shown https, and nobody else: a key never goes unencrypted because of it.
    scheme = "https" if headers.get("X-Forwarded-Proto", "").lower() == "https" else "http"
    return f"{scheme}://{host}"


def page(document: Json, *, style: str, script: str) -> str:
    """Answer the page; style and script stand in it, whole."""
    by_tag = {tag["name"]: _operations(document, tag["name"]) for tag in document["tags"]}
    parts = {
        "style": style,
        "script": script,
        "version": escape(document["info"]["version"]),
        "nav": "".join(_links(tag, operations) for tag, operations in by_tag.items()),
        "calls": _calls(document),
        "errors": _errors(document),
        "operations": "".join(
            _group(tag["name"], tag["description"], by_tag[tag["name"]], document) for tag in document["tags"]
        ),
    }
    return re.sub(r"<!-- ([a-z]+) -->", lambda found: parts[found[1]], _asset("docs.html"))


def _asset(name: str) -> str:
    return (_PACKAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _operations(document: Json, tag: str) -> list[tuple[str, str, Json]]:
    return [
        (method.upper(), path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if tag in operation["tags"]
    ]


def _links(tag: str, operations: Iterable[tuple[str, str, Json]]) -> str:
    links = "".join(
        f'<li><a href="#{o["operationId"]}">{_badge(method)} {_path(path.removeprefix("/v1"))}</a>'
        for method, path, o in operations
    )
    return f"<h2>{escape(tag.capitalize())}</h2><ul>{links}</ul>"


def _group(name: str, text: str, operations: Iterable[tuple[str, str, Json]], document: Json) -> str:
    sections = "".join(_operation(method, path, o, document) for method, path, o in operations)
    return f'<h2 id="{name}">{escape(name.capitalize())}</h2><p>{_prose(text)}</p>{sections}'


def _operation(method: str, path: str, operation: Json, document: Json) -> str:
    scope = operation.get("x-scope")
    needs = f"scope <b>{scope}</b>" if scope else "no key"
    paragraphs = operation.get("description", "").split("\n\n")
    text = [p for p in paragraphs if p and not p.startswith("Needs a key")]
    return "".join(
        [
            f'<section class="operation" id="{operation["operationId"]}">',
            f"<h3>{_badge(method)} <code>{_path(path)}</code>",
            f'<span class="needs">{needs}</span></h3>',
            f"<p><b>{_prose(operation['summary'])}</b></p>",
            *(f"<p>{_prose(p)}</p>" for p in text),
            _parameters(operation),
            _body(operation, document),
            f"<h4>Request</h4>{_code(command(method, path, operation), 'shell')}",
            _call(operation),
            _answer(operation, document),
            _refusals(operation, document),
            "</section>",
        ]
    )


def _call(operation: Json) -> str:
    """Say what the request is from Python; paths that need no key are not for the client."""
    call = CALLS.get(operation["operationId"])
    return "" if call is None else f'<p>From <a href="#python">Python</a>: <code>{escape(call)}</code></p>'


def _calls(document: Json) -> str:
    """List the client's methods beside the operations."""
    rows = [
        (
            f'{_badge(method.upper())} <a href="#{o["operationId"]}"><code>{_path(path)}</code></a>',
            f"<code>{escape(CALLS[o['operationId']])}</code>",
        )
        for path, item in document["paths"].items()
        for method, o in item.items()
        if o["operationId"] in CALLS
    ]
    return _table(("operation", "with a client"), rows)


def _parameters(operation: Json) -> str:
    rows = [
        (
            f"<code>{escape(p['name'])}</code><small>{p['in']}{', required' if p['required'] else ''}</small>",
            _kind(p["schema"], {}) + _default(p["schema"]),
            _prose(p["description"]),
        )
        for p in operation.get("parameters", ())
    ]
    return _titled("Parameters", ("name", "type, range", "meaning"), rows)


def _body(operation: Json, document: Json) -> str:
    if "requestBody" not in operation:
        return ""
    schema = _resolved(operation["requestBody"]["content"]["application/json"]["schema"], document)
    needed = _needed(schema)
    rows = [
        (
            f"<code>{escape(name)}</code>{needed.get(name, '')}",
            _kind(field, document) + _default(field),
            _prose(field.get("description", "")),
        )
        for name, field in schema["properties"].items()
    ]
    title = "Body" if operation["requestBody"]["required"] else "Body, may be left out"
    return _titled(title, ("field", "type, range", "meaning"), rows)


def _needed(schema: Json) -> dict[str, str]:
    """Say of each field that must be there so, or which other may be in its place."""
    needed = dict.fromkeys(schema.get("required", ()), "<small>required</small>")
    for rule in schema.get("allOf", ()):
        if "oneOf" in rule:
            first, second = (branch["required"][0] for branch in rule["oneOf"])
            needed |= {first: f"<small>or {second}</small>", second: f"<small>or {first}</small>"}
    return needed


def _answer(operation: Json, document: Json) -> str:
    status, done = next((s, r) for s, r in operation["responses"].items() if s.startswith("2"))
    title = f"<h4>Answer <span>{status} {escape(done['description'])}</span></h4>"
    rows = [
        (f"<code>{escape(name)}</code>", _prose(header["description"]))
        for name, header in done.get("headers", {}).items()
    ]
    media = done.get("content", {}).get("application/json", {})
    example = _code(json.dumps(media["example"], indent=2, ensure_ascii=False)) if "example" in media else ""
    return title + (_table(("header", "meaning"), rows) if rows else "") + example + _fields(media, document)


def _fields(media: Json, document: Json) -> str:
    """Describe the members of an answer that the example does not explain."""
    if "example" not in media:
        return ""
    schema = _resolved(media["schema"], document)
    rows = [
        (f"<code>{escape(name)}</code>", _kind(field, document), _prose(field.get("description", "")))
        for name, field in schema["properties"].items()
    ]
    table = _table(("field", "type", "meaning"), rows)
    return f"<details><summary>Fields of the answer</summary>{table}</details>"


def _refusals(operation: Json, document: Json) -> str:
    rows = [
        (f"<b>{status}</b>", f'<a href="#errors"><code>{code}</code></a>', _prose(text))
        for status, response in operation["responses"].items()
        for code, text in _resolved(response, document).get("x-codes", {}).items()
    ]
    if not rows:
        return ""
    table = _table(("status", "code", "meaning"), rows)
    return f"<details><summary>{len(rows)} refusals</summary>{table}</details>"


def _errors(document: Json) -> str:
    responses = document["components"]["responses"].items()
    found = {(name.partition(".")[0], c): text for name, r in responses for c, text in r["x-codes"].items()}
    in_batches = str(status_of(NotPlacedError)[0].value)
    found[in_batches, NotPlacedError.code] = f"{NotPlacedError.__doc__} (Only as a result within a batch.)"
    found |= {(str(status.value), code): text for code, (status, text) in ANYWHERE.items()}
    rows = [
        (f"<b>{status}</b>", f"<code>{code}</code>", _prose(text))
        for (status, code), text in sorted(found.items())
    ]
    return _table(("status", "code", "meaning, and what to do"), rows)


def _kind(schema: Json, document: Json) -> str:
    """Say type and range in few words."""
    schema = _resolved(schema, document)
    options = [o for o in schema.get("anyOf", ()) if o.get("type") != "null"]
    if options:
        nullable = " or null" if len(options) < len(schema["anyOf"]) else ""
        return " or ".join(_kind(o, document) for o in options) + nullable
    if "enum" in schema or "const" in schema:
        return " · ".join(f"<code>{escape(str(v))}</code>" for v in schema.get("enum", [schema.get("const")]))
    kind: str = schema.get("format") or schema.get("type", "any")
    if kind == "array":
        kind = f"list of {_kind(schema['items'], document)}"
    elif schema.get("properties"):
        kind = f"object ({', '.join(f'<code>{escape(name)}</code>' for name in schema['properties'])})"
    return ", ".join([kind, *_range(schema)])


def _range(schema: Json) -> list[str]:
    if "maxLength" in schema:
        return [f"{schema.get('minLength', 0)} to {schema['maxLength']:,} characters"]
    if {"minimum", "maximum"} <= schema.keys():
        return [f"{schema['minimum']:,} to {schema['maximum']:,}"]
    return [text.format(schema[name]) for name, text in _BOUNDS.items() if name in schema]


def _default(schema: Json) -> str:
    if schema.get("default") is None:
        return ""
    return f"<small>default <code>{escape(json.dumps(schema['default']))}</code></small>"


def _resolved(schema: Json, document: Json) -> Json:
    while "$ref" in schema:
        _, *steps = schema["$ref"].split("/")
        found = document
        for step in steps:
            found = found[step]
        schema = found
    return schema


def _titled(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<h4>{title}</h4>{_table(heads, rows)}" if rows else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{h}" for h in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}' for cell in row)}" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}<tbody>{lines}</table></div>'


def _badge(method: str) -> str:
    return f'<span class="method {method.lower()}">{method}</span>'


def _path(path: str) -> str:
    return re.sub(r"(\{\w+\})", r"<i>\1</i>", escape(path).replace("/", "/<wbr>"))


def _prose(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def _code(text: str, kind: str = "json") -> str:
    return f'<pre class="{kind}" tabindex="0"><code>{escape(text, quote=False)}</code></pre>'
