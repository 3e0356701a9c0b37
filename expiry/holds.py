"""The hold and its verbs: place, renew, confirm, release, return, get.

Each takes the caller's own connection, so that it happens in the caller's transaction, and is one
statement: it either did what it says or raised and left nothing behind. The functions it calls are in
schema.sql. Wake-ups are enqueued after the commit (`expiry.wakeups`); without that the sweep finds the
hold all the same.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
from asyncpg.pool import PoolConnectionProxy
from prometheus_client import Counter

from expiry import errors
from expiry.wanted import Item, Seconds, Wanted, micros, one_deadline, request_of

Conn: TypeAlias = "asyncpg.Connection[Any] | PoolConnectionProxy[Any]"

PLACED = Counter("expiry_holds_placed", "Holds placed.")
ENDED = Counter("expiry_holds_ended", "Holds that left `held`, or came back.", ["state"])
RENEWED = Counter("expiry_holds_renewed", "Renewals.")
RECLAIMED = Counter("expiry_holds_reclaimed", "Overdue holds ended by a place that needed their units.")
for _state in ("confirmed", "released", "expired", "returned"):
    ENDED.labels(_state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A hold as its row said it was at `read_at`, on the database's clock."""

    id: UUID
    tenant_id: str
    state: str
    generation: int
    items: tuple[Item, ...]
    holder: str | None
    external_ref: str | None
    metadata: dict[str, Any] | None
    placed_at: datetime
    expires_at: datetime
    read_at: datetime = field(compare=False)
    reclaimed: int = field(default=0, compare=False)  # overdue holds that placing this one ended
    ended_at: datetime | None = None
    ended_by: str | None = None
    returned_at: datetime | None = None
    max_renewals: int | None = None
    lifetime_ends_at: datetime | None = None

    @property
    def renewals(self) -> int:
        """How often the hold was renewed."""
        return self.generation - 1

    @property
    def shown_state(self) -> str:
        """The state for everyone outside: past the deadline nothing is held, whether or not expiry ran."""
        return "expired" if self.state == "held" and self.expires_at <= self.read_at else self.state


@dataclass(frozen=True, slots=True)
class Placement:
    """What `place_many` did: the holds in order, or those of the first request with this key."""

    holds: list[Hold]
    replayed: bool = False
    reclaimed: int = 0  # overdue holds that were ended on the way; debt for the governor


async def place(  # noqa: PLR0913 - a hold has that many properties, all by name
    conn: Conn,
    *,
    tenant_id: str,
    items: Sequence[Item],
    ttl_s: Seconds | None = None,
    expires_at: datetime | None = None,
    holder: str | None = None,
    external_ref: str | None = None,
    metadata: dict[str, Any] | None = None,
    max_renewals: int | None = None,
    max_lifetime_s: Seconds | None = None,
    replaces: UUID | None = None,
    by: str = "python",
    idempotency_key: str | None = None,
) -> Hold:
    """Hold the items until `ttl_s` from now (1 s to a year) or `expires_at`, all or none.

    Overdue holds that stand in the way are expired first. A repeat with the same key answers the first
    hold. Raises InsufficientCapacityError (facts: available, resource_id), BusyError (come again),
    OutOfRangeError, KeyInProgressError, KeyReusedError, HoldNotFoundError or AlreadyEndedError (of
    `replaces`).
    """
    wanted = Wanted(
        items=items,
        ttl_s=ttl_s,
        expires_at=expires_at,
        holder=holder,
        external_ref=external_ref,
        metadata=metadata,
        max_renewals=max_renewals,
        max_lifetime_s=max_lifetime_s,
        replaces=replaces,
    )
    placement = await place_many(conn, [wanted], tenant_id=tenant_id, by=by, key=idempotency_key)
    return placement.holds[0]


PLACE = "SELECT outcome, detail::text FROM expiry_place($1, $2::text::jsonb, $3, $4, $5, $6)"


