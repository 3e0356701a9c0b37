"""What a request says, read strictly: JSON without duplicates, NaN, NUL or lone surrogates; then a model."""

import asyncio
import json
import re
from decimal import Decimal
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote_to_bytes
from uuid import UUID

from aiohttp import web
from pydantic import BaseModel, ValidationError

from expiry import errors
from expiry.api.problems import CODING
from expiry.api.state import SETTINGS
from expiry.wanted import TEXT_MAX
from expiry.wire.explain import escaped, explained, wrong
from expiry.wire.problems import InvalidError, KeyMissingError, MalformedError, NotJSONError

M = TypeVar("M", bound=BaseModel)


CODINGS = ("identity", "gzip", "deflate")  # of a body; aiohttp decodes them
NO_GENERATION = 0  # they count from 1

_ENTITY_TAG = re.compile(r'(W/)?"[\x21\x23-\x7e\x80-\xff]*"')
_ETAG = re.compile(r'"g([1-9][0-9]{0,17})"')
_NO_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")
_ESCAPED = re.compile(r'\\(["\\])')


async def read(request: web.Request, model: type[M]) -> M:
    """Answer the body as the model.

    No body counts as `{}`. Raises NotJSONError, MalformedError, InvalidError, or aiohttp's 413 and 408.
    """
    document: Any = {}
    if request.can_read_body:
        _check_coding(request)
        if raw := await _raw(request):
            _check_content_type(request)
            document = parse(raw, request.app[SETTINGS].api_json_depth_max)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise InvalidError(errors=explained(error, model)) from None


async def _raw(request: web.Request) -> bytes:
    try:
        if request.content.is_eof():  # it came with the head
            return await request.read()
        async with asyncio.timeout(request.app[SETTINGS].api_body_timeout_s):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except OSError:  # what ended the connection; the answer reaches nobody, but is counted as what it is
        raise MalformedError("The body was cut: the client went away.") from None


def parse(raw: bytes, depth_max: int) -> Any:  # noqa: ANN401 - JSON
    """Read JSON; numbers with a fraction or exponent stay Decimal, so that nothing is rounded."""
    try:
        text = raw.decode()
        try:
            document = _DECODE(text)
        except _TwiceError:  # read again, for what is read first knows nothing of what it stands in
            steps = _twice(json.loads(text, object_pairs_hook=_Members, parse_float=Decimal))
            pointer = "/".join(["#", *map(escaped, steps[:depth_max])])
            raise InvalidError(errors=[wrong(pointer, "the field is there twice")]) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(f"The body is not JSON in UTF-8: {_said(error)}.") from None
    except (ValueError, ArithmeticError):  # more digits than Python reads, or an exponent beyond Decimal's
        raise InvalidError(errors=[wrong("#", "a number is out of range")]) from None
    # What looks harmless needs no closer look: it has no escapes and cannot be nested too deeply.
    if b"\\u" in raw or raw.count(b"{") + raw.count(b"[") > depth_max:
        _inspect(document, 0, depth_max)
    return document


def read_query(request: web.Request, model: type[M]) -> M:
    """Answer the query as the model. Raises MalformedError, InvalidError."""
    if not request.rel_url.raw_query_string:
        return model.model_validate({})
    given: dict[str, str] = {}
    for name, value in request.query.items():
        if name in given:
            raise InvalidError(errors=[wrong(f"?{name[:TEXT_MAX]}", "the parameter is there twice")])
        _check_text(name)
        _check_text(value)
        given[name] = value
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise InvalidError(errors=explained(error, model, "?")) from None


def header(request: web.Request, name: str) -> str | None:
    """Answer a header that says one thing. Raises MalformedError if it is there twice."""
    values = request.headers.getall(name, ())
    if len(values) > 1:  # whoever stands in between may have read the other one
        raise MalformedError(f"The header {name} is there twice.")
    return values[0] if values else None


