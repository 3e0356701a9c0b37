"""Bodies and queries of requests. These models validate, and describe themselves in the OpenAPI document."""

import json
import math
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from expiry.wanted import (
    INT_MAX,
    ITEMS_MAX,
    METADATA_BYTES_MAX,
    QUANTITY_MAX,
    TEXT_MAX,
    TTL_S_MAX,
    Item,
    Wanted,
)
from expiry.wire.answers import EventType, State
from expiry.wire.times import parse_rfc3339

INT64_MAX = 2**63 - 1
BATCH_MAX = 500  # holds in one request
PAGE_MAX = 200
EVENTS_PAGE_MAX = 1000
CURSOR_CHARS_MAX = 1024
KEY_NAME_MAX = 100
# As a pattern of JSON Schema: PostgreSQL keeps no NUL. Lone surrogates are refused as well; no pattern can say so.
NO_NUL = "^[^\\u0000]*$"


def _number(value: object) -> object:
    """Let whole numbers be seconds as well; nothing else is changed, so true and "60" are refused."""
    return Decimal(value) if type(value) is int else value


def _time(value: object) -> object:
    if not isinstance(value, str):
        raise PydanticCustomError("time_type", "a time is a string in RFC 3339")
    return parse_rfc3339(value)


def _uuid(value: object) -> object:
    return UUID(value) if isinstance(value, str) else value


