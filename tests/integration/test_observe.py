"""The gauges say what is due in both stores and how old it is, cheaply, and keep their word in an outage."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest
from prometheus_client import REGISTRY

from expiry import observe as module
from expiry.observe import Observer
from expiry.wakeups import Wakeups
from tests.fleet import Pool, due, overdue, placed, settings_for, wakeups_on
from tests.proxy import proxy_to


@pytest.fixture
async def wakeups(database_url: str, redis_url: str) -> AsyncIterator[Wakeups]:
    """Give the test the queue."""
    async with wakeups_on(settings_for(database_url, redis_url)) as wakeups:
        yield wakeups


def gauge(name: str, **labels: str) -> float:
    """Return what a gauge says."""
    value = REGISTRY.get_sample_value(name, labels)
    assert value is not None
    return value


def oldest_s() -> tuple[float, float]:
    """Return the ages of the oldest due hold and of the head of the queue."""
    name = "expiry_oldest_due_age_seconds"
    return gauge(name, store="database"), gauge(name, store="queue")


FAIL = """
WITH failed AS (UPDATE holds SET attempts = 1, next_attempt_at = now() + interval '1 hour'
                 WHERE id = $1 RETURNING *)
INSERT INTO dead_letters (tenant_id, kind, hold_id, generation, reason, attempts, first_error, last_error,
                          first_failed_at, last_failed_at, state)
SELECT tenant_id, 'expire', id, generation, '22003', 5, 'first', 'last', now(), now(), 'open' FROM failed
"""


async def test_the_gauges_tell_both_stores(pool: Pool, wakeups: Wakeups) -> None:
    """Due, backed off and dead are told apart; what is not due yet counts in the queue only."""
    late = await overdue(pool, 4, by_s=60)
    later = await placed(pool, 2, ttl_s=600)
    await pool.execute(FAIL, late[3].id)
    await wakeups.enqueue_due(due([*late[1:3], *later]))
    await Observer(pool, wakeups).look()
    assert gauge("expiry_overdue_holds") == 3
    assert gauge("expiry_backed_off_holds") == 1
    assert gauge("expiry_dead_letters_open") == 1
    assert gauge("expiry_queue_wakeups") == 4
    in_database, in_queue = oldest_s()
    assert 60 <= in_queue <= in_database < 65


async def test_nothing_due_is_age_zero(pool: Pool, wakeups: Wakeups) -> None:
    """Deadlines ahead are no negative age, and empty stores are none either."""
    await Observer(pool, wakeups).look()
    assert oldest_s() == (0, 0)
    await wakeups.enqueue_due(due(await placed(pool, 1, ttl_s=600)))
    await Observer(pool, wakeups).look()
    assert oldest_s() == (0, 0)
    assert gauge("expiry_overdue_holds") == 0
    assert gauge("expiry_queue_wakeups") == 1


async def test_without_a_queue_the_database_is_told(pool: Pool) -> None:
    """In sweep mode nobody asks for Redis."""
    await overdue(pool, 2)
    await Observer(pool, None).look()
    assert gauge("expiry_overdue_holds") == 2


async def test_counting_is_bounded(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million due holds must not make a look expensive."""
    monkeypatch.setattr(module, "COUNT_MAX", 3)
    await overdue(pool, 5)
    await Observer(pool, None).look()
    assert gauge("expiry_overdue_holds") == 3


async def test_an_outage_is_raised_and_the_last_look_stands(pool: Pool, database_url: str) -> None:
    """The loop counts the failure; a gauge that fell to 0 would call off an alarm."""
    await overdue(pool, 2)
    await Observer(pool, None).look()
    async with (
        proxy_to(database_url) as proxy,
        asyncpg.create_pool(proxy.url, min_size=1, max_size=1, timeout=2) as cut_off,
    ):
        proxy.refuse()
        with pytest.raises((OSError, asyncpg.PostgresError, asyncpg.InterfaceError)):
            await Observer(cut_off, None).look()
    assert gauge("expiry_overdue_holds") == 2
