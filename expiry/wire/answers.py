"""Answers: these models describe them in the OpenAPI document, and the client reads answers with them."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from expiry.errors import Missing

State = Literal["held", "confirmed", "released", "expired", "returned"]
EventType = Literal[
    "hold.placed", "hold.renewed", "hold.confirmed", "hold.released", "hold.expired", "hold.returned"
]
LoopName = Literal["worker", "promoter", "sweep", "prune"]
LetterState = Literal["retrying", "recovered", "open", "replayed", "discarded"]

_ID = "0193b0c5-8f4a-7c3e-9d5e-2f6a1b8c4d7e"
_NOW = "2026-12-24T17:45:00.000000Z"
_LATER = "2026-12-24T18:00:00.000000Z"

ServerTime = Annotated[
    datetime,
    Field(description="The database's clock, by which deadlines are counted down.", examples=[_NOW]),
]
NextCursor = Annotated[
    str | None, Field(description="Ask for the next page with it; null: this was the last.", examples=[None])
]


class Answer(BaseModel):
    """Read leniently: a member that a newer server adds does no harm."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    _replayed: bool = PrivateAttr(default=False)  # said in a header, so no part of the document

    @property
    def replayed(self) -> bool:
        """Whether this is what the first request with the same Idempotency-Key was answered."""
        return self._replayed

    def mark_replayed(self) -> None:
        """Note that the header says so."""
        self._replayed = True


class ItemAnswer(Answer):
    """So many units of one resource."""

    resource_id: str = Field(examples=["room-12/2026-12-24"])
    quantity: int = Field(examples=[1])


class HoldAnswer(Answer):
    """A hold as of `server_time`. Past its deadline it is shown as expired, whether or not the expiry ran."""

    id: UUID = Field(examples=[_ID])
    state: State = Field(
        description="`held` until the hold ends; `returned` after a refund.", examples=["held"]
    )
    generation: int = Field(
        description="1 at first, one more with each renewal; the ETag is `g` and it.", examples=[1]
    )
    items: list[ItemAnswer]
    holder: str | None = Field(examples=[None])
    external_ref: str | None = Field(examples=["cart-77"])
    metadata: dict[str, Any] = Field(examples=[{}])
    placed_at: datetime = Field(examples=[_NOW])
    expires_at: datetime = Field(description="The deadline.", examples=[_LATER])
    expires_in_s: float = Field(
        description="Seconds from `server_time` to the deadline, 0 once ended.", examples=[900.0]
    )
    renewals: int = Field(examples=[0])
    max_renewals: int | None = Field(examples=[None])
    lifetime_ends_at: datetime | None = Field(description="No renewal goes past this.", examples=[None])
    ended_at: datetime | None = Field(examples=[None])
    ended_by: str | None = Field(
        description="`worker`, `sweep` or `reclaim` for an expiry, else who called.", examples=[None]
    )
    server_time: ServerTime


class HoldsAnswer(Answer):
    """A page of holds."""

    holds: list[HoldAnswer]
    next_cursor: NextCursor


class FieldError(Answer):
    """What is wrong where."""

    pointer: str = Field(
        description="A JSON pointer into the body (`#/items/0/quantity`), or `?` and a query parameter.",
        examples=["#/ttl_s"],
    )
    detail: str = Field(examples=["Input should be greater than or equal to 1"])


class ProblemAnswer(Answer):
    """A refusal (RFC 9457). `code` says which; what else applies is there too."""

    type: str = Field(examples=["urn:expiry:problem:insufficient_capacity"])
    title: str = Field(examples=["Insufficient capacity"])
    status: int = Field(examples=[409])
    detail: str = Field(examples=["The resource 'room-12' has too few units left: 0 available."])
    instance: str = Field(examples=["/v1/holds"])
    code: str = Field(examples=["insufficient_capacity"])
    missing: Missing | None = Field(
        default=None, description="Of a 404: what there is not. `path`: this API has no such path."
    )
    hold_id: UUID | None = Field(default=None, description="The hold that stands in the way, or is meant.")
    resource_id: str | None = None
    available: int | None = Field(default=None, description="Units left of `resource_id`.", examples=[0])
    current_state: State | None = Field(default=None, examples=["held"])
    current_generation: int | None = Field(default=None, examples=[2])
    expired_at: datetime | None = Field(default=None, examples=[_NOW])
    server_time: datetime | None = Field(default=None, examples=[_NOW])
    errors: list[FieldError] | None = None
    scope: str | None = Field(default=None, description="The scope that is needed.")
    retry_after_s: int | None = Field(default=None, description="As the header Retry-After.")
    failing: dict[str, str] | None = Field(default=None, description="What a process lacks, and why.")


class PlacedResult(Answer):
    """What came of one hold of a batch: it is placed or released."""

    status: Literal[200, 201] = Field(
        description="201: placed, 200: released; as for one alone.", examples=[201]
    )
    hold: HoldAnswer = Field(description="The hold as it is then.")