async def place_many(
    conn: Conn,
    wanted: Sequence[Wanted],
    *,
    tenant_id: str,
    by: str = "python",
    route: str = "place",
    key: str | None = None,
    body_hash: bytes | None = None,
) -> Placement:
    """Place several holds in one statement, all or none, without deadlocks among such calls.

    `key` is an idempotency key, `body_hash` what tells two requests with it apart (left out: what is wanted).
    Raises as `place` does; of several holds the fact `index` says which one was refused.
    """
    if not wanted:
        return Placement([])
    requests = []
    for index, one in enumerate(wanted):
        try:
            requests.append(request_of(one))
        except errors.OutOfRangeError as error:
            if len(wanted) > 1:
                error.facts["index"] = index
            raise
    replaced = [w.replaces for w in wanted if w.replaces is not None]
    if len(set(replaced)) < len(replaced):
        raise errors.OutOfRangeError("two holds replace the same one: each hold is replaced once")
    if key is not None and body_hash is None:
        body_hash = fingerprint(requests)
    row = await _fetch(conn, PLACE, tenant_id, json.dumps(requests), by, route, key, body_hash)
    outcome, detail = row["outcome"], json.loads(row["detail"])
    if outcome not in ("placed", "replayed"):
        refused = detail.pop("id", None)
        if len(wanted) > 1:
            detail["index"] = _index(outcome, detail, refused, wanted)
        raise _refusal(outcome, detail)
    placed_at, read_at = (datetime.fromisoformat(detail[at]).astimezone(UTC) for at in ("placed_at", "now"))
    ids = [UUID(i) for i in detail["ids"]] if outcome == "replayed" else [w.id for w in wanted]
    holds = [placed(w, i, tenant_id, placed_at, read_at) for w, i in zip(wanted, ids, strict=True)]
    if outcome == "replayed":
        return Placement(holds, replayed=True)
    holds[0] = replace(holds[0], reclaimed=detail["reclaimed"])
    PLACED.inc(len(holds))
    RECLAIMED.inc(detail["reclaimed"])
    ENDED.labels("expired").inc(detail["reclaimed"])
    return Placement(holds, reclaimed=detail["reclaimed"])


_SORTED = json.JSONEncoder(sort_keys=True).encode


def fingerprint(requests: Sequence[dict[str, Any]]) -> bytes:
    """Tell requests apart by what they want, however it was written."""
    text = _SORTED([r | {"id": None} for r in requests])
    return hashlib.sha256(text.encode()).digest()


def _index(outcome: str, detail: dict[str, Any], refused: str | None, wanted: Sequence[Wanted]) -> int | None:
    """Say which of several holds was refused; for a resource, the first that takes more than there is."""
    if outcome != "insufficient_capacity":
        return next((i for i, w in enumerate(wanted) if str(w.id) == refused), None)
    left = detail["available"]
    for index, one in enumerate(wanted):
        left -= sum(i.quantity for i in one.items if i.resource_id == detail["resource_id"])
        if left < 0:
            return index
    return None


def columns(prefix: str) -> str:
    """Answer the columns of a SELECT that `from_row` reads, each with the prefix."""
    names = (
        "id tenant_id state generation resource_ids quantities holder external_ref metadata::text "
        "placed_at expires_at ended_at ended_by returned_at max_renewals lifetime_ends_at"
    )
    return "clock_timestamp() AS read_at, " + ", ".join(prefix + name for name in names.split())


_FIELDS = columns("(f.hold).")

RENEW = f"SELECT f.outcome, {_FIELDS} FROM expiry_renew($1, $2, $3, $4, $5, $6) f"


async def renew(
    conn: Conn,
    hold_id: UUID,
    *,
    tenant_id: str,
    ttl_s: Seconds | None = None,
    expires_at: datetime | None = None,
    generation: int | None = None,
    by: str = "python",
) -> Hold:
    """Move the deadline to `ttl_s` from now or to `expires_at`; every older wake-up becomes a no-op.

    Raises HoldNotFoundError, HoldExpiredError, AlreadyEndedError, GenerationMismatchError (when
    `generation` is given and not the current one), LimitReachedError, OutOfRangeError, BusyError.
    """
    ttl_us = one_deadline(ttl_s, expires_at)
    row = await _fetch(conn, RENEW, tenant_id, hold_id, generation, ttl_us, expires_at, by)
    if row["outcome"] != "renewed":
        raise _refusal(row["outcome"], {}, row)
    RENEWED.inc()
    return from_row(row)


async def confirm(
    conn: Conn, hold_id: UUID, *, tenant_id: str, generation: int | None = None, by: str = "python"
) -> Hold:
    """Keep the units for good. Repeating it answers the same hold and has no new effect.

    Raises HoldNotFoundError, HoldExpiredError, AlreadyEndedError, GenerationMismatchError, BusyError.
    """
    return await _finish(conn, "confirm", hold_id, tenant_id, generation, by, None)


async def release(
    conn: Conn,
    hold_id: UUID,
    *,
    tenant_id: str,
    generation: int | None = None,
    by: str = "python",
    reason: str | None = None,
) -> Hold:
    """Give the units back before the deadline. Repeating it has no new effect.

    Raises HoldNotFoundError, AlreadyEndedError (an expired hold too), GenerationMismatchError, BusyError.
    """
    return await _finish(conn, "release", hold_id, tenant_id, generation, by, reason)


async def return_(
    conn: Conn,
    hold_id: UUID,
    *,
    tenant_id: str,
    generation: int | None = None,
    by: str = "python",
    reason: str | None = None,
) -> Hold:
    """Give a confirmed hold's units back (refund, cancelled order). Repeating it has no new effect.

    Raises HoldNotFoundError, NotConfirmedError, AlreadyEndedError, GenerationMismatchError, BusyError.
    """
    return await _finish(conn, "return", hold_id, tenant_id, generation, by, reason)


GET = f"SELECT {columns('h.')} FROM holds h WHERE h.id = $1 AND h.tenant_id = $2"


