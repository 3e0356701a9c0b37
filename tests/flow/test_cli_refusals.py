"""What a command cannot start with is one sentence that says what to do, exit status 2, and no password."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import asyncpg
import pytest

from expiry import schema
from tests.commands import explained, invoke, run

ALL = ("api", "worker", "doctor", "migrate")
SECRET = "s3cret"  # noqa: S105 - to be looked for in what is printed
CLOSED = f"postgresql://joe:{SECRET}@127.0.0.1:1/none"


def refused(commands: tuple[str, ...], *remedies: str, **environment: str) -> None:
    """Check that each of the commands ends with the same sentence."""
    endings = [invoke(command, **environment) for command in commands]
    assert len({explained(ended, *remedies, secret=SECRET) for ended in endings}) == 1


def other(url: str, *, path: str | None = None, user: str | None = None) -> str:
    """Return the URL with another database or another user."""
    parts = urlsplit(url)
    netloc = parts.netloc if user is None else f"{user}:{SECRET}@{parts.hostname}:{parts.port}"
    return parts._replace(netloc=netloc, path=parts.path if path is None else path).geturl()


def execute(url: str, statement: str) -> None:
    """Do something to a database."""

    async def connected() -> None:
        conn = await asyncpg.connect(url)
        await conn.execute(statement)
        await conn.close()

    asyncio.run(connected())


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"EXPIRY_MODE": "fast"},
            "expiry: EXPIRY_MODE: Input should be 'hybrid', 'queue' or 'sweep' (it is 'fast').",
        ),
        ({"EXPIRY_LEASE_S": "0"}, "EXPIRY_LEASE_S: Input should be greater than or equal to 1 (it is '0')."),
        (
            {"EXPIRY_MODE": "queue", "EXPIRY_SWEEP_GRACE_S": "1"},
            "expiry: EXPIRY_SWEEP_GRACE_S has no meaning in queue mode: unset it.",
        ),
        ({"EXPIRY_DATABASE_URL": f"joe:{SECRET}@h/x"}, "EXPIRY_DATABASE_URL: must start with postgresql://"),
        (
            {"EXPIRY_DATABASE_URL": f"postgresql://joe:{SECRET}/@h/x"},
            "EXPIRY_DATABASE_URL: cannot be read: in a password write %2F for / and %40 for @.",
        ),
        ({"EXPIRY_REDIS_URL": f"h:{SECRET}"}, "EXPIRY_REDIS_URL: must start with redis:// or rediss://"),
        ({"EXPIRY_REDIS_URL": f"redis://:{SECRET}/@h"}, "EXPIRY_REDIS_URL: cannot be read: in a password"),
        ({"EXPIRY_DATABASE_URL": CLOSED}, "postgresql://joe:***@127.0.0.1:1/none"),
        (
            {"EXPIRY_DATABASE_URL": f"postgresql://joe:{SECRET}@a,b:x/none"},
            "it cannot be read (in a password write %2F for / and %40 for @)",
        ),
        (
            {"EXPIRY_DATABASE_URL": f"postgresql://127.0.0.1:1/none?user=joe&password={SECRET}"},
            "password=***: [Errno 111] Connection refused. Start it, or correct EXPIRY_DATABASE_URL.",
        ),
    ],
)
def test_settings_that_cannot_be(environment: dict[str, str], said: str) -> None:
    """Bad values, unreadable URLs and a server that is not there are told by every command."""
    refused(ALL, said, **environment)


async def test_the_program_ends_like_that() -> None:
    """What holds within this process holds for one of its own."""
    endings = await asyncio.gather(*(run(command, EXPIRY_DATABASE_URL=CLOSED) for command in ALL))
    said = "Connection refused. Start it, or correct EXPIRY_DATABASE_URL."
    assert len({explained(ended, said, secret=SECRET) for ended in endings}) == 1


def test_several_bad_settings_are_told_together() -> None:
    """Whoever mends one does not meet the next one at the next start."""
    ended = invoke("worker", EXPIRY_LEASE_S="0", EXPIRY_BATCH_MAX="many")
    assert (ended.status, [line.split(":")[:2] for line in ended.err.splitlines()]) == (
        2,
        [["expiry", " EXPIRY_LEASE_S"], ["expiry", " EXPIRY_BATCH_MAX"]],
    )


def test_a_governor_that_contradicts_itself() -> None:
    """Its settings are checked by the same rules."""
    said = "expiry: GOVERNOR_FLOOR_PER_S (9.0) must be at most GOVERNOR_CEILING_PER_S (1.0)."
    refused(("api", "worker"), said, GOVERNOR_FLOOR_PER_S="9", GOVERNOR_CEILING_PER_S="1")


# --- PostgreSQL


def test_a_wrong_password(database_url: str) -> None:
    """The server's own word, and whom to tell otherwise."""
    url = other(database_url, user="expiry")
    refused(ALL, "password authentication failed", "correct EXPIRY_DATABASE_URL", EXPIRY_DATABASE_URL=url)


