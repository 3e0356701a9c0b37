"""Each probe reads what it claims, on a real server under a load that is not ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from governor.calibrate import calibrate, register, show
from governor.probes import OVERLOADED, GrantMissingError, Probes
from governor.probes.canary import Canary, CommitLatency
from governor.probes.link import Conn
from governor.probes.statistics import Statistics, active_backends, connections, lock_waiters
from tests.helpers import eventually
from tests.postgres import Postgres
from tests.probing import paced

Shop = Callable[..., Awaitable[Conn]]
Start = Callable[..., Awaitable[Probes]]

PATIENT_S = 4.0  # for what is read once: a busy machine takes its time to connect
MEAN_INTERVAL_S = 2.0  # sessions report their activity once a second, if they touched a table
SHORT = "SELECT pg_sleep(0.05) FROM stock"
LONG = "SELECT pg_sleep(600) FROM stock"


@asynccontextmanager
async def at_work(*work: Callable[[], Awaitable[object]], again: bool = True) -> AsyncIterator[None]:
    """Do each work over and over (or once) meanwhile."""

    async def repeat(each: Callable[[], Awaitable[object]]) -> None:
        while True:
            await each()
            if not again:
                return

    tasks = [asyncio.ensure_future(repeat(each)) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def waiters(admin: Conn) -> int:
    """Count who waits for a lock."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    return int(await admin.fetchval(query))


async def test_a_quiet_server_reads_near_nothing(start_probes: Start) -> None:
    """Nobody works, waits or lags; the canary commits in its milliseconds."""
    probes = await start_probes(foreign_active_target=1, own_share_target=1)
    async for saturation in paced(probes):
        if None not in saturation.values():
            break
    assert set(saturation) == {
        "active_backends", "commit_latency", "connections", "foreign_active", "lock_wait", "lock_waiters",
        "own_share", "replication_lag",
    }  # fmt: skip
    values = probes.values
    assert values["lock_waiters"] == values["lock_wait"] == values["replication_lag"] == 0
    assert values["foreign_active"] == values["own_share"] == 0
    assert values["active_backends"] < 0.5
    assert 0 < values["commit_latency"] < 0.5
    assert probes.alerts == {}


async def test_active_backends_counts_short_statements(start_probes: Start, shop: Shop) -> None:
    """Three sessions that run one short statement after the other are three backends at work."""
    conns = [await shop() for _ in range(3)]
    probes = await start_probes(interval_s=MEAN_INTERVAL_S, commit_latency_target_s=None)
    work = [lambda conn=conn: conn.execute(SHORT) for conn in conns]
    async with at_work(*work):
        async for _ in paced(probes, within_s=40):
            if 2.4 <= probes.values.get("active_backends", 0) <= 3.6:
                break


async def test_active_backends_counts_a_statement_that_has_not_ended(start_probes: Start, shop: Shop) -> None:
    """A report that runs for minutes is at work from the start, not once it has ended."""
    conns = [await shop() for _ in range(3)]
    probes = await start_probes(commit_latency_target_s=None)
    async with at_work(*[lambda conn=conn: conn.execute(LONG) for conn in conns]):
        async for _ in paced(probes):
            if 2.9 <= probes.values.get("active_backends", 0) <= 3.1:
                break


async def test_a_long_statement_that_ends_is_not_counted_again(start_probes: Start, shop: Shop) -> None:
    """A session reports a statement's time with the next one: as an outlier, which is dropped."""
    conn = await shop()
    probes = await start_probes(commit_latency_target_s=None, active_backends_target=1, interval_s=0.5)
    async with at_work(lambda: conn.execute("SELECT pg_sleep(4) FROM stock"), again=False):
        async for saturation in paced(probes):
            if (saturation["active_backends"] or 0) > 0.9:
                break
        async for saturation in paced(probes):
            if (saturation["active_backends"] or 0) < 0.1:
                break
    highest = 0.0
    async for saturation in paced(probes):
        await conn.execute("SELECT FROM stock")
        highest = max(highest, probes.values.get("active_backends", 0.0))
        assert (saturation["active_backends"] or 0) < 0.2
        if highest > 1.9:  # it came, and did not show
            break