async def get(conn: Conn, hold_id: UUID, *, tenant_id: str) -> Hold:
    """Answer the hold. Raises HoldNotFoundError, for another tenant's hold too."""
    row = await conn.fetchrow(GET, hold_id, tenant_id)
    if row is None:
        raise errors.HoldNotFoundError(hold_id=str(hold_id))
    return from_row(row)


FINISH = f"SELECT f.outcome, {_FIELDS} FROM expiry_finish($1, $2, $3, $4, $5, $6) f"


async def _finish(
    conn: Conn,
    verb: str,
    hold_id: UUID,
    tenant_id: str,
    generation: int | None,
    by: str,
    reason: str | None,
) -> Hold:
    row = await _fetch(conn, FINISH, tenant_id, hold_id, verb, generation, by, reason)
    outcome = row["outcome"]
    if outcome not in ("done", "repeated"):
        # An expired hold cannot be released or returned: it has ended in another way.
        gone = "ended" if outcome == "expired" and verb != "confirm" else outcome
        raise _refusal(gone, {}, row)
    if outcome == "done":
        ENDED.labels(row["state"]).inc()
    return from_row(row)


async def _fetch(conn: Conn, statement: str, *args: object) -> asyncpg.Record:
    """Run a verb; what other transactions cause is BusyError, so that every caller may come again."""
    try:
        row: asyncpg.Record | None = await conn.fetchrow(statement, *args)
    except (
        asyncpg.LockNotAvailableError,
        asyncpg.DeadlockDetectedError,
        asyncpg.SerializationError,
        asyncpg.QueryCanceledError,
    ) as error:
        raise errors.BusyError from error
    assert row is not None  # noqa: S101 - the functions answer one row
    return row


def placed(wanted: Wanted, hold_id: UUID, tenant_id: str, placed_at: datetime, read_at: datetime) -> Hold:
    """Answer the hold as it was placed: the request and the database's clock say all of it."""
    lifetime = wanted.max_lifetime_s
    expires_at = wanted.expires_at
    if wanted.ttl_s is not None:
        expires_at = placed_at + timedelta(microseconds=micros(wanted.ttl_s, "ttl_s"))
    assert expires_at is not None  # noqa: S101 - _one_deadline saw to it
    return Hold(
        id=hold_id,
        tenant_id=tenant_id,
        state="held",
        generation=1,
        items=tuple(wanted.items),
        holder=wanted.holder,
        external_ref=wanted.external_ref,
        metadata=wanted.metadata,
        placed_at=placed_at,
        expires_at=expires_at,
        read_at=read_at,
        max_renewals=wanted.max_renewals,
        lifetime_ends_at=None
        if lifetime is None
        else placed_at + timedelta(microseconds=micros(lifetime, "max_lifetime_s")),
    )


def from_row(row: asyncpg.Record) -> Hold:
    """Build a hold of a row with `columns`."""
    values = dict(row)
    values.pop("outcome", None)
    items = zip(values.pop("resource_ids"), values.pop("quantities"), strict=True)
    metadata = values.pop("metadata")
    return Hold(
        items=tuple(Item(r, q) for r, q in items),
        metadata=None if metadata is None else json.loads(metadata),
        **values,
    )


_REFUSALS: dict[str, type[errors.ExpiryError]] = {
    "key_in_progress": errors.KeyInProgressError,
    "key_reused": errors.KeyReusedError,
    "out_of_range": errors.OutOfRangeError,
    "insufficient_capacity": errors.InsufficientCapacityError,
    "busy": errors.BusyError,
    "replaced_missing": errors.HoldNotFoundError,
    "replaced_ended": errors.AlreadyEndedError,
    "missing": errors.HoldNotFoundError,
    "generation": errors.GenerationMismatchError,
    "expired": errors.HoldExpiredError,
    "ended": errors.AlreadyEndedError,
    "not_confirmed": errors.NotConfirmedError,
    "limit": errors.LimitReachedError,
}


def _refusal(outcome: str, facts: dict[str, Any], row: asyncpg.Record | None = None) -> errors.ExpiryError:
    """Turn a function's outcome into its error, with the facts that the API passes on."""
    message = None
    if outcome == "out_of_range":
        message = (
            "the deadline is at least 1 second and at most a year ahead of the database's clock, "
            "and not past the lifetime"
        )
    elif outcome == "insufficient_capacity":
        message = (
            f"The resource {facts['resource_id']!r} has too few units left: {facts['available']} available."
        )
    if row is not None and row["id"] is not None:
        expired = row["state"] in ("held", "expired") and outcome in ("expired", "ended")
        facts = {
            "hold_id": str(row["id"]),
            "current_state": "expired" if expired else row["state"],
            "current_generation": row["generation"],
        } | ({"expired_at": row["expires_at"], "server_time": row["read_at"]} if expired else {})
    return _REFUSALS[outcome](message, **facts)
