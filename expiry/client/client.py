"""Every operation of the API as a method."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from datetime import datetime
from typing import Any, Literal, TypeAlias, TypedDict, Unpack
from uuid import UUID

from expiry.client import words
from expiry.client.calls import Caller, pages
from expiry.wanted import Item, Seconds, Wanted
from expiry.wire import answers, bodies, queries
from expiry.wire.answers import EventType, LoopName, State
from expiry.wire.fields import PAGE_MAX

HoldId: TypeAlias = UUID | str
Scope: TypeAlias = Literal["holds", "read", "operate", "platform"]

BATCH_S = 20.0  # the API works on one batch so long before it answers what is done
POLL_S = 1.0  # between two looks at events that were not there yet


class HoldsFilter(TypedDict, total=False):
    """Which holds, as `GET /v1/holds` has it."""

    state: State
    resource_id: str
    holder: str
    external_ref: str
    overdue: bool
    expires_before: datetime


class Client(Caller):
    """The API of one tenant, or of the platform, by the key. Use it as `async with Client(...) as client`.

    Every POST carries an Idempotency-Key, so that an attempt whose answer was lost can be repeated: what was
    done is answered again (`replayed`), and never done twice. Repeated are lost connections, timeouts, answers
    that cannot be read, 429, 503 and `key_in_progress`; at most `attempts_max` attempts of `timeout_s`, and
    `total_s_max` for all of them. Bad arguments raise InvalidError before anything is sent, refusals the error
    of their name with its facts, no answer UnavailableError; the fact `idempotency_key` of the last lets you
    ask again later. A `generation` makes a change conditional. An API key is never shown.
    """

    async def place(  # noqa: PLR0913 - a hold has that many properties, all by name
        self,
        resource_id: str | None = None,
        quantity: int | None = None,
        *,
        items: Sequence[Item] | None = None,
        ttl_s: Seconds | None = None,
        expires_at: datetime | None = None,
        holder: str | None = None,
        external_ref: str | None = None,
        metadata: dict[str, Any] | None = None,
        max_renewals: int | None = None,
        max_lifetime_s: Seconds | None = None,
        replaces: HoldId | None = None,
        idempotency_key: str | None = None,
    ) -> answers.HoldAnswer:
        """Hold units of one resource, or `items`, all or none, until `ttl_s` from now or `expires_at`.

        With an `idempotency_key` of your own, the order's number say, the same call in another process answers
        the same hold. Raises InsufficientCapacityError (facts: available, resource_id).
        """
        fields = words.given(
            resource_id=resource_id,
            quantity=quantity,
            items=words.item_fields(items),
            ttl_s=ttl_s,
            expires_at=expires_at,
            holder=holder,
            external_ref=external_ref,
            metadata=metadata,
            max_renewals=max_renewals,
            max_lifetime_s=max_lifetime_s,
            replaces=replaces,
        )
        body = words.body(bodies.PlaceBody, **fields)
        return await self._post("/v1/holds", body, answers.HoldAnswer, idempotency_key)

    async def get(self, hold_id: HoldId) -> answers.HoldAnswer:
        """Get a hold as it is now. Raises HoldNotFoundError."""
        return await self._get(words.hold_path(hold_id), answers.HoldAnswer)

    async def history(self, hold_id: HoldId) -> answers.HistoryAnswer:
        """Get what happened to a hold, oldest first, and when its next wake-up is due."""
        return await self._get(words.hold_path(hold_id, "history"), answers.HistoryAnswer)

    async def holds(self, **which: Unpack[HoldsFilter]) -> AsyncGenerator[answers.HoldAnswer, None]:
        """Go through the holds that match: none given, all that have not ended.

        The filters, by name: `state` (held, confirmed, released, expired, returned), `resource_id`, `holder`,
        `external_ref`, `overdue` (True: past the deadline and not ended yet), `expires_before` (a datetime with
        a zone); each narrows further. Ended ones are found by `external_ref` only. Raises InvalidError where no
        index serves the filters.
        """
        async for page in pages(lambda cursor: self.holds_page(cursor=cursor, limit=PAGE_MAX, **which)):
            for hold in page.holds:
                yield hold

    async def holds_page(
        self, *, limit: int | None = None, cursor: str | None = None, **which: Unpack[HoldsFilter]
    ) -> answers.HoldsAnswer:
        """Get a page of the holds that match; it may be short and not the last: follow `next_cursor`.

        The filters are those of `holds`: `state`, `resource_id`, `holder`, `external_ref`, `overdue`,
        `expires_before`.
        """
        query = words.query(queries.HoldsQuery, limit=limit, cursor=cursor, **which)
        return await self._get("/v1/holds", answers.HoldsAnswer, query)

    async def renew(
        self,
        hold_id: HoldId,
        *,
        ttl_s: Seconds | None = None,
        expires_at: datetime | None = None,
        generation: int | None = None,
        idempotency_key: str | None = None,
    ) -> answers.HoldAnswer:
        """Move the deadline to `ttl_s` from now or to `expires_at`.

        Raises HoldExpiredError, AlreadyEndedError, LimitReachedError, GenerationMismatchError (facts:
        current_state, current_generation).
        """
        fields = words.given(ttl_s=ttl_s, expires_at=expires_at, generation=generation)
        body = words.body(bodies.RenewBody, **fields)
        return await self._post(words.hold_path(hold_id, "renew"), body, answers.HoldAnswer, idempotency_key)

    async def confirm(
        self, hold_id: HoldId, *, generation: int | None = None, idempotency_key: str | None = None
    ) -> answers.HoldAnswer:
        """Keep the units for good. Repeating it has no new effect. Raises as `renew` does."""
        body = words.body(bodies.ConfirmBody, **words.given(generation=generation))
        return await self._post(
            words.hold_path(hold_id, "confirm"), body, answers.HoldAnswer, idempotency_key
        )

    async def release(
        self,
        hold_id: HoldId,
        *,
        reason: str | None = None,
        generation: int | None = None,
        idempotency_key: str | None = None,
    ) -> answers.HoldAnswer:
        """Give the units back before the deadline. Repeating it has no new effect. Raises as `renew` does."""
        body = words.body(bodies.ReleaseBody, **words.given(reason=reason, generation=generation))
        return await self._post(
            words.hold_path(hold_id, "release"), body, answers.HoldAnswer, idempotency_key
        )

    async def return_(
        self,
        hold_id: HoldId,
        *,
        reason: str | None = None,
        generation: int | None = None,
        idempotency_key: str | None = None,
    ) -> answers.HoldAnswer:
        """Give a confirmed hold's units back. Raises NotConfirmedError too; repeating it has no new effect."""
        body = words.body(bodies.ReturnBody, **words.given(reason=reason, generation=generation))
        return await self._post(words.hold_path(hold_id, "return"), body, answers.HoldAnswer, idempotency_key)

    # --- batches

    async def place_batch(
        self, holds: Sequence[Wanted], *, atomic: bool = False, idempotency_key: str | None = None
    ) -> answers.BatchAnswer:
        """Place up to 500 holds; each has its result, in order. Atomic: all or none, in one transaction.

        `as_error` makes an error of a refused one's problem. Asking again with the same `idempotency_key`
        places what is missing and answers the rest.
        """
        wanted = [words.wanted_fields(one) for one in words.several("holds", holds, Wanted)]
        body = words.body(bodies.BatchBody, holds=wanted, atomic=atomic)
        path, longer_s = "/v1/holds/batch", BATCH_S
        return await self._post(path, body, answers.BatchAnswer, idempotency_key, longer_s=longer_s)

    async def release_batch(
        self, hold_ids: Iterable[HoldId], *, reason: str | None = None, idempotency_key: str | None = None
    ) -> answers.BatchAnswer:
        """Release up to 500 holds, each for itself, with a result each."""
        body = words.body(
            bodies.ReleaseBatchBody,
            ids=words.several("hold_ids", hold_ids, UUID | str),
            **words.given(reason=reason),
        )
        path, longer_s = "/v1/holds/release-batch", BATCH_S
        return await self._post(path, body, answers.BatchAnswer, idempotency_key, longer_s=longer_s)

    # --- resources

    async def declare(self, resource_id: str, *, capacity: int | None) -> answers.ResourceAnswer:
        """Declare a resource, or change its capacity; None: counted without a limit."""
        body = words.body(bodies.ResourceBody, capacity=capacity)
        return await self._put(words.path("/v1/resources", resource_id), body, answers.ResourceAnswer)

    async def resource(self, resource_id: str) -> answers.ResourceAnswer:
        """Get a declared resource's counters. Raises ResourceNotFoundError for one never declared."""
        return await self._get(words.path("/v1/resources", resource_id), answers.ResourceAnswer)

    async def resources(self, prefix: str | None = None) -> AsyncGenerator[answers.ResourceAnswer, None]:
        """Go through the declared resources whose id begins so, in the order of their ids."""
        async for page in pages(lambda c: self.resources_page(prefix, cursor=c, limit=PAGE_MAX)):
            for resource in page.resources:
                yield resource

    async def resources_page(
        self, prefix: str | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> answers.ResourcesAnswer:
        """Get a page of the declared resources."""
        query = words.query(queries.ResourcesQuery, prefix=prefix, limit=limit, cursor=cursor)
        return await self._get("/v1/resources", answers.ResourcesAnswer, query)

    # --- events

    async def events(
        self,
        *,
        after: str | None = None,
        type: EventType | None = None,  # noqa: A002 - its name on the wire
        hold_id: HoldId | None = None,
        limit: int | None = None,
    ) -> answers.EventsAnswer:
        """Get the events after a cursor, oldest first, and the cursor to go on with, of an empty page too.

        Raises CursorExpiredError once events after it are gone.
        """
        query = words.query(queries.EventsQuery, after=after, type=type, hold_id=hold_id, limit=limit)
        return await self._get("/v1/events", answers.EventsAnswer, query)

    async def follow(
        self,
        *,
        after: str | None = None,
        type: EventType | None = None,  # noqa: A002 - its name on the wire
        hold_id: HoldId | None = None,
        poll_s: float = POLL_S,
    ) -> AsyncGenerator[tuple[answers.EventAnswer, str | None], None]:
        """Go through the events as they happen, without an end; each with the cursor to keep once it is dealt with.

        Going on from a kept cursor skips nothing and may repeat a page (`event.id` stays the same). Of a type that is
        rarer than the retention keep the cursors of empty pages too: ask with `events`. Raises as `events` does,
        UnavailableError too: begin again from the cursor.
        """
        while True:
            page = await self.events(after=after, type=type, hold_id=hold_id)
            for left, event in zip(reversed(range(len(page.events))), page.events, strict=True):
                yield event, after if left else page.next_cursor
            after = page.next_cursor
            if not page.more:
                await self._sleep(poll_s)

    # --- the platform's own, with a platform key

    async def overview(self) -> answers.OverviewAnswer:
        """Get what was due, what has ended, and how old the rest is."""
        return await self._get("/v1/overview", answers.OverviewAnswer)

    async def pause(self, loop: LoopName, *, reason: str) -> answers.LoopAnswer:
        """Pause a loop in the whole fleet."""
        body = words.body(bodies.PauseBody, reason=reason)
        return await self._post(words.path("/v1/loops", loop) + "/pause", body, answers.LoopAnswer)

    async def resume(self, loop: LoopName, *, reason: str | None = None) -> answers.LoopAnswer:
        """Let a paused loop run again."""
        body = words.body(bodies.ResumeBody, **words.given(reason=reason))
        return await self._post(words.path("/v1/loops", loop) + "/resume", body, answers.LoopAnswer)

    async def governor(self) -> answers.GovernorAnswer:
        """Get how many transitions a second may start, and why."""
        return await self._get("/v1/governor", answers.GovernorAnswer)

    async def pause_governor(self, *, reason: str) -> answers.OrdersAnswer:
        """Allow nothing in the whole fleet, not even the floor."""
        body = words.body(bodies.PauseBody, reason=reason)
        return await self._post("/v1/governor/pause", body, answers.OrdersAnswer)

    async def resume_governor(self, *, reason: str | None = None) -> answers.OrdersAnswer:
        """End a pause: the fleet goes on at half the last good rate at most."""
        body = words.body(bodies.ResumeBody, **words.given(reason=reason))
        return await self._post("/v1/governor/resume", body, answers.OrdersAnswer)

    async def override(self, *, ceiling_per_s: float, ttl_s: float, reason: str) -> answers.OrdersAnswer:
        """Lower the ceiling, permits a second, for so many seconds. Raises OutOfRangeError: it only lowers."""
        body = words.body(bodies.OverrideBody, ceiling_per_s=ceiling_per_s, ttl_s=ttl_s, reason=reason)
        return await self._put("/v1/governor/override", body, answers.OrdersAnswer)

    async def end_override(self) -> answers.OrdersAnswer:
        """End an override before its time."""
        return await self._delete("/v1/governor/override", answers.OrdersAnswer)

    async def create_key(
        self,
        *,
        tenant_id: str | None,
        scopes: Sequence[Scope] | None = None,
        name: str | None = None,
        idempotency_key: str | None = None,
    ) -> answers.MadeKeyAnswer:
        """Make an API key of a tenant, or (None) of the platform.

        It is in this answer only. `key` is None after a lost answer (`replayed`): revoke it and make another.
        """
        fields = words.given(scopes=scopes and words.several("scopes", scopes, str), name=name)
        body = words.body(bodies.KeyBody, tenant_id=tenant_id, **fields)
        return await self._post("/v1/keys", body, answers.MadeKeyAnswer, idempotency_key)

    async def keys(self, tenant_id: str | None = None) -> AsyncGenerator[answers.KeyAnswer, None]:
        """Go through the API keys, of one tenant or of all, oldest first, revoked ones too."""
        async for page in pages(lambda c: self.keys_page(tenant_id, cursor=c, limit=PAGE_MAX)):
            for key in page.keys:
                yield key

    async def keys_page(
        self, tenant_id: str | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> answers.KeysAnswer:
        """Get a page of the API keys."""
        query = words.query(queries.KeysQuery, tenant_id=tenant_id, limit=limit, cursor=cursor)
        return await self._get("/v1/keys", answers.KeysAnswer, query)

    async def revoke_key(self, key_id: str) -> None:
        """Revoke an API key by its id, for good. Repeating it is harmless. Raises KeyNotFoundError."""
        await self._delete(words.path("/v1/keys", key_id), answers.Answer)
