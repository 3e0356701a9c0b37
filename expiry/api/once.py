"""Work on a connection, done once per Idempotency-Key if the request has one."""

import hashlib
import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from decimal import Decimal
from typing import Any

from expiry import idempotency
from expiry.api.database import run
from expiry.api.operation import Call
from expiry.api.state import POOL
from expiry.holds import Conn


async def once(
    call: Call,
    route: str,
    work: Callable[[Conn], Awaitable[dict[str, Any]]],
    *,
    key: str | None = None,
    condition: int | None = None,
) -> tuple[dict[str, Any], datetime | None]:
    """Do the work and answer its document; with a key (the request's, or `key`) answer as the first time.

    Beside it stands the database's clock at a replay, None where the work was done now. `condition` is the
    generation that is asked for, in whichever form it came: a part of the request. Raises as
    `idempotency.once` and `database.run` do.
    """
    name = key or call.key
    if name is None:
        return await run(call.app[POOL], work), None
    tenant_id = call.principal.tenant_id or idempotency.PLATFORM
    body_hash = hash_of(call, condition)
    return await run(
        call.app[POOL],
        lambda conn: idempotency.once(
            conn, work, tenant_id=tenant_id, route=route, key=name, body_hash=body_hash
        ),
    )


def hash_of(call: Call, condition: int | None = None) -> bytes:
    """Tell apart what is asked with one key, however it was written and wherever its condition stood."""
    wanted = call.asked.model_dump(exclude={"generation"}, exclude_defaults=True)
    text = json.dumps([wanted, condition], sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).digest()


def _plain(value: object) -> str:
    return str(value.normalize() if isinstance(value, Decimal) else value)