async def test_statements_longer_than_an_interval_are_one_backend(start_probes: Start, shop: Shop) -> None:
    """A session reports each of them at once, when the next one has ended; it is read as it went on."""
    conn = await shop()
    probes = await start_probes(commit_latency_target_s=None, interval_s=0.5)
    async with at_work(lambda: conn.execute("SELECT pg_sleep(1.3) FROM stock")):
        seen: list[float] = []
        async for _ in paced(probes):
            seen.append(probes.values.get("active_backends", 0.0))
            if len(seen) == 14:
                break
    assert max(seen[6:]) < 1.9, seen


async def test_backends_that_never_stopped_are_counted(start_probes: Start, shop: Shop) -> None:
    """The end of another's long statement, not yet reported, takes nothing from them."""
    steady, other = await shop(), await shop()
    probes = await start_probes(commit_latency_target_s=None, interval_s=0.5)
    async with (
        at_work(lambda: steady.execute(LONG)),
        at_work(lambda: other.execute("SELECT pg_sleep(3) FROM stock"), again=False),
    ):
        async for _ in paced(probes):
            if probes.values.get("active_backends", 0.0) > 1.9:
                break
        async for _ in paced(probes):
            assert probes.values.get("active_backends", 1.0) > 0.9
            if probes.values.get("active_backends", 2.0) < 1.1:
                break


async def test_foreign_and_own_backends_differ_by_application_name(start_probes: Start, shop: Shop) -> None:
    """Two of theirs and one of ours are two foreign ones, and a third ours; the probes are neither."""
    conns = [await shop("checkout"), await shop("checkout"), await shop("expiry-worker")]
    probes = await start_probes(foreign_active_target=4, own_share_target=1)
    async with at_work(*[lambda conn=conn: conn.execute(LONG) for conn in conns]):
        async for _ in paced(probes):
            if probes.values.get("foreign_active") == 2:
                break
        assert probes.values["own_share"] == pytest.approx(1 / 3)


async def test_a_lock_storm_is_seen(start_probes: Start, shop: Shop, admin: Conn) -> None:
    """Five that wait for one row are five waiters, and the first of them has waited longest."""
    conns = [await shop() for _ in range(6)]
    probes = await start_probes(lock_waiters_target=2.5, lock_wait_target_s=0.2)
    held = conns[0].transaction()
    await held.start()
    update = "UPDATE stock SET n = n + 1 WHERE id = 1"
    await conns[0].execute(update)
    async with at_work(*[lambda conn=conn: conn.execute(update) for conn in conns[1:]], again=False):
        await eventually(lambda: _is(waiters(admin), 5))
        async for saturation in paced(probes):
            if (saturation["lock_waiters"] or 0) > 1.9 and (saturation["lock_wait"] or 0) > 2:
                break
        assert probes.values["lock_waiters"] == 5
        query = "SELECT max(extract(epoch FROM clock_timestamp() - waitstart))::float8 FROM pg_locks"
        assert 0.2 < probes.values["lock_wait"] <= await admin.fetchval(query)
        await held.rollback()
        async for _ in paced(probes):
            if probes.values.get("lock_waiters") == probes.values.get("lock_wait") == 0:
                break


async def test_a_wait_for_an_advisory_lock_is_no_storm(start_probes: Start, shop: Shop, admin: Conn) -> None:
    """Who waits to become the leader waits for hours, and nothing is wrong; others' waits are seen beside it."""
    leader, next_one, customer = await shop(), await shop(), await shop()
    await leader.execute("SELECT pg_advisory_lock(1)")
    probes = await start_probes()
    async with at_work(lambda: next_one.execute("SELECT pg_advisory_lock(1)"), again=False):
        await eventually(lambda: _is(waiters(admin), 1))
        reads = 0
        async for _ in paced(probes):
            assert not probes.values.get("lock_waiters")
            assert not probes.values.get("lock_wait")
            reads += 1
            if reads == 3:
                break
        await leader.execute("BEGIN; LOCK TABLE stock")
        async with at_work(lambda: customer.execute("SELECT FROM stock"), again=False):
            await eventually(lambda: _is(waiters(admin), 2))
            async for _ in paced(probes):
                if "lock_wait" in probes.values:
                    break
            assert probes.values["lock_waiters"] == 1
            query = """
                SELECT extract(epoch FROM clock_timestamp() - waitstart)::float8
                  FROM pg_locks WHERE NOT granted AND locktype = 'relation'"""
            assert 0 < probes.values["lock_wait"] <= await admin.fetchval(query)