class RefusedResult(Answer):
    """What came of one hold of a batch: it was refused."""

    status: int = Field(description="As for one alone; also in the problem.", examples=[409])
    problem: ProblemAnswer = Field(description="The refusal that it would have been for one alone.")


class BatchAnswer(Answer):
    """One result for each hold that was asked for, in order."""

    results: list[PlacedResult | RefusedResult] = Field(
        description="In the order of the request: `status` and either the `hold` or the `problem`."
    )


class ResourceAnswer(Answer):
    """A declared resource."""

    resource_id: str = Field(examples=["room-12/2026-12-24"])
    capacity: int | None = Field(description="null: counted without a limit.", examples=[100])
    held: int = Field(description="Units in held holds, overdue ones among them.", examples=[3])
    confirmed: int = Field(examples=[2])
    available: int | None = Field(
        description="Units to be had now; overdue holds do not count. null: no limit.", examples=[95]
    )


class ResourcesAnswer(Answer):
    """A page of declared resources."""

    resources: list[ResourceAnswer]
    next_cursor: NextCursor


class EventAnswer(Answer):
    """Something happened to a hold."""

    id: str = Field(
        description="The operation's key: the same however often the event is read.",
        examples=[f"place:{_ID}:1"],
    )
    type: EventType = Field(examples=["hold.placed"])
    hold_id: UUID = Field(examples=[_ID])
    generation: int = Field(examples=[1])
    sequence: int = Field(
        description="Counts per hold: what is not above the last one seen is out of order, and older.",
        examples=[1],
    )
    occurred_at: datetime = Field(examples=[_NOW])
    data: dict[str, Any] = Field(
        description="items, holder, external_ref, expires_at, by, reason; a renewal has expires_at and by.",
        examples=[
            {
                "items": [{"resource_id": "room-12/2026-12-24", "quantity": 1}],
                "holder": None,
                "external_ref": "cart-77",
                "expires_at": _LATER,
                "by": "api:2a97516c354b6884",
            }
        ],
    )


class EventsAnswer(Answer):
    """A page of events. The cursor is never null: keep it and ask with it again."""

    events: list[EventAnswer]
    next_cursor: str = Field(
        description="Everything before it has been seen; also of an empty page the one to go on with.",
        examples=["Vq3Yk0xXWzAsOTEyLDRd"],
    )
    more: bool = Field(
        description="Whether more can be had at once; otherwise wait a moment.", examples=[False]
    )
    server_time: ServerTime


class HistoryEntry(Answer):
    """One step in the life of a hold."""

    at: datetime = Field(examples=[_NOW])
    what: Literal["placed", "renewed", "woken", "failed", "confirmed", "released", "expired", "returned"] = (
        Field(examples=["placed"])
    )
    generation: int = Field(examples=[1])
    by: str | None = Field(description="Who or what did it, where known.", examples=["api:2a97516c354b6884"])
    detail: dict[str, Any] = Field(
        description="A new deadline, the lag of an expiry in ms, the error of a failed attempt, a reason.",
        examples=[{"expires_at": _LATER}],
    )


class WakeupAnswer(Answer):
    """What the queue knows of the hold's next wake-up."""

    queued: bool | None = Field(
        description="null: the queue is not used, or does not answer.", examples=[True]
    )
    due_at: datetime | None = Field(description="When it comes due, by the queue.", examples=[_LATER])


class HistoryAnswer(Answer):
    """What happened to a hold, oldest first, as far back as events are kept."""

    hold: HoldAnswer = Field(description="The hold as it is now.")
    history: list[HistoryEntry] = Field(
        description="Each step: when, what, at which generation, by whom, and `detail`, which depends on `what`."
    )
    wakeup: WakeupAnswer = Field(description="The hold's next wake-up in the queue.")


class KeyAnswer(Answer):
    """An API key; never the key itself."""

    id: str = Field(
        description="Its public name, as it is in `ended_by` and in logs.", examples=["2a97516c354b6884"]
    )
    tenant_id: str | None = Field(description="null: a platform key.", examples=["shop"])
    scopes: list[Literal["holds", "read", "operate", "platform"]] = Field(examples=[["holds", "read"]])
    name: str | None = Field(examples=["checkout"])
    created_at: datetime = Field(examples=[_NOW])
    last_used_at: datetime | None = Field(description="To the minute.", examples=[None])
    revoked_at: datetime | None = Field(examples=[None])


class MadeKeyAnswer(KeyAnswer):
    """A new API key, shown this once."""

    key: str | None = Field(
        description="The key. null in the answer to a repeated request: it is stored nowhere.",
        examples=["exk_..."],
    )


class KeysAnswer(Answer):
    """A page of API keys."""

    keys: list[KeyAnswer]
    next_cursor: NextCursor


