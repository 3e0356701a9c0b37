"""Work that fails by its own fault: found, backed off, kept; a person decides, and it is written down."""

from __future__ import annotations

import asyncpg
import pytest

from expiry.deadletters import discard, list_, record_failure, replay
from expiry.errors import NotFoundError
from expiry.settings import Settings
from tests.faults import CURE, POISON
from tests.fleet import (
    TENANT,
    Counted,
    Pool,
    assert_kept,
    expired,
    looping,
    overdue,
    settings_for,
    states,
    sweep_of,
)
from tests.helpers import eventually

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def settings(database_url: str) -> Settings:
    """Give a sweep that tries three times, 50 and 100 ms apart."""
    return settings_for(database_url, NOWHERE, mode="sweep", attempts_max=3, retry_base_s=0.05)


async def given_up(pool: Pool, settings: Settings) -> int:
    """Let one poisoned hold become a dead letter; return its id."""
    await pool.execute(POISON)
    await overdue(pool, 1, resource="poison{}")
    return await next_letter(pool, settings)


async def next_letter(pool: Pool, settings: Settings) -> int:
    """Sweep until there is an open dead letter; return its id."""
    sweep = sweep_of(pool, settings)

    async def letter() -> int | None:
        await sweep.one_pass()
        found: int | None = await pool.fetchval("SELECT id FROM dead_letters WHERE state = 'open'")
        return found

    found = await eventually(letter)
    assert found is not None
    return found


async def test_bisection_finds_the_rows_at_fault(pool: Pool, settings: Settings) -> None:
    """Three of 64 fail: the other 61 end in the same pass, and only the three count an attempt."""
    await pool.execute(POISON)
    holds = await overdue(pool, 64)
    bad = [holds[i].id for i in (0, 31, 63)]
    await pool.execute("UPDATE holds SET resource_ids = '{poison}' WHERE id = ANY ($1)", bad)
    patient = settings.model_copy(update={"retry_base_s": 60})
    assert await sweep_of(pool, patient).one_pass() == {"expired": 61, "failed": 3}
    rows = await pool.fetch("SELECT id, attempts FROM holds WHERE attempts > 0 ORDER BY id")
    assert [tuple(r) for r in rows] == [(i, 1) for i in sorted(bad)]
    await assert_kept(pool)


async def test_it_backs_off_twice_as_long_each_time(pool: Pool, database_url: str) -> None:
    """Base x 2^attempts, with a fifth of jitter; until then no pass takes it."""
    settings = settings_for(database_url, NOWHERE, mode="sweep", retry_base_s=100)
    await pool.execute(POISON)
    [hold] = await overdue(pool, 1, resource="poison{}")
    sweep = sweep_of(pool, settings)
    for attempt, wait_s in enumerate((100, 200, 300), start=1):  # at most 300
        assert await sweep.one_pass() == {"failed": 1}
        assert await sweep.one_pass() == {}
        row = await pool.fetchrow(BACKED_OFF, hold.id)
        assert row is not None
        assert row["attempts"] == attempt
        assert 0.8 * wait_s - 1 < row["wait_s"] < 1.2 * wait_s
        await pool.execute("UPDATE holds SET next_attempt_at = clock_timestamp()")


BACKED_OFF = """
SELECT attempts, extract(epoch FROM next_attempt_at - clock_timestamp())::double precision AS wait_s
  FROM holds WHERE id = $1
"""


async def test_after_the_last_attempt_it_is_a_dead_letter(pool: Pool, settings: Settings) -> None:
    """It says which hold, why, how often, the first error and the last; and nothing tries it again."""
    counted = Counted()
    id_ = await given_up(pool, settings)
    [letter] = await list_(pool, tenant_id=TENANT)  # type: ignore[arg-type] # a pool fetches as well
    assert letter["id"] == id_
    assert letter["hold_id"] == await pool.fetchval("SELECT id FROM holds")
    assert (letter["kind"], letter["generation"], letter["attempts"]) == ("expire", 1, 3)
    assert letter["reason"] == "23514"
    assert letter["first_error"] == letter["last_error"] == "23514: poison"
    assert letter["first_failed_at"] < letter["last_failed_at"]
    assert (letter["resolved_at"], letter["resolved_by"]) == (None, None)
    assert counted("expiry_dead_letters_total") == 1
    assert await pool.fetchval("SELECT next_attempt_at = 'infinity' FROM holds")
    assert await sweep_of(pool, settings).one_pass() == {}
    assert counted("expiry_attempts_total", outcome="failed", by="sweep") == 2
    assert counted("expiry_attempts_total", outcome="dead", by="sweep") == 1


async def test_the_first_error_is_kept(pool: Pool, settings: Settings) -> None:
    """When the reason changes between attempts, the letter has both."""
    await pool.execute(POISON.replace("23514", "22012").replace("'poison'", "'at first'"))
    await overdue(pool, 1, resource="poison{}")
    await sweep_of(pool, settings).one_pass()
    await pool.execute(CURE + ";" + POISON)
    await next_letter(pool, settings)
    row = await pool.fetchrow("SELECT first_error, last_error, reason FROM dead_letters")
    assert row is not None
    assert tuple(row) == ("22012: at first", "23514: poison", "23514")