async def test_slow_commits_are_seen(start_probes: Start, admin: Conn) -> None:
    """Commits that each take 60 ms longer read as such (commit_delay, paid with others in transactions)."""
    await _set(admin, commit_delay="60000", commit_siblings="0")
    try:
        probes = await start_probes(commit_latency_target_s=0.03)
        async for saturation in paced(probes):
            if (saturation["commit_latency"] or 0) > 1.9:
                break
        assert 0.06 <= probes.values["commit_latency"] < 1
    finally:
        await _reset(admin, "commit_delay", "commit_siblings")


async def test_commits_that_hang_are_seen_while_they_do(start_probes: Start, admin: Conn) -> None:
    """Commits that wait for a standby nobody has read as long as they wait, and leave one backend, not many."""
    probes = await start_probes(commit_latency_target_s=0.05)
    await _set(admin, synchronous_standby_names="missing")
    try:
        async for saturation in paced(probes):
            assert saturation["commit_latency"] is not None
            if saturation["commit_latency"] > 8:
                break
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'governor-canary'"
        assert await admin.fetchval(query) == 1
    finally:
        await _reset(admin, "synchronous_standby_names")
    async for saturation in paced(probes):
        if (saturation["commit_latency"] or 9) < 1:
            break


async def test_a_canary_that_gives_up_leaves_no_backend_behind(server: Postgres, admin: Conn) -> None:
    """A commit that hangs too long is cancelled on the server: else each try would leave one there."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'governor-canary'"
    canary = Canary(server.url("probe"), timeout_s=0.3)
    probes = Probes([CommitLatency(target=0.05, ttl_s=2, source=canary)], interval_s=0.5)
    await _set(admin, synchronous_standby_names="missing")
    try:
        async with probes:
            reads = 0
            async for saturation in paced(probes):
                assert (saturation["commit_latency"] or 0) > 1
                assert await admin.fetchval(query) <= 1
                reads += 1
                if reads == 6:
                    break
    finally:
        await _reset(admin, "synchronous_standby_names")


async def test_a_canary_survives_what_nobody_expected(
    server: Postgres, admin: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task would be gone, the probe missing, and the fleet at its floor until another leads."""
    assert admin
    canary = Canary(server.url("probe"))
    fetchrow = canary._link.fetchrow  # noqa: SLF001
    fails = 3

    async def fetching(statement: str) -> asyncpg.Record | None:
        nonlocal fails
        fails -= 1
        if fails >= 0:
            raise asyncpg.InternalClientError("unexpected")
        return await fetchrow(statement)

    monkeypatch.setattr(canary._link, "fetchrow", fetching)  # noqa: SLF001
    probes = Probes([CommitLatency(target=0.05, ttl_s=2, source=canary)], interval_s=0.5)
    async with probes:
        async for saturation in paced(probes):
            if fails < 0 and saturation["commit_latency"] is not None:
                break


async def test_the_canary_waits_for_the_disk(start_probes: Start, admin: Conn) -> None:
    """Where commits do not wait for a flush the canary's do: else it would measure nothing."""
    await admin.execute("ALTER ROLE probe SET synchronous_commit = off")
    try:
        await _set(admin, synchronous_standby_names="missing")
        probes = await start_probes(commit_latency_target_s=0.05)
        async for saturation in paced(probes):
            if (saturation["commit_latency"] or 0) > OVERLOADED:
                break
    finally:
        await admin.execute("ALTER ROLE probe RESET synchronous_commit")
        await _reset(admin, "synchronous_standby_names")


async def test_connections_are_counted_against_those_one_may_have(
    start_probes: Start, shop: Shop, admin: Conn
) -> None:
    """Of 20 superusers keep 3: the rest is what the share is of."""
    probes = await start_probes()
    await shop()
    await shop()
    count = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
    async for _ in paced(probes):
        if probes.values.get("connections") == await admin.fetchval(count) / 17:
            break


async def test_too_many_clients_reads_above_the_target(start_probes: Start, shop: Shop) -> None:
    """Probes that find no connection left do not go missing; they read overloaded, and say why."""
    with contextlib.suppress(asyncpg.TooManyConnectionsError):
        while True:
            await shop()
    probes = await start_probes(interval_s=PATIENT_S)
    saturation = await probes.read()
    assert saturation["active_backends"] == saturation["connections"] == OVERLOADED
    async for saturation in paced(probes):
        if saturation["commit_latency"] == OVERLOADED:
            break
    assert "connection slots" in probes.alerts["connections"]


