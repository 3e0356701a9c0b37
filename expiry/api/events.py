"""/v1/events: what happened to a tenant's holds, from a cursor on."""

from aiohttp import web
from pydantic import TypeAdapter

from expiry import outbox
from expiry.api import cursor
from expiry.api.database import run
from expiry.api.operation import Call, Operations, answer
from expiry.api.state import POOL
from expiry.wire.answers import EventsAnswer
from expiry.wire.problems import CursorExpiredError
from expiry.wire.queries import EventsQuery
from expiry.wire.times import rfc3339

operations = Operations("events")

_POSITIONS: TypeAdapter[outbox.Position] = TypeAdapter(outbox.Position)


@operations.add(
    "GET", "/v1/events", scope="read", takes=EventsQuery, answers=EventsAnswer, refuses=(CursorExpiredError,)
)
async def list_(call: Call, asked: EventsQuery) -> web.Response:
    """Follow the events of all holds, oldest first.

    Keep `next_cursor`, of an empty page too, and ask again with it: at once while `more` is true, otherwise after
    a moment. No event is skipped, in whichever order transactions commit: an event appears once everything that
    began before it is over. Events may come again after a failure of yours: their `id` stays the same, and
    `sequence` counts up for each hold. A cursor older than the retention answers 410.
    """
    tenant_id = call.tenant_id
    after = outbox.OLDEST if asked.after is None else cursor.read(asked.after, _POSITIONS, asked)
    page = await run(
        call.app[POOL],
        lambda conn: outbox.read(
            conn, tenant_id=tenant_id, after=after, type_=asked.type, hold_id=asked.hold_id, limit=asked.limit
        ),
    )
    if page.expired:
        raise CursorExpiredError
    return answer(
        {
            "events": [
                {
                    "id": event.key,
                    "type": event.type,
                    "hold_id": str(event.hold_id),
                    "generation": event.generation,
                    "sequence": event.sequence,
                    "occurred_at": rfc3339(event.occurred_at),
                    "data": event.data,
                }
                for event in page.events
            ],
            "next_cursor": cursor.write(page.next, _POSITIONS, asked),
            "more": page.more,
            "server_time": rfc3339(page.read_at),
        }
    )
