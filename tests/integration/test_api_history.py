"""The history of a hold: each step, what woke it, how late it ended, what failed."""

from __future__ import annotations

from typing import Any

from tests.api_client import OTHER_TENANT, Api, make_overdue, problem, read
from tests.scene import Pool


async def history(api: Api, hold: dict[str, Any]) -> dict[str, Any]:
    """Read a hold's history."""
    response = await api.ask("GET", f"/v1/holds/{hold['id']}/history")
    assert response.status == 200
    return await read(response)


async def test_a_history_tells_each_step(api: Api) -> None:
    """Who placed, renewed and ended it, when, and to what."""
    hold = await api.placed()
    await api.verb(hold, "renew", ttl_s=90)
    await api.verb(hold, "confirm")
    await api.verb(hold, "return", reason="refund")
    found = await history(api, hold)
    assert [(e["what"], e["generation"]) for e in found["history"]] == [
        ("placed", 1),
        ("renewed", 2),
        ("confirmed", 2),
        ("returned", 2),
    ]
    assert found["history"][3]["detail"]["reason"] == "refund"
    assert all(e["by"].startswith("api:") for e in found["history"])
    assert found["history"][1]["detail"]["expires_at"] > hold["expires_at"]
    assert found["hold"]["state"] == "returned"


async def test_a_history_tells_when_the_wakeup_is_due(api: Api) -> None:
    """In the queue at the deadline; gone from it: nothing is due."""
    hold = await api.placed()
    found = await history(api, hold)
    assert found["wakeup"]["queued"] is True
    assert (
        found["wakeup"]["due_at"][:19] == hold["expires_at"][:19]
        or found["wakeup"]["due_at"] > hold["expires_at"]
    )
    assert api.wakeups is not None
    await api.wakeups.redis.flushall()
    assert (await history(api, hold))["wakeup"] == {"queued": False, "due_at": None}


async def test_a_history_tells_of_the_expiry_and_of_failures(api: Api, pool: Pool) -> None:
    """How late it was and what woke it; an attempt that failed, its error and what became of it."""
    woken, swept, failed = [await api.placed(holder=h) for h in ("a", "b", "bad")]
    await make_overdue(pool)
    async with pool.acquire() as conn:
        for hold, by in ((woken, "worker"), (swept, "sweep")):
            await conn.execute(
                "SELECT at_ms FROM expiry_expire(ARRAY[$1::uuid], ARRAY[1::bigint], $2)", hold["id"], by
            )
        await conn.execute(
            """INSERT INTO dead_letters (tenant_id, kind, hold_id, generation, reason, attempts, first_error,
                                         last_error, first_failed_at, last_failed_at, state)
               VALUES ('shop', 'expire', $1, 1, 'P0001', 3, 'one', 'three', now(), clock_timestamp(), 'retrying')""",
            failed["id"],
        )
    found = await history(api, woken)
    assert [e["what"] for e in found["history"]] == ["placed", "woken", "expired"]
    assert 1000 <= found["history"][2]["detail"]["lag_ms"] < 60_000
    assert found["hold"]["state"] == "expired"
    assert [e["what"] for e in (await history(api, swept))["history"]] == ["placed", "expired"]
    steps = (await history(api, failed))["history"]
    assert [e["what"] for e in steps] == ["placed", "failed", "failed"]
    assert steps[2]["detail"] == {
        "attempt": 3,
        "error": "three",
        "reason": "P0001",
        "dead_letter": "retrying",
    }


async def test_another_tenants_history_is_not_there(api: Api) -> None:
    """404, as for a hold that nobody has."""
    hold = await api.placed()
    response = await api.ask("GET", f"/v1/holds/{hold['id']}/history", key=OTHER_TENANT)
    await problem(response, 404, "not_found")