async def test_a_probe_keeps_its_connection_when_clients_are_too_many(
    start_probes: Start, shop: Shop
) -> None:
    """Started before, the probes go on reading: every connection is taken, which is 1."""
    probes = await start_probes(interval_s=PATIENT_S)
    with contextlib.suppress(asyncpg.TooManyConnectionsError):
        while True:
            await shop()
    await probes.read()
    assert probes.values["connections"] >= 1


async def test_a_role_without_the_grant_is_refused_at_start(start_probes: Start) -> None:
    """Others' activity would read as idle: the error names the grant, for the role at hand."""
    with pytest.raises(GrantMissingError, match="GRANT pg_read_all_stats TO blind"):
        await start_probes(role="blind", interval_s=PATIENT_S)


async def test_a_grant_that_is_lost_is_missing_and_says_so(start_probes: Start, admin: Conn) -> None:
    """Whoever revokes it meanwhile makes the probes missing with the next connection, not idle."""
    probes = await start_probes()
    await admin.execute("REVOKE pg_read_all_stats FROM probe")
    try:
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'governor-probes'"
        )
        async for saturation in paced(probes):
            if saturation["lock_waiters"] is None:
                break
        assert "GRANT pg_read_all_stats TO probe" in probes.alerts["lock_waiters"]
    finally:
        await admin.execute("GRANT pg_read_all_stats TO probe")


async def test_replication_lag_is_that_of_the_slowest_replica(start_probes: Start, server: Postgres) -> None:
    """A replica that replays late lags as long; without replicas the lag is 0."""
    probes = await start_probes(replication_lag_target_s=1)
    async for saturation in paced(probes):
        if saturation["replication_lag"] == 0:
            break
    with server.standby(recovery_min_apply_delay="3s"):
        async for _ in paced(probes):  # the canary's commits are what is replayed late
            if probes.values.get("replication_lag", 0) > 1:
                break
        assert probes.values["replication_lag"] < 10


async def test_a_restart_of_the_server_is_survived(start_probes: Start, server: Postgres) -> None:
    """Away, it reads above the target; back, it is read again, with nobody's help."""
    probes = await start_probes()
    server.stop()
    try:
        async for saturation in paced(probes):
            if min(each or 0.0 for each in saturation.values()) == OVERLOADED:
                break
    finally:
        server.start()
    async for saturation in paced(probes, within_s=40):
        if None not in saturation.values() and max(each or 0.0 for each in saturation.values()) < 1:
            break


async def test_an_unreachable_server_is_no_error_at_start(start_probes: Start) -> None:
    """A leader must come up during an outage: it reads above the target."""
    probes = await start_probes(interval_s=PATIENT_S, url="postgresql://probe:s3cret@127.0.0.1:1/postgres")
    saturation = await probes.read()
    assert saturation["active_backends"] == OVERLOADED
    assert not any("s3cret" in alert for alert in probes.alerts.values())


async def test_custom_sql_reads_a_number(start_probes: Start) -> None:
    """The first value of the first row, over its target."""
    probes = await start_probes(
        interval_s=PATIENT_S,
        custom_sql="SELECT 0.5 + 1, 'not this' UNION ALL SELECT 9, ''",
        custom_sql_target=3,
    )
    assert (await probes.read())["custom_sql"] == 0.5


async def test_custom_sql_that_takes_too_long_reads_above_the_target(start_probes: Start) -> None:
    """It is ended by the server, delays no other probe, and leaves nothing running."""
    probes = await start_probes(
        interval_s=PATIENT_S, custom_sql="SELECT pg_sleep(60), 1", custom_sql_target=3
    )
    saturation = await probes.read()
    assert saturation["custom_sql"] == OVERLOADED
    assert saturation["lock_waiters"] == 0


async def test_a_statement_that_an_administrator_ends_reads_above_the_target(
    start_probes: Start, admin: Conn
) -> None:
    """A server that ends connections, to shut down or to get room, is no missing signal."""
    probes = await start_probes(
        interval_s=PATIENT_S, custom_sql="SELECT pg_sleep(60), 1", custom_sql_target=3
    )
    end = """
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE application_name = 'governor-custom' AND wait_event = 'PgSleep'"""
    reading = asyncio.ensure_future(probes.read())
    await eventually(lambda: admin.fetch(end))
    assert (await reading)["custom_sql"] == OVERLOADED
    assert "terminating connection" in probes.alerts["custom_sql"]


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 'many'",
        "SELECT NULL::int",
        "SELECT 1 WHERE false",
        "SELECT",
        "nonsense",
        "SELECT nextval('tickets')",
    ],
)
async def test_custom_sql_without_a_number_is_absent(start_probes: Start, statement: str) -> None:
    """No number, no row, no SQL, no reading: it is optional, raises an alert and can write nothing."""
    probes = await start_probes(interval_s=PATIENT_S, custom_sql=statement, custom_sql_target=3)
    assert "custom_sql" not in await probes.read()
    assert probes.alerts["custom_sql"]


