"""Bodies of requests. These models validate, and describe themselves in the OpenAPI document."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from expiry.wanted import INT_MAX, ITEMS_MAX, Item, Wanted
from expiry.wire.fields import (
    Generation,
    Id,
    Metadata,
    OverrideSeconds,
    Quantity,
    Rate,
    Seconds,
    Strict,
    Text,
    Time,
    described,
    text,
)

BATCH_MAX = 500  # holds in one request
KEY_NAME_MAX = 100


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


class ItemBody(Strict):
    """So many units of one resource."""

    resource_id: Text = Field(description="The resource.", examples=["room-12/2026-12-24"])
    quantity: Quantity = Field(default=1, description="Units of it.", examples=[1])


class DeadlineBody(Strict):
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

    model_config = described(
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
        default=None,
        description="Any object, at most 8 KiB, numbers written out.",
        examples=[{"channel": "web"}],
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


class ConditionalBody(Strict):
    """A change that may be meant for one generation only."""

    generation: Generation | None = Field(
        default=None, description="Change the hold only if it has this generation.", examples=[2]
    )


class RenewBody(DeadlineBody, ConditionalBody):
    """A new deadline, counted from now."""

    model_config = described(_ONE_DEADLINE, example={"ttl_s": 900})


class ConfirmBody(ConditionalBody):
    """Keep the units for good."""

    model_config = described(example={})


class ReleaseBody(ConditionalBody):
    """The units come back before the deadline."""

    model_config = described(example={"reason": "cart emptied"})

    reason: Text | None = Field(default=None, description="Why, for the record.", examples=["cart emptied"])


class ReturnBody(ConditionalBody):
    """The units of a confirmed hold come back."""

    model_config = described(example={"reason": "refund"})

    reason: Text | None = Field(default=None, description="Why, for the record.", examples=["refund"])


class BatchBody(Strict):
    """Several holds in one request."""

    model_config = described(
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


class ReleaseBatchBody(Strict):
    """Several holds to be released."""

    model_config = described(
        example={"ids": ["0193b0c5-8f4a-7c3e-9d5e-2f6a1b8c4d7e"], "reason": "shop closed"}
    )

    ids: Annotated[list[Id], Field(min_length=1, max_length=BATCH_MAX)] = Field(
        description=f"1 to {BATCH_MAX} holds."
    )
    reason: Text | None = Field(default=None, description="Why, for the record.", examples=["shop closed"])


class ResourceBody(Strict):
    """A declared resource."""

    model_config = described(example={"capacity": 100})

    capacity: Annotated[int, Field(ge=0, le=INT_MAX)] | None = Field(
        description="Units on sale; null: counted without a limit.", examples=[100]
    )


class PauseBody(Strict):
    """A loop to be paused, and why."""

    model_config = described(example={"reason": "database maintenance"})

    reason: Text = Field(description="Why, for the record.", examples=["database maintenance"])


class ResumeBody(Strict):
    """A loop to be resumed."""

    model_config = described(example={"reason": "done"})

    reason: Text | None = Field(default=None, description="Why, for the record.", examples=["done"])


class OverrideBody(Strict):
    """A lower ceiling for a while."""

    model_config = described(example={"ceiling_per_s": 200, "ttl_s": 3600, "reason": "sale starts at noon"})

    ceiling_per_s: Rate = Field(
        description="Permits a second, at most GOVERNOR_CEILING_PER_S: an override only lowers.",
        examples=[200],
    )
    ttl_s: OverrideSeconds = Field(description="It ends by itself after so many seconds.", examples=[3600])
    reason: Text = Field(description="Why, for the record.", examples=["sale starts at noon"])


class KeyBody(Strict):
    """An API key to be made."""

    model_config = described(
        _OWN_SCOPES, example={"tenant_id": "shop", "scopes": ["holds", "read"], "name": "checkout"}
    )

    tenant_id: Text | None = Field(
        description="Whose holds it works on; null: a platform key.", examples=["shop"]
    )
    scopes: Annotated[list[Literal["holds", "read", "operate", "platform"]], Field(min_length=1)] | None = (
        Field(
            default=None,
            description="What it may do; left out: all that such a key can. A platform key has `platform` "
            "and nothing else. `operate` opens nothing yet: it is for the tenant's own dead letters, deliveries "
            "and endpoints, which are to come.",
            examples=[["holds", "read"]],
        )
    )
    name: Annotated[str, Field(min_length=1, max_length=KEY_NAME_MAX), text(KEY_NAME_MAX)] | None = Field(
        default=None, description="What it is for.", examples=["checkout"]
    )