def idempotency_key(request: web.Request, *, required: bool) -> str | None:
    """Answer the Idempotency-Key, the same whether quoted or bare. Raises KeyMissingError, MalformedError."""
    key = header(request, "Idempotency-Key")
    if key is None:
        if required:
            raise KeyMissingError
        return None
    key = key.strip()
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = _ESCAPED.sub(r"\1", key[1:-1])
    if not 1 <= len(key) <= TEXT_MAX or not key.isprintable():
        raise MalformedError(f"Idempotency-Key: 1 to {TEXT_MAX} printable characters, quoted or bare.")
    return key


def wanted_generation(request: web.Request, in_body: int | None) -> int | None:
    """Answer the generation that the change is for: If-Match or the body's. None: any.

    Raises MalformedError for an If-Match that is no ETag, InvalidError if the two differ.
    """
    etag = header(request, "If-Match")
    if etag is None or (etag := etag.strip()) == "*":
        return in_body
    if not _ENTITY_TAG.fullmatch(etag):
        raise MalformedError('If-Match: one ETag as this API gave it, like "g2".')
    match = _ETAG.fullmatch(etag)
    if match is None:  # a tag that no hold of ours has
        return NO_GENERATION
    generation = int(match[1])
    if in_body not in (None, generation):
        raise InvalidError(errors=[wrong("#/generation", "another generation than in If-Match")])
    return generation


def hold_id(request: web.Request) -> UUID:
    """Answer the id in the path. Raises HoldNotFoundError for what no hold can have."""
    try:
        return UUID(request.match_info["id"])
    except ValueError:
        raise errors.HoldNotFoundError("There is no such hold: its id is a UUID.") from None


def resource_id(request: web.Request) -> str:
    """Answer the percent-encoded id in the path. Raises MalformedError, InvalidError."""
    # From the raw path: aiohttp leaves what is not UTF-8 encoded, and so would name another resource.
    raw = request.rel_url.raw_path.rpartition("/")[2]
    if _NO_ESCAPE.search(raw):  # and would stand for itself, so that an id had two spellings
        raise MalformedError("resource_id: a percent sign is %25.")
    try:
        text = unquote_to_bytes(raw).decode()
    except UnicodeError:
        raise MalformedError("resource_id: percent-encoded UTF-8.") from None
    if "\0" in text:
        raise MalformedError("resource_id: no NUL characters.")
    if not 1 <= len(text) <= TEXT_MAX:
        raise InvalidError(f"resource_id: 1 to {TEXT_MAX} characters.")
    return text


def _check_coding(request: web.Request) -> None:
    if (header(request, "Content-Encoding") or "identity").strip().lower() not in CODINGS:
        raise NotJSONError(CODING)


def _check_content_type(request: web.Request) -> None:
    kind = request.content_type
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise NotJSONError
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise NotJSONError


class _TwiceError(Exception):
    """An object has a field twice."""


class _Members(list[tuple[str, Any]]):
    """The members of an object, however often one is there."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _TwiceError
    return found


def _twice(value: list[Any]) -> list[str]:
    """Answer the steps to the first field that is there twice; none: there is no such field."""
    seen = set()
    for name, inner in value if isinstance(value, _Members) else enumerate(value):
        if name in seen:
            return [str(name)]
        seen.add(name)
        if isinstance(inner, list) and (steps := _twice(inner)):
            return [str(name), *steps]
    return []


def _no_constant(name: str) -> NoReturn:
    raise MalformedError(f"The body is not JSON: {name} is no number of JSON.")


_DECODE = json.JSONDecoder(object_pairs_hook=_object, parse_float=Decimal, parse_constant=_no_constant).decode


def _inspect(value: object, depth: int, depth_max: int) -> None:
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, dict | list):
        if depth == depth_max:
            raise InvalidError(errors=[wrong("#", f"nested more than {depth_max} levels deep")])
        if isinstance(value, dict):
            for name in value:
                _check_text(name)
        for inner in value.values() if isinstance(value, dict) else value:
            _inspect(inner, depth + 1, depth_max)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MalformedError("A text has a lone surrogate, which is no character.") from None
    if "\0" in text:
        raise MalformedError("A text has a NUL character, which PostgreSQL cannot keep.")


def _said(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (line {error.lineno}, column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else "not UTF-8"
