"""Commands that run to an end: migrate, keys, doctor, dead-letters; and the help of every command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import asyncpg
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from expiry import schema
from expiry.__main__ import app
from tests.commands import ask, explained, invoke, prints, run, started
from tests.fleet import Pool, overdue, placed, states

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


@pytest.fixture
def stores(database_url: str, redis_url: str) -> dict[str, str]:
    """Give the environment that names the test's own stores."""
    return {"EXPIRY_DATABASE_URL": database_url, "EXPIRY_REDIS_URL": redis_url}


# --- help


def every_command(group: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401 - typer's own
    """Walk the tree of commands."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from every_command(command, *words, name)
        else:
            yield (*words, name), command


COMMANDS = dict(every_command(get_command(app)))


def test_every_command_is_there() -> None:
    """None got lost on the way to the command line."""
    assert {" ".join(words) for words in COMMANDS} == {
        *("dev", "demo", "api", "worker", "migrate", "doctor", "replay", "pause", "resume"),
        *("keys create", "keys list", "keys revoke"),
        *("dead-letters list", "dead-letters replay", "dead-letters discard"),
        *("governor explain", "governor pause", "governor resume", "governor override", "governor journal"),
    }


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_teaches(words: tuple[str, ...]) -> None:
    """Each command says what it does and what each parameter is for, in a terminal of 80 columns."""
    command = COMMANDS[words]
    assert all(parameter.help for parameter in command.params if parameter.name != "help")
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines())) <= 80
    assert "…" not in shown.output
    assert command.help.split()[0] in shown.output


def test_help_names_every_command() -> None:
    """Whoever knows nothing learns what there is, and where to begin."""
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    assert all(words[0] in shown for words in COMMANDS)
    assert "Start with `expiry dev`" in shown


# --- migrate


@pytest.fixture
async def empty(conn: Connection, stores: dict[str, str]) -> dict[str, str]:
    """Give the environment of a database without any schema."""
    await conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return stores


async def test_migrations_may_run_in_parallel_and_again(empty: dict[str, str]) -> None:
    """A fleet that starts together, each with its own migrate, ends with one whole schema."""
    ended = await asyncio.gather(*(run("migrate", **empty) for _ in range(3)))
    said = f"The schema has version {schema.VERSION}.\n"
    assert {(e.status, e.out, e.err) for e in ended} == {(0, said, "")}
    assert await prints("migrate", **empty) == said
    await prints("doctor", **empty)


# --- keys


async def test_keys_open_the_api_until_they_are_revoked(stores: dict[str, str]) -> None:
    """A key is shown once, works at once, is listed without its secret, and ends when it is revoked."""
    create = ("keys", "create", "--name", "shop's own", "--tenant", "shop")
    kept = (await prints(*create, **stores)).strip()
    ended = (await prints(*create, "--scope", "read", **stores)).strip()
    platform = (await prints("keys", "create", "--platform", **stores)).strip()
    listed = await prints("keys", "list", **stores)
    assert not any(key in listed for key in (kept, ended, platform))
    rows = {tuple(row["scopes"]): row for row in map(json.loads, listed.splitlines())}
    assert {(row["tenant_id"], row["name"], row["revoked_at"]) for row in rows.values()} == {
        ("shop", "shop's own", None),
        (None, None, None),
    }
    await prints("keys", "revoke", rows["read",]["id"], **stores)
    async with started("api", **stores, EXPIRY_API_PORT="0") as running:
        api = await running.api()
        assert (await ask("PUT", f"{api}/v1/resources/r", key=kept, body={"capacity": 1}))[0] == 200
        assert (await ask("GET", f"{api}/v1/resources/r", key=ended))[0] == 401
        assert (await ask("GET", f"{api}/v1/overview", key=platform))[0] == 200
        assert (await running.stop())[0] == 0


# --- doctor


async def test_the_doctor_passes_a_healthy_store(pool: Pool, stores: dict[str, str]) -> None:
    """Status 0; every check is told, for people and for machines."""
    await placed(pool, 3, ttl_s=60)
    shown, as_json = await prints("doctor", **stores), await prints("doctor", "--json", **stores)
    findings = json.loads(as_json)
    assert all(finding["ok"] for finding in findings)
    assert {f["check"] for f in findings} >= {"schema", "one_end", "counters", "clocks", "wakeups"}
    assert shown.count("✓") == sum(bool(finding["promise"]) for finding in findings)


async def test_the_doctor_finds_damage(conn: Connection, pool: Pool, stores: dict[str, str]) -> None:
    """Status 1; the check that failed is named, and so is the hold."""
    [hold] = await placed(pool, 1, ttl_s=60)
    await conn.execute("UPDATE holds SET generation = 2")
    shown = await asyncio.to_thread(invoke, "doctor", **stores)
    as_json = await asyncio.to_thread(invoke, "doctor", "--json", **stores)
    assert (shown.status, as_json.status, shown.err + as_json.err) == (1, 1, "")
    [failed] = [finding for finding in json.loads(as_json.out) if not finding["ok"]]
    assert (failed["check"], failed["count"]) == ("whole_history", 1)
    assert str(hold.id) in failed["examples"][0]
    assert "✗" in shown.out
    assert str(hold.id) in shown.out


# --- dead letters

FAIL = """
WITH failed AS (UPDATE holds SET attempts = 5, next_attempt_at = 'infinity' RETURNING *)
INSERT INTO dead_letters (tenant_id, kind, hold_id, generation, reason, attempts, first_error, last_error,
                          first_failed_at, last_failed_at, state)
SELECT tenant_id, 'expire', id, generation, '22003', 5, 'first', 'last', now(), now(), 'open' FROM failed
"""


async def test_dead_letters_are_replayed_and_discarded(pool: Pool, stores: dict[str, str]) -> None:
    """Both name what they did, who did it is kept, and a replayed hold may be tried again."""
    await overdue(pool, 2)
    await pool.execute(FAIL)
    listed = [json.loads(line) for line in (await prints("dead-letters", "list", **stores)).splitlines()]
    assert [letter["last_error"] for letter in listed] == ["last", "last"]
    replayed, discarded = (str(letter["id"]) for letter in listed)
    assert await prints("dead-letters", "replay", replayed, "--by", "ann", **stores) == f"{replayed}\n"
    assert await prints("dead-letters", "discard", discarded, "--by", "bob", **stores) == f"{discarded}\n"
    assert await prints("dead-letters", "list", **stores) == ""
    [left] = (await prints("dead-letters", "list", "--state", "discarded", **stores)).splitlines()
    assert json.loads(left)["resolved_by"] == "bob"
    assert await states(pool) == {"held": 2}
    assert await pool.fetchval("SELECT count(*) FROM holds WHERE next_attempt_at IS NULL") == 1
    explained(
        await asyncio.to_thread(invoke, "dead-letters", "replay", replayed, **stores), "list them first"
    )


# --- slips of the pen


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("pause wroker --reason x", "it is one of worker, promoter, sweep, prune"),
        ("keys create", "Give either --tenant NAME or --platform"),
        ("keys create --tenant shop --platform", "Give either --tenant NAME or --platform"),
        ("keys create --tenant shop --scope all", "scopes are one or more of holds, read"),
        ("keys revoke nobody", "list them first"),
        ("replay log.csv", "--api-key or EXPIRY_API_KEY"),
    ],
)
def test_a_slip_is_explained(stores: dict[str, str], words: str, remedy: str) -> None:
    """Status 2 and one sentence that says what to write instead."""
    explained(invoke(*words.split(), **stores), remedy)
