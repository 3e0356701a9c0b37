"""Operators see why the rate is what it is, and pause, resume or lower it; who and why is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from governor import Controller, LocalBucket
from tests import commands
from tests.api_client import PLATFORM, TENANT, Api, problem, read
from tests.governing import SETTINGS, Work, decided


async def governor(api: Api) -> dict[str, Any]:
    """Answer what GET says."""
    response = await api.ask("GET", "/v1/governor", key=PLATFORM)
    assert response.status == 200, await response.text()
    return await read(response)


def leader(api: Api, pool: asyncpg.Pool[asyncpg.Record], **changed: float) -> Controller:
    """Return a controller on the API's own bucket."""
    row = LocalBucket(floor_per_s=1)
    settings = SETTINGS.model_copy(update=changed)
    return Controller(
        pool, name="expiry", primary=api.bucket, row=row, backlog=Work(), settings=settings, holder="one"
    )


async def test_without_a_leader_the_floor_flows_and_says_why(api: Api) -> None:
    """Nulls for what nobody decided; one sentence."""
    found = await governor(api)
    assert (found["allowance_per_s"], found["limited_by"], found["in_force_per_s"]) == (5, "floor", 1)
    assert (
        found["reason"]
        == "5/s, the floor: nobody has led yet; start a worker, or see why none gets the lease."
    )
    assert (found["leader"], found["decided_at"], found["journal"]) == (None, None, [])


async def test_the_last_decision_is_explained(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Allowance, cause, forecast, leader and journal, as the leader wrote them down."""
    one = leader(api, pool)
    await decided(one)
    await decided(one)
    found = await governor(api)
    assert (found["allowance_per_s"], found["in_force_per_s"], found["mode"]) == (100, 100, "enforce")
    assert (found["due"], found["oldest_due_age_s"]) == (1000, 10)
    assert found["needs_per_s"] == pytest.approx(50)
    assert found["reason"].startswith(f"100/s, limited by {found['limited_by']}: ")
    assert "by one)" in found["reason"]
    assert (found["leader"]["holder"], found["leader"]["epoch"]) == ("one", 1)
    assert [entry["allowance_per_s"] for entry in found["journal"]] == [100, 100]


async def test_a_pause_is_kept_with_who_and_why(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """It is in force with the next decision, and the sentence says who did it."""
    one = leader(api, pool)
    await decided(one)
    response = await api.ask("POST", "/v1/governor/pause", key=PLATFORM, json={"reason": "vacuum"})
    document = await read(response)
    assert (document["pause"]["reason"], document["enforced"]) == ("vacuum", True)
    assert document["pause"]["ordered_by"].startswith("api:")
    await decided(one)
    found = await governor(api)
    assert (found["allowance_per_s"], found["paused"], found["limited_by"]) == (0, True, "paused")
    assert "(vacuum)" in found["reason"]
    resumed = await read(await api.ask("POST", "/v1/governor/resume", key=PLATFORM, json={}))
    assert resumed["pause"] is None
    await decided(one)
    assert (await governor(api))["allowance_per_s"] > 0


async def test_an_override_only_lowers(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """For its time; above the ceiling it is refused; DELETE ends it."""
    path, asked = "/v1/governor/override", {"ceiling_per_s": 40, "ttl_s": 60, "reason": "sale"}
    above = await api.ask("PUT", path, key=PLATFORM, json=asked | {"ceiling_per_s": 20_001})
    await problem(above, 422, "out_of_range")
    document = await read(await api.ask("PUT", path, key=PLATFORM, json=asked))
    assert (document["override"]["ceiling_per_s"], document["override"]["reason"]) == (40, "sale")
    one = leader(api, pool)
    await decided(one)
    found = await governor(api)
    assert (found["allowance_per_s"], found["limited_by"], found["ceiling_per_s"]) == (40, "override", 40)
    assert "ceiling lowered to 40/s by api:" in found["reason"]
    assert (await read(await api.ask("DELETE", path, key=PLATFORM)))["override"] is None
    await decided(one)
    assert (await governor(api))["limited_by"] != "override"


@pytest.mark.parametrize(
    "body",
    [
        {"ceiling_per_s": 0, "ttl_s": 60, "reason": "x"},
        {"ceiling_per_s": 40, "ttl_s": 0, "reason": "x"},
        {"ceiling_per_s": 40, "ttl_s": 604_801, "reason": "x"},
        {"ceiling_per_s": 40, "ttl_s": 60},
        {"ceiling_per_s": "40", "ttl_s": 60, "reason": "x"},
    ],
)
async def test_an_override_out_of_range_is_refused(api: Api, body: dict[str, Any]) -> None:
    """Each field has a range, and a reason is needed."""
    await problem(await api.ask("PUT", "/v1/governor/override", key=PLATFORM, json=body), 422, "invalid")


async def test_a_repeated_order_is_given_once(api: Api, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """One Idempotency-Key, one order, the same answer."""
    headers = {"Idempotency-Key": "k"}
    answers = [
        await api.ask("POST", "/v1/governor/pause", key=PLATFORM, headers=headers, json={"reason": "x"})
        for _ in range(2)
    ]
    assert await read(answers[0]) == await read(answers[1])
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    assert await pool.fetchval("SELECT count(*) FROM governor_orders") == 1


async def test_tenants_may_not(api: Api) -> None:
    """The governor is the platform's."""
    await problem(await api.ask("GET", "/v1/governor", key=TENANT), 403, "forbidden")


# --- the commands


async def test_the_commands_say_and_order_the_same(
    api: Api, pool: asyncpg.Pool[asyncpg.Record], database_url: str
) -> None:
    """explain, pause, resume, override, journal; what is refused says why, with status 2."""
    one = leader(api, pool, interval_s=2.0)  # its lease outlives the commands
    await decided(one)
    environment = {"EXPIRY_DATABASE_URL": database_url, "EXPIRY_MODE": "sweep"}

    async def run(*args: str, **more: str) -> tuple[int, str]:
        done = await asyncio.to_thread(commands.invoke, "governor", *args, **environment, **more)
        return done.status, done.out + done.err

    code, said = await run("explain")
    assert (code, said.startswith("100/s, limited by recovering: ")) == (0, True)
    assert await run("pause", "--reason", "vacuum") == (0, "In force within 2 s: pause.\n")
    code, said = await run(
        "override", "--ceiling-per-s", "30", "--ttl-s", "60", "--reason", "sale", "--by", "ann"
    )
    assert said == "In force within 2 s: pause, override.\n"
    await decided(one)
    code, said = await run("explain")
    assert "paused by cli" in said
    assert "ceiling lowered to 30/s by ann" in said
    assert (await run("resume"))[1] == "In force within 2 s: override.\n"
    assert (await run("override", "--end"))[1] == "In force within 2 s: no order.\n"
    code, said = await run("override", "--ceiling-per-s", "99999", "--reason", "more")
    assert (code, "an override only lowers" in said) == (2, True)
    code, said = await run("pause", "--reason", "x", GOVERNOR_MODE="off")
    assert "GOVERNOR_MODE is off here" in said
    assert "the governor is off" in (await run("explain", GOVERNOR_MODE="off"))[1]
    code, said = await run("journal", "--limit", "1")
    assert (code, said.count("\n"), '"limited_by":"paused"' in said.replace(" ", "")) == (0, 1, True)