def test_a_database_that_is_not_there(database_url: str) -> None:
    """Its name is told."""
    url = other(database_url, path="/nowhere")
    refused(ALL, 'database "nowhere" does not exist', EXPIRY_DATABASE_URL=url)


def test_a_database_without_the_schema(database_url: str, redis_url: str) -> None:
    """Whatever needs the schema says how to create it."""
    execute(database_url, "DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    environment = {"EXPIRY_DATABASE_URL": database_url, "EXPIRY_REDIS_URL": redis_url}
    refused(("api", "worker", "doctor"), "run `expiry migrate`", **environment)
    explained(invoke("replay", "log.csv", "--api-key", "k", **environment), "run `expiry migrate`")


@pytest.mark.parametrize(
    ("version", "commands", "remedy"),
    [(999, ALL, "upgrade this program"), (0, ("api", "worker", "doctor"), "run `expiry migrate`")],
)
def test_a_schema_of_another_version(
    database_url: str, version: int, commands: tuple[str, ...], remedy: str
) -> None:
    """The one that is behind is to be brought forward: the database or the program."""
    execute(database_url, f"UPDATE expiry_schema SET version = {version}")
    said = (
        f"expiry: The database has schema version {version}, this program needs {schema.VERSION}: {remedy}."
    )
    refused(commands, said, EXPIRY_DATABASE_URL=database_url)


@pytest.fixture
def guest(database_url: str) -> Iterator[str]:
    """Give the URL of somebody who may look at the schema and nothing else."""
    execute(
        database_url,
        f"DROP SCHEMA public CASCADE; CREATE SCHEMA public; CREATE ROLE guest LOGIN PASSWORD '{SECRET}'; "
        "GRANT USAGE ON SCHEMA public TO guest",
    )
    yield other(database_url, user="guest")
    execute(database_url, "DROP OWNED BY guest; DROP ROLE guest")


def test_a_user_who_may_create_nothing(guest: str) -> None:
    """What the database refuses is told in its own words."""
    said = "PostgreSQL failed (permission denied for schema public): see its log, then try again."
    explained(invoke("migrate", EXPIRY_DATABASE_URL=guest), said)


# --- Redis


@pytest.mark.parametrize("password", [SECRET, f"{SECRET}@{SECRET}"])
def test_a_redis_that_is_not_there(database_url: str, password: str) -> None:
    """It says how to do without, and hides a password even with an @ in it."""
    refused(
        ("api", "worker"),
        "Redis cannot be used at redis://:***@127.0.0.1:1/0",
        "or set EXPIRY_MODE=sweep to do without it",
        EXPIRY_DATABASE_URL=database_url,
        EXPIRY_REDIS_URL=f"redis://:{password}@127.0.0.1:1/0",
    )


def test_a_redis_with_another_password(database_url: str, redis_url: str) -> None:
    """Its answer is told."""
    url = f"redis://:{SECRET}@{urlsplit(redis_url).netloc.rpartition('@')[2]}/0"
    remedy = ("invalid username-password pair", "correct EXPIRY_REDIS_URL")
    refused(("api", "worker"), *remedy, EXPIRY_DATABASE_URL=database_url, EXPIRY_REDIS_URL=url)


# --- ports


@pytest.fixture
def taken() -> Iterator[int]:
    """Give a port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        yield somebody.getsockname()[1]


def test_a_port_in_use(database_url: str, redis_url: str, taken: int) -> None:
    """It is named, for the API and for the worker's metrics."""
    environment = {"EXPIRY_DATABASE_URL": database_url, "EXPIRY_REDIS_URL": redis_url}
    environment |= {"EXPIRY_API_PORT": str(taken), "EXPIRY_METRICS_PORT": str(taken)}
    refused(("api", "worker"), f"Cannot listen on 127.0.0.1:{taken}", "choose another", **environment)