async def test_reading_costs_little_database_time(start_probes: Start, shop: Shop, admin: Conn) -> None:
    """All statistics of an interval take less than 5 ms of a backend, in the middle of a lock storm too."""
    conns = [await shop() for _ in range(8)]
    probes = await start_probes(foreign_active_target=4, own_share_target=1)
    pid = await admin.fetchval("SELECT pid FROM pg_stat_activity WHERE application_name = 'governor-probes'")
    async with admin.transaction():
        await admin.execute("LOCK TABLE stock")
        async with at_work(
            *[lambda conn=conn: conn.execute("SELECT * FROM stock") for conn in conns], again=False
        ):
            await eventually(lambda: _is(_waiting_for_stock(admin), 8))
            before_s, reads = cpu_s(pid), 0
            async for _ in paced(probes):
                reads += 1
                if reads == 20:
                    break
            each_s = (cpu_s(pid) - before_s) / reads
    assert each_s < 0.005


async def test_the_example_runs(server: Postgres, admin: Conn, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python of docs/probes.md, as it stands."""
    page = (Path(__file__).parents[3] / "docs" / "probes.md").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], namespace)  # noqa: S102 - ours
    assert await admin.fetchval("SELECT 1")
    await namespace["main"](server.url("probe"))
    assert "'pool_wait': 0.0" in capsys.readouterr().out


async def test_calibrate_sees_real_traffic(
    server: Postgres, admin: Conn, shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eleven seconds of a busy session: a target for what it did, none for what it did not do."""
    conn = await shop()
    assert await admin.fetchval("SELECT 1")
    source = Statistics(server.url("probe"), timeout_s=2)
    made = [make(target=1, ttl_s=1, source=source) for make in (active_backends, connections, lock_waiters)]
    probes = Probes(made, interval_s=0.1)
    async with at_work(lambda: conn.execute("SELECT FROM stock, pg_sleep(0.01)")), probes:
        found = {each.probe: each for each in await calibrate(probes, 11)}
    assert found["lock_waiters"].proposed is None
    assert found["connections"].proposed is None
    active = found["active_backends"]
    assert active.proposed == pytest.approx(active.p99 * 1.5, rel=0.1)
    show(list(found.values()), probes.alerts, Console(width=120))
    assert "GOVERNOR_ACTIVE_BACKENDS_TARGET=" in capsys.readouterr().out


async def test_the_command_tells_the_grant(server: Postgres, admin: Conn) -> None:
    """`governor calibrate` in a role that sees nothing ends with the statement that helps."""
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    assert await admin.fetchval("SELECT 1")
    words = ["calibrate", "--database-url", server.url("blind"), "--duration-s", "1"]
    result = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert result.exit_code == 1
    assert "GRANT pg_read_all_stats TO blind;" in result.output


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has had."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def _waiting_for_stock(admin: Conn) -> int:
    query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'stock'::regclass"
    return int(await admin.fetchval(query))


async def _is(found: Awaitable[int], wanted: int) -> bool:
    return await found == wanted


async def _set(admin: Conn, **settings: str) -> None:
    for name, value in settings.items():
        await admin.execute(f"ALTER SYSTEM SET {name} = '{value}'")
    await _reloaded(admin, settings)


async def _reset(admin: Conn, *names: str) -> None:
    for name in names:
        await admin.execute(f"ALTER SYSTEM RESET {name}")
    await admin.execute("SELECT pg_reload_conf()")


async def _reloaded(admin: Conn, settings: dict[str, str]) -> None:
    await admin.execute("SELECT pg_reload_conf()")
    for name, value in settings.items():
        await eventually(partial(_shows, admin, name, value))


async def _shows(admin: Conn, name: str, value: str) -> bool:
    return str(await admin.fetchval("SELECT setting FROM pg_settings WHERE name = $1", name)) == value