def _metadata(value: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = _plain(value)
    size = len(json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode())
    if size > METADATA_BYTES_MAX:
        raise PydanticCustomError(
            "metadata_size",
            "metadata takes {size} bytes of at most {max}",
            {"size": size, "max": METADATA_BYTES_MAX},
        )
    return plain


def _plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Make floats of the decimals, as any reader of the metadata would; nested at most body.DEPTH_MAX deep."""
    if isinstance(value, Decimal):
        number = float(value)
        if not math.isfinite(number):
            raise PydanticCustomError("metadata_number", "a number in metadata is out of range")
        return number
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _text(chars_max: int, pattern: str = NO_NUL) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "minLength": 1, "maxLength": chars_max, "pattern": pattern})


Seconds = Annotated[
    Decimal,
    BeforeValidator(_number),
    Field(ge=1, le=TTL_S_MAX, decimal_places=6),
    WithJsonSchema({"type": "number", "minimum": 1, "maximum": TTL_S_MAX, "multipleOf": 0.000001}),
]
Time = Annotated[datetime, BeforeValidator(_time), WithJsonSchema({"type": "string", "format": "date-time"})]
Id = Annotated[UUID, BeforeValidator(_uuid), WithJsonSchema({"type": "string", "format": "uuid"})]
Text = Annotated[str, Field(min_length=1, max_length=TEXT_MAX), _text(TEXT_MAX)]
Quantity = Annotated[int, Field(ge=1, le=QUANTITY_MAX)]
Generation = Annotated[int, Field(ge=1, le=INT64_MAX)]
Metadata = Annotated[
    dict[str, Any],
    AfterValidator(_metadata),
    WithJsonSchema({"type": "object", "propertyNames": {"pattern": NO_NUL}, "additionalProperties": True}),
]


def _instead(given: str, other: str) -> dict[str, Any]:
    return {"required": [given], "properties": {given: {"not": {"type": "null"}}, other: {"type": "null"}}}


# What validators say beyond the types, said once more in JSON Schema.
_ONE_DEADLINE = {"oneOf": [_instead("ttl_s", "expires_at"), _instead("expires_at", "ttl_s")]}
_ONE_DEMAND = {
    "oneOf": [
        _instead("resource_id", "items"),
        {**_instead("items", "resource_id"), "not": {"required": ["quantity"]}},
    ]
}
_OWN_SCOPES = {
    "if": {"properties": {"tenant_id": {"type": "null"}}},
    "then": {"properties": {"scopes": {"items": {"const": "platform"}}}},
    "else": {"properties": {"scopes": {"items": {"enum": ["holds", "read", "operate"]}}}},
}


def _described(*rules: dict[str, Any], example: dict[str, Any]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [example], **({"allOf": [*rules]} if rules else {})})


class Body(BaseModel):
    """Strict: no field is converted, no field is unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ItemBody(Body):
    """So many units of one resource."""

    resource_id: Text = Field(description="The resource.", examples=["room-12/2026-12-24"])
    quantity: Quantity = Field(default=1, description="Units of it.", examples=[1])


class DeadlineBody(Body):
    """A deadline, as a duration from now or as a time."""

    ttl_s: Seconds | None = Field(
        default=None, description="Seconds until the deadline, at most six decimals.", examples=[900, 1.5]
    )
    expires_at: Time | None = Field(
        default=None,
        description="The deadline itself, 1 s to a year ahead, instead of `ttl_s`.",
        examples=["2026-12-24T18:00:00Z"],
    )

    @model_validator(mode="after")
    def _one_deadline(self) -> Self:
        if (self.ttl_s is None) == (self.expires_at is None):
            raise PydanticCustomError("one_deadline", "give either ttl_s or expires_at")
        return self


class PlaceBody(DeadlineBody):
    """A hold to be placed: one resource, or several that are taken all or none."""

    model_config = _described(
        _ONE_DEADLINE,
        _ONE_DEMAND,
        example={"ttl_s": 900, "resource_id": "room-12/2026-12-24", "external_ref": "cart-77"},
    )

    resource_id: Text | None = Field(
        default=None, description="The resource to hold.", examples=["room-12/2026-12-24"]
    )
    quantity: Quantity = Field(default=1, description="Units of `resource_id`.", examples=[1])
    items: Annotated[list[ItemBody], Field(min_length=1, max_length=ITEMS_MAX)] | None = Field(
        default=None, description="Several resources, none of them twice, instead of `resource_id`."
    )
    holder: Text | None = Field(default=None, description="Who holds.", examples=["customer-4711"])
    external_ref: Text | None = Field(
        default=None, description="The caller's own reference.", examples=["cart-77"]
    )
    metadata: Metadata | None = Field(
        default=None, description="Any object, at most 8 KiB.", examples=[{"channel": "web"}]
    )
    max_renewals: Annotated[int, Field(ge=0, le=INT_MAX)] | None = Field(
        default=None, description="How often the hold may be renewed; null: any number.", examples=[3]
    )
    max_lifetime_s: Seconds | None = Field(
        default=None, description="No renewal goes past this many seconds from now.", examples=[3600]
    )
    replaces: Id | None = Field(
        default=None,
        description="An own held hold that is released in the same transaction; its units count for this one.",
    )

    @model_validator(mode="after")
    def _one_demand(self) -> Self:
        if (self.resource_id is None) == (self.items is None):
            raise PydanticCustomError("one_demand", "give either resource_id or items")
        if self.items is not None:
            if "quantity" in self.model_fields_set:
                raise PydanticCustomError(
                    "one_quantity", "quantity goes with resource_id; items have their own"
                )
            if len({item.resource_id for item in self.items}) < len(self.items):
                raise PydanticCustomError("item_twice", "items name a resource twice: add the quantities up")
        if self.ttl_s is not None and self.max_lifetime_s is not None and self.ttl_s > self.max_lifetime_s:
            raise PydanticCustomError("lifetime", "ttl_s goes past max_lifetime_s")
        return self

    def wanted(self) -> Wanted:
        """Say it in the terms of `expiry.holds`; each call is another hold."""
        items = [Item(i.resource_id, i.quantity) for i in self.items or ()]
        if self.resource_id is not None:
            items = [Item(self.resource_id, self.quantity)]
        return Wanted(
            items=items,
            ttl_s=self.ttl_s,
            expires_at=self.expires_at,
            holder=self.holder,
            external_ref=self.external_ref,
            metadata=self.metadata,
            max_renewals=self.max_renewals,
            max_lifetime_s=self.max_lifetime_s,
            replaces=self.replaces,
        )


class ConditionalBody(Body):
    """A change that may be meant for one generation only."""

    generation: Generation | None = Field(
        default=None, description="Change the hold only if it has this generation.", examples=[2]
    )


class RenewBody(DeadlineBody, ConditionalBody):
    """A new deadline, counted from now."""

    model_config = _described(_ONE_DEADLINE, example={"ttl_s": 900})


class ConfirmBody(ConditionalBody):
    """Keep the units for good."""

    model_config = _described(example={})


class GiveBackBody(ConditionalBody):
    """Release or return: the units come back."""

    model_config = _described(example={"reason": "cart emptied"})

    reason: Text | None = Field(default=None, description="Why, for the record.", examples=["cart emptied"])


class BatchBody(Body):
    """Several holds in one request."""

    model_config = _described(
        example={
            "holds": [
                {"ttl_s": 900, "resource_id": "room-12/2026-12-24"},
                {"ttl_s": 900, "items": [{"resource_id": "breakfast/2026-12-24", "quantity": 2}]},
            ],
            "atomic": True,
        }
    )

    holds: Annotated[list[PlaceBody], Field(min_length=1, max_length=BATCH_MAX)] = Field(
        description=f"1 to {BATCH_MAX} holds, as for placing one."
    )
    atomic: bool = Field(
        default=False,
        description="true: all or none, in one transaction. false: each for itself; repeating the request "
        "places what is missing.",
    )


class ReleaseBatchBody(Body):
    """Several holds to be released."""

    model_config = _described(
        example={"ids": ["0193b0c5-8f4a-7c3e-9d5e-2f6a1b8c4d7e"], "reason": "shop closed"}
    )

    ids: Annotated[list[Id], Field(min_length=1, max_length=BATCH_MAX)] = Field(
        description=f"1 to {BATCH_MAX} holds."
    )
    reason: Text | None = Field(default=None, description="Why, for the record.", examples=["shop closed"])


class ResourceBody(Body):
    """A declared resource."""

    model_config = _described(example={"capacity": 10})

    capacity: Annotated[int, Field(ge=0, le=INT_MAX)] | None = Field(
        description="Units on sale; null: counted without a limit.", examples=[10]
    )


class PauseBody(Body):
    """A loop to be paused, and why."""

    model_config = _described(example={"reason": "database maintenance"})

    reason: Text = Field(description="Why, for the record.", examples=["database maintenance"])


class ResumeBody(Body):
    """A loop to be resumed."""

    model_config = _described(example={"reason": "done"})

    reason: Text | None = Field(default=None, description="Why, for the record.", examples=["done"])


class KeyBody(Body):
    """An API key to be made."""

    model_config = _described(
        _OWN_SCOPES, example={"tenant_id": "shop", "scopes": ["holds", "read"], "name": "checkout"}
    )

    tenant_id: Text | None = Field(
        description="Whose holds it works on; null: a platform key.", examples=["shop"]
    )
    scopes: Annotated[list[Literal["holds", "read", "operate", "platform"]], Field(min_length=1)] | None = (
        Field(
            default=None,
            description="What it may do; left out: all that such a key can. A platform key has `platform` "
            "and nothing else.",
            examples=[["holds", "read"]],
        )
    )
    name: Annotated[str, Field(min_length=1, max_length=KEY_NAME_MAX), _text(KEY_NAME_MAX)] | None = Field(
        default=None, description="What it is for.", examples=["checkout"]
    )


# --- queries: strings on the wire, so numbers are read from their digits; otherwise as strict as a body


def _digits(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def _flag(value: object) -> object:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _up_to(most: int) -> WithJsonSchema:
    return WithJsonSchema({"type": "integer", "minimum": 1, "maximum": most})


Limit = Annotated[int, BeforeValidator(_digits), Field(ge=1, le=PAGE_MAX), _up_to(PAGE_MAX)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Cursor = Annotated[
    str, Field(min_length=1, max_length=CURSOR_CHARS_MAX), _text(CURSOR_CHARS_MAX, "^[A-Za-z0-9_-]+$")
]
PAGE_DEFAULT = 50


class Query(Body):
    """Strict, too: no parameter is unknown, so that a misspelt filter does not answer everything."""


class NoQuery(Query):
    """No parameters."""


class PageQuery(Query):
    """A page, and where it starts."""

    limit: Limit = Field(default=PAGE_DEFAULT, description="At most so many.")
    cursor: Cursor | None = Field(default=None, description="`next_cursor` of the page before.")


class HoldsQuery(PageQuery):
    """Which holds."""

    model_config = _described(example={"state": "held", "limit": 50})

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

    model_config = _described(example={"prefix": "room-12/"})

    prefix: Text | None = Field(default=None, description="Only ids that begin so.", examples=["room-12/"])


class KeysQuery(PageQuery):
    """Which keys."""

    model_config = _described(example={"tenant_id": "shop"})

    tenant_id: Text | None = Field(default=None, description="Keys of this tenant.", examples=["shop"])


class EventsQuery(Query):
    """Which events, after which."""

    model_config = _described(example={"limit": 100})

    after: Cursor | None = Field(
        default=None, description="`next_cursor` of the page before; left out: from the oldest kept."
    )
    type: EventType | None = Field(default=None, description="Only events of this type.")
    hold_id: Id | None = Field(default=None, description="Only events of this hold.")
    limit: Annotated[
        int, BeforeValidator(_digits), Field(ge=1, le=EVENTS_PAGE_MAX), _up_to(EVENTS_PAGE_MAX)
    ] = Field(default=100, description="At most so many.")
