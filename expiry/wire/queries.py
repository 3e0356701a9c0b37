"""Queries of requests, as strict as bodies: a misspelt filter must not answer everything."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from expiry.wire.answers import EventType, State
from expiry.wire.fields import Cursor, Flag, Id, Limit, Strict, Text, Time, described, digits, up_to

PAGE_DEFAULT = 50
EVENTS_PAGE_MAX = 1000


class Query(Strict):
    """What every query is."""


class NoQuery(Query):
    """No parameters."""


class PageQuery(Query):
    """A page, and where it starts."""

    limit: Limit = Field(default=PAGE_DEFAULT, description="At most so many.")
    cursor: Cursor | None = Field(default=None, description="`next_cursor` of the page before.")


class HoldsQuery(PageQuery):
    """Which holds."""

    model_config = described(example={"state": "held", "limit": 50})

    state: State | None = Field(
        default=None,
        description="As shown: past the deadline nothing is held. Ended ones need `external_ref`.",
    )
    resource_id: Text | None = Field(default=None, description="Holds of this resource.")
    holder: Text | None = Field(default=None, description="Holds of this holder.")
    external_ref: Text | None = Field(default=None, description="Holds with this reference, in any state.")
    overdue: Flag | None = Field(
        default=None, description="true: past the deadline and not ended yet; false: held."
    )
    expires_before: Time | None = Field(default=None, description="Held, with a deadline before this.")


class ResourcesQuery(PageQuery):
    """Which resources."""

    model_config = described(example={"prefix": "room-12/"})

    prefix: Text | None = Field(default=None, description="Only ids that begin so.", examples=["room-12/"])


class KeysQuery(PageQuery):
    """Which keys."""

    model_config = described(example={"tenant_id": "shop"})

    tenant_id: Text | None = Field(default=None, description="Keys of this tenant.", examples=["shop"])


class EventsQuery(Query):
    """Which events, after which."""

    model_config = described(example={"limit": 100})

    after: Cursor | None = Field(
        default=None, description="`next_cursor` of the page before; left out: from the oldest kept."
    )
    type: EventType | None = Field(default=None, description="Only events of this type.")
    hold_id: Id | None = Field(default=None, description="Only events of this hold.")
    limit: Annotated[
        int, BeforeValidator(digits), Field(ge=1, le=EVENTS_PAGE_MAX), up_to(EVENTS_PAGE_MAX)
    ] = Field(default=100, description="At most so many.")
