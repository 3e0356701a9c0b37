"""An operation, declared once: path, scope, what it takes, what it answers, how it refuses.

By its declaration a request is let through and read; the OpenAPI document is written from the same
declarations. Nothing under /v1 is served without one.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, TypeAlias, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel

from expiry.api import auth, body
from expiry.errors import ExpiryError
from expiry.keys import Principal
from expiry.wire.problems import ForbiddenError
from expiry.wire.queries import NoQuery, Query

M = TypeVar("M", bound=BaseModel)
Method: TypeAlias = Literal["GET", "PUT", "POST", "DELETE"]


@dataclass(frozen=True, slots=True)
class Call:
    """One request that was let through and read."""

    request: web.Request
    principal: Principal
    asked: BaseModel  # the body or the query
    key: str | None = None  # the Idempotency-Key

    @property
    def app(self) -> web.Application:
        """The application, for what handlers share."""
        return self.request.app

    @property
    def tenant_id(self) -> str:
        """The caller's tenant. Raises ForbiddenError for a platform key: it has none."""
        if self.principal.tenant_id is None:
            raise ForbiddenError("A platform key has no tenant; use a key of the tenant.")
        return self.principal.tenant_id

    @property
    def by(self) -> str:
        """The caller's name for the record: `ended_by`, events, who paused a loop."""
        return f"api:{self.principal.key_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of the API; its handler's docstring describes it to the public."""

    method: Method
    path: str
    tag: str
    scope: auth.Scope
    takes: type[BaseModel]  # a Query for GET and DELETE, otherwise the body
    answers: type[BaseModel] | None
    status: HTTPStatus
    key_required: bool  # an Idempotency-Key; every POST takes one
    conditional: bool  # If-Match
    refuses: tuple[type[ExpiryError], ...]  # beside what any operation may refuse
    work: Callable[[Call, Any], Awaitable[web.Response]]

    @property
    def takes_key(self) -> bool:
        """Whether it takes an Idempotency-Key."""
        return self.method == "POST"

    async def handle(self, request: web.Request) -> web.Response:
        """Let the request through, read it, and do the work."""
        principal = await auth.authorize(request, self.scope)
        if issubclass(self.takes, Query):
            query = body.read_query(request, self.takes)
            return await self.work(Call(request, principal, query), query)
        body.read_query(request, NoQuery)
        key = body.idempotency_key(request, required=self.key_required) if self.takes_key else None
        asked = await body.read(request, self.takes)
        return await self.work(Call(request, principal, asked, key), asked)


class Operations:
    """The operations of one resource of the API."""

    def __init__(self, tag: str) -> None:
        """Begin without any; the tag groups them in the document."""
        self.tag = tag
        self._declared: list[Operation] = []

    def __iter__(self) -> Iterator[Operation]:
        """Answer them in the order of their declaration."""
        return iter(self._declared)

    def add(  # noqa: PLR0913 - what an operation is, all by name
        self,
        method: Method,
        path: str,
        *,
        scope: auth.Scope,
        takes: type[M],
        answers: type[BaseModel] | None,
        status: HTTPStatus = HTTPStatus.OK,
        key_required: bool = False,
        conditional: bool = False,
        refuses: tuple[type[ExpiryError], ...] = (),
    ) -> Callable[[Callable[[Call, M], Awaitable[web.Response]]], Handler]:
        """Declare an operation; it decorates the function that does the work."""

        def declare(work: Callable[[Call, M], Awaitable[web.Response]]) -> Handler:
            operation = Operation(
                method=method,
                path=path,
                tag=self.tag,
                scope=scope,
                takes=takes,
                answers=answers,
                status=status,
                key_required=key_required,
                conditional=conditional,
                refuses=refuses,
                work=work,
            )
            self._declared.append(operation)
            return operation.handle

        return declare


def routes(operations: Iterable[Operation]) -> list[web.RouteDef]:
    """Answer the routes of these operations."""
    return [_route(o) for o in operations]


# What can be no name is at no path of ours; so /v1/holds/batch is not taken for a hold, and no NUL gets further.
_NAMES = {
    "holds/{id}": "holds/{id:[0-9a-fA-F-]{36}}",
    "keys/{id}": "keys/{id:[0-9a-f]{16}}",
    "{name}": "{name:[a-z]+}",
}


def _route(operation: Operation) -> web.RouteDef:
    path = operation.path
    for plain, pattern in _NAMES.items():
        path = path.replace(plain, pattern)
    if operation.method == "GET":  # and HEAD
        return web.get(path, operation.handle)
    return web.route(operation.method, path, operation.handle)


_ENCODE = json.JSONEncoder(ensure_ascii=False).encode


def answer(
    document: Mapping[str, Any], *, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Answer a document as JSON."""
    return web.Response(
        status=status,
        body=_ENCODE(document).encode(),
        headers={"Content-Type": "application/json", **(headers or {})},
    )


def nothing() -> web.Response:
    """Answer that it is done, and nothing else."""
    return web.Response(status=HTTPStatus.NO_CONTENT)
