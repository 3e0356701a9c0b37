"""Request bodies. These models validate, and describe the wire for the OpenAPI document."""

import json
import math
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Self
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

from expiry.api.times import parse_rfc3339
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

INT64_MAX = 2**63 - 1


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


Seconds = Annotated[
    Decimal,
    BeforeValidator(_number),
    Field(ge=1, le=TTL_S_MAX, decimal_places=6),
    WithJsonSchema({"type": "number", "minimum": 1, "maximum": TTL_S_MAX, "multipleOf": 0.000001}),
]
Time = Annotated[datetime, BeforeValidator(_time), WithJsonSchema({"type": "string", "format": "date-time"})]
Id = Annotated[UUID, BeforeValidator(_uuid), WithJsonSchema({"type": "string", "format": "uuid"})]
Text = Annotated[str, Field(min_length=1, max_length=TEXT_MAX)]
Quantity = Annotated[int, Field(ge=1, le=QUANTITY_MAX)]
Generation = Annotated[int, Field(ge=1, le=INT64_MAX)]
Metadata = Annotated[dict[str, Any], AfterValidator(_metadata)]


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
        """Say it in the terms of `expiry.holds`."""
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


class ConfirmBody(ConditionalBody):
    """Keep the units for good."""


class GiveBackBody(ConditionalBody):
    """Release or return: the units come back."""

    reason: Text | None = Field(default=None, description="Why, for the record.", examples=["cart emptied"])


class ResourceBody(Body):
    """A declared resource."""

    capacity: Annotated[int, Field(ge=0, le=INT_MAX)] | None = Field(
        description="Units on sale; null: counted without a limit.", examples=[10]
    )


class PauseBody(Body):
    """A loop to be paused, and why."""

    reason: Text = Field(description="Why, for the record.", examples=["database maintenance"])


class ResumeBody(Body):
    """A loop to be resumed."""

    reason: Text | None = Field(default=None, description="Why, for the record.", examples=["done"])