async def test_one_that_recovers_is_written_down_too(pool: Pool, settings: Settings) -> None:
    """Cured before it was given up, the hold ends by itself and its record says so."""
    await pool.execute(POISON)
    await overdue(pool, 1, resource="poison{}")
    sweep = sweep_of(pool, settings)
    await sweep.one_pass()
    await pool.execute(CURE)
    async with looping(pool, "sweep", sweep.one_pass, interval_s=0.05):
        await eventually(expired(pool, 1))
    row = await pool.fetchrow("SELECT state, attempts, resolved_by FROM dead_letters")
    assert row is not None
    assert tuple(row) == ("recovered", 1, "sweep")
    await assert_kept(pool)


async def test_replay_gives_fresh_attempts_and_names_who_asked(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], settings: Settings
) -> None:
    """Replayed after the cure, the hold ends; the record keeps who replayed it."""
    id_ = await given_up(pool, settings)
    await pool.execute(CURE)
    assert await replay(conn, [id_], by="ann") == [id_]
    assert await sweep_of(pool, settings).one_pass() == {"expired": 1}
    row = await pool.fetchrow(
        "SELECT state, resolved_by, resolved_at IS NOT NULL, attempts FROM dead_letters"
    )
    assert row is not None
    assert tuple(row) == ("replayed", "ann", True, 3)
    await assert_kept(pool)


async def test_replay_of_what_still_fails_is_a_new_dead_letter(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], settings: Settings
) -> None:
    """It gets all its attempts again, and the old record stays as it was closed."""
    first = await given_up(pool, settings)
    await replay(conn, [first], by="ann")
    second = await next_letter(pool, settings)
    rows = await pool.fetch("SELECT id, state, attempts FROM dead_letters ORDER BY id")
    assert [tuple(r) for r in rows] == [(first, "replayed", 3), (second, "open", 3)]


async def test_discard_closes_it_and_leaves_the_hold(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], settings: Settings
) -> None:
    """Nobody tries it again, and who decided so is known."""
    id_ = await given_up(pool, settings)
    await pool.execute(CURE)
    assert await discard(conn, [id_], by="bob") == [id_]
    assert await sweep_of(pool, settings).one_pass() == {}
    assert await states(pool) == {"held": 1}
    row = await pool.fetchrow("SELECT state, resolved_by FROM dead_letters")
    assert row is not None
    assert tuple(row) == ("discarded", "bob")


async def test_only_open_ones_are_resolved_and_only_once(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], settings: Settings
) -> None:
    """Ids that are unknown or resolved are left out; none at all is an error."""
    id_ = await given_up(pool, settings)
    assert await replay(conn, [id_, id_ + 1], by="ann") == [id_]
    for resolve in (replay, discard):
        with pytest.raises(NotFoundError):
            await resolve(conn, [id_], by="eve")
    assert await pool.fetchval("SELECT resolved_by FROM dead_letters") == "ann"


async def test_the_list_is_bounded_and_pages_newest_first(
    conn: asyncpg.Connection[asyncpg.Record], pool: Pool, settings: Settings
) -> None:
    """A tenant sees its own; `before` goes on where a page ended."""
    await pool.execute(POISON)
    await overdue(pool, 5, resource="poison{}")
    single = settings.model_copy(update={"attempts_max": 1})
    assert await sweep_of(pool, single).one_pass() == {"dead": 5}
    page = await list_(conn, limit=3)
    rest = await list_(conn, before=page[-1]["id"])
    ids = [letter["id"] for letter in page + rest]
    assert len(page) == 3
    assert ids == sorted(ids, reverse=True)
    assert len(set(ids)) == 5
    assert await list_(conn, tenant_id="another") == []
    assert await list_(conn, state="replayed") == []


@pytest.mark.parametrize("sqlstate", ["22012", "23514", "P0001"])
async def test_errors_that_lie_in_the_row_count(pool: Pool, settings: Settings, sqlstate: str) -> None:
    """Data, constraints and triggers: the row's own fault, so its attempt."""
    await pool.execute(POISON.replace("23514", sqlstate))
    await overdue(pool, 1, resource="poison{}")
    assert await sweep_of(pool, settings).one_pass() == {"failed": 1}


@pytest.mark.parametrize("sqlstate", ["08006", "40001", "53100", "55P03", "57014"])
async def test_errors_of_an_outage_do_not(pool: Pool, settings: Settings, sqlstate: str) -> None:
    """Connections, conflicts, disks, locks and timeouts: nobody's attempt, and the pass fails as a whole."""
    await pool.execute(POISON.replace("23514", sqlstate))
    await overdue(pool, 1, resource="poison{}")
    with pytest.raises(asyncpg.PostgresError) as raised:
        await sweep_of(pool, settings).one_pass()
    assert raised.value.sqlstate == sqlstate
    assert await pool.fetchval("SELECT max(attempts) FROM holds") == 0
    assert await pool.fetchval("SELECT count(*) FROM dead_letters") == 0


async def test_a_failure_of_what_has_ended_meanwhile_is_not_noted(
    pool: Pool, conn: asyncpg.Connection[asyncpg.Record], settings: Settings
) -> None:
    """Somebody else ended the hold after it failed here: there is nothing to retry and no record."""
    [hold] = await overdue(pool, 1)
    await sweep_of(pool, settings).one_pass()
    error = asyncpg.CheckViolationError("late")
    failure = await record_failure(conn, hold.id, 1, error=error, settings=settings)
    assert (failure.attempts, failure.dead) == (0, False)
    assert await pool.fetchval("SELECT count(*) FROM dead_letters") == 0