class LoopAnswer(Answer):
    """A loop of the fleet."""

    name: LoopName = Field(examples=["sweep"])
    paused: bool = Field(examples=[True])
    reason: str | None = Field(examples=["database maintenance"])
    changed_by: str = Field(examples=["api:2a97516c354b6884"])


class OrderAnswer(Answer):
    """What an operator ordered."""

    ceiling_per_s: float | None = Field(description="null: a pause.", examples=[200.0])
    reason: str = Field(examples=["sale starts at noon"])
    ordered_by: str = Field(examples=["api:2a97516c354b6884"])
    ordered_at: datetime = Field(examples=[_NOW])
    ends_at: datetime | None = Field(description="It ends by itself; null: when resumed.", examples=[_LATER])


class OrdersAnswer(Answer):
    """What operators ordered and is in force."""

    pause: OrderAnswer | None
    override: OrderAnswer | None
    enforced: bool = Field(
        description="Whether orders and decisions count; not where GOVERNOR_MODE is observe or off.",
        examples=[True],
    )


class LeaderAnswer(Answer):
    """Who decides."""

    holder: str = Field(examples=["worker-1:7:4f2a9c"])
    epoch: int = Field(description="Grows with every change of leader.", examples=[3])
    left_s: float = Field(description="Until its lease ends, if it does not renew it.", examples=[7.4])


class DecisionAnswer(Answer):
    """One decision of the journal."""

    decided_at: datetime = Field(examples=[_NOW])
    allowance_per_s: float = Field(examples=[812.0])
    limited_by: str = Field(examples=["saturation:active_backends"])
    reason: str = Field(examples=["holding 812/s: active_backends 0.85x its target"])
    epoch: int = Field(examples=[3])


class GovernorAnswer(Answer):
    """How many transitions a second may start, and why."""

    allowance_per_s: float = Field(
        description="What counts: decided, the floor where nobody leads, or the fixed ceiling.",
        examples=[812.0],
    )
    in_force_per_s: float | None = Field(
        description="As the bucket says, cuts by workers included; null: it does not answer.",
        examples=[812.0],
    )
    limited_by: str = Field(
        description="demand, ceiling, override, floor, saturation:<probe>, timeouts, errors, stale:<signal>, "
        "recovering or paused.",
        examples=["saturation:active_backends"],
    )
    reason: str = Field(
        description="Why the rate is what it is, in one sentence with its numbers.",
        examples=[
            "812/s, limited by saturation:active_backends: holding 812/s: active_backends 0.85x its target."
        ],
    )
    mode: Literal["enforce", "observe", "off"] = Field(examples=["enforce"])
    signals: dict[str, float | None] = Field(
        description="Each probe as value / target; null: it is missing.",
        examples=[{"active_backends": 0.85, "commit_latency": 0.4}],
    )
    ceiling_per_s: float = Field(description="After an override.", examples=[20_000.0])
    floor_per_s: float = Field(examples=[5.0])
    needs_per_s: float | None = Field(description="What the objective needs.", examples=[640.0])
    safe_per_s: float | None = Field(description="What the database is known to bear.", examples=[812.0])
    drain_s: float | None = Field(
        description="Until nothing is due, at this allowance; null: never, or unknown.", examples=[12.5]
    )
    due: float | None = Field(
        description="Holds due at the last decision, counted up to a bound.", examples=[9000]
    )
    oldest_due_age_s: float | None = Field(examples=[4.2])
    stuck: bool = Field(
        description="Permits are there, work is due, and nothing completes: no matter of the rate.",
        examples=[False],
    )
    paused: bool = Field(examples=[False])
    orders: OrdersAnswer
    leader: LeaderAnswer | None = Field(description="null: nobody leads.")
    decided_at: datetime | None = Field(description="The last decision.", examples=[_NOW])
    settings_hash: str | None = Field(
        description="Of the leader's GOVERNOR_* settings; each process shows its own as a metric.",
        examples=["9f1c22aa04be"],
    )
    journal: list[DecisionAnswer] = Field(description="The last decisions, newest first.")
    server_time: ServerTime


class DueAge(Answer):
    """How long the oldest due hold has been waiting, s; 0: none is due, null: unknown."""

    database: float = Field(examples=[0.0])
    queue: float | None = Field(examples=[0.0])


class OverviewAnswer(Answer):
    """What was due in the last hour, what has ended, and how old the rest is."""

    eligible: int = Field(
        description="Holds that were to end by time since `window_started_at`.", examples=[128]
    )
    expired: int = Field(examples=[128])
    difference: int = Field(
        description="`eligible` minus `expired`: those that have not ended.", examples=[0]
    )
    window_started_at: datetime = Field(examples=[_NOW])
    due: int = Field(examples=[0])
    backed_off: int = Field(description="Due and waiting after failures of their own.", examples=[0])
    count_max: int = Field(description="No count goes beyond this.", examples=[100_000])
    oldest_due_age_s: DueAge
    queue_depth: int | None = Field(examples=[42])
    dead_letters_open: int = Field(examples=[0])
    server_time: ServerTime
