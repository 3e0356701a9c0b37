"""The event feed skips nothing: whoever commits late, whatever else runs, across restarts and restores."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import pytest
from prometheus_client import REGISTRY

from expiry import holds, local, outbox, prune, schema
from expiry.local import wheels
from expiry.observe import Observer
from expiry.outbox import Position
from tests import scene
from tests.helpers import data_parent, eventually
from tests.scene import TENANT, Pool


class Reader:
    """A consumer that keeps its cursor, as it should, after every page."""

    def __init__(self, after: Position = outbox.OLDEST) -> None:
        """Begin there."""
        self.after = after
        self.keys: list[str] = []

    async def read(self, conn: holds.Conn, *, limit: int = 100, **only: object) -> list[str]:
        """Read to the end of the feed; answer the keys that are new."""
        new: list[str] = []
        more = True
        while more:
            page = await outbox.read(conn, tenant_id=TENANT, after=self.after, limit=limit, **only)  # type: ignore[arg-type]
            assert not page.expired
            new += [event.key for event in page.events]
            self.after, more = page.next, page.more
        self.keys += new
        return new


async def keys_of(conn: holds.Conn, tenant_id: str = TENANT) -> list[str]:
    """Answer every event's key."""
    rows = await conn.fetch("SELECT key FROM outbox WHERE tenant_id = $1", tenant_id)
    return sorted(row["key"] for row in rows)


@asynccontextmanager
async def connected(url: str, n: int) -> AsyncIterator[list[asyncpg.Connection[asyncpg.Record]]]:
    """Open connections."""
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(n):
            conn = await asyncpg.connect(url)
            stack.push_async_callback(conn.close)
            found.append(conn)
        yield found


async def test_a_transaction_that_began_earlier_and_commits_later_is_not_skipped(database_url: str) -> None:
    """Its events come with the ones that waited for it, before them."""
    async with connected(database_url, 3) as (slow, fast, observer):
        reader = Reader()
        async with scene.unfinished(slow) as transaction:
            early = await scene.place(slow, "a")
            late = await scene.place(fast, "b")
            assert await reader.read(observer) == []
            await transaction.commit()
        assert await reader.read(observer) == [f"place:{early.id}:1", f"place:{late.id}:1"]


async def test_a_transaction_has_its_number_before_its_events(database_url: str) -> None:
    """Whoever wrote anything before counts from then on, even if its hold is the last of all."""
    async with connected(database_url, 3) as (slow, fast, observer):
        reader = Reader()
        async with scene.unfinished(slow) as transaction:
            await slow.execute("SELECT pg_current_xact_id()")
            await scene.place(fast, "b")
            assert await reader.read(observer) == []
            await scene.place(slow, "a")
            await transaction.commit()
        assert len(await reader.read(observer)) == 2


async def step(
    rng: random.Random,
    open_: dict[int, tuple[holds.Conn, asyncpg.transaction.Transaction]],
    idle: list[holds.Conn],
) -> None:
    """Begin a transaction with a hold, add one, commit or roll back."""
    if idle and (not open_ or rng.random() < 0.5):
        conn = idle.pop(rng.randrange(len(idle)))
        transaction = conn.transaction()
        await transaction.start()
        open_[id(conn)] = (conn, transaction)
        await scene.place(conn, f"r{rng.randrange(5)}")
        return
    conn, transaction = open_[rng.choice(list(open_))]
    draw = rng.random()
    if draw < 0.4:
        hold = await scene.place(conn, f"r{rng.randrange(5)}")
        await holds.release(conn, hold.id, tenant_id=TENANT)
        return
    await (transaction.commit() if draw < 0.85 else transaction.rollback())
    del open_[id(conn)]
    idle.append(conn)


@pytest.mark.parametrize("seed", range(8))
async def test_any_order_of_commits_is_read_once_and_whole(database_url: str, seed: int) -> None:
    """Transactions begin, write, commit and roll back at random; a reader in small pages misses and repeats none."""
    rng = random.Random(seed)  # noqa: S311 - to be repeated
    async with connected(database_url, 7) as (observer, *writers):
        idle: list[holds.Conn] = [*writers]
        open_: dict[int, tuple[holds.Conn, asyncpg.transaction.Transaction]] = {}
        reader = Reader()
        for _ in range(60):
            await step(rng, open_, idle)
            if rng.random() < 0.5:
                await reader.read(observer, limit=rng.choice((1, 3, 100)))
        for _, transaction in open_.values():
            await transaction.commit()
        await reader.read(observer)
        assert sorted(reader.keys) == await keys_of(observer)


async def test_a_reader_beside_busy_writers_misses_nothing(pool: Pool, conn: holds.Conn) -> None:
    """Concurrent places and ends, and a reader that never rests."""
    done = asyncio.Event()
    reader = Reader()

    async def write() -> None:
        for _ in range(60):
            async with pool.acquire() as mine, mine.transaction():
                hold = await scene.place(mine, "busy")
                await holds.confirm(mine, hold.id, tenant_id=TENANT)

    async def follow() -> None:
        while not done.is_set():
            await reader.read(conn, limit=7)
        await reader.read(conn)

    following = asyncio.create_task(follow())
    await asyncio.gather(*(write() for _ in range(6)))
    done.set()
    await following
    assert sorted(reader.keys) == await keys_of(conn)
    assert len(reader.keys) == 720


async def test_a_long_writer_in_another_database_delays_nothing(database_url: str) -> None:
    """Its transaction is older than all of ours, but it cannot write here."""
    elsewhere = urlsplit(database_url)._replace(path="/expiry").geturl()
    async with (
        connected(elsewhere, 1) as (stranger,),
        connected(database_url, 1) as (conn,),
        scene.unfinished(stranger),
    ):
        await stranger.execute("SELECT pg_current_xact_id()")
        hold = await scene.place(conn, "a")
        assert await Reader().read(conn) == [f"place:{hold.id}:1"]


async def test_a_long_writer_here_is_seen_in_the_delay(pool: Pool) -> None:
    """The gauge grows while events wait for it, and falls to nothing when it ends."""
    now_s = 100.0
    observer = Observer(pool, None, clock=lambda: now_s)

    async def delay_s() -> float | None:
        await observer.look()
        return REGISTRY.get_sample_value("expiry_events_delay_seconds")

    assert await delay_s() == 0
    async with pool.acquire() as slow, scene.unfinished(slow) as transaction:
        await slow.execute("SELECT pg_current_xact_id()")
        assert await delay_s() == 0  # nothing waits for it yet
        async with pool.acquire() as fast:
            await scene.place(fast, "a")
        now_s = 130.0
        assert await delay_s() == 30
        now_s = 200.0
        assert await delay_s() == 100
        await transaction.commit()
    now_s = 201.0
    assert await delay_s() == 0


async def test_a_role_that_sees_nobody_else_reads_all(database_url: str, conn: holds.Conn) -> None:
    """Who may not look at other sessions waits for strangers too, but is told nothing wrong."""
    await conn.execute("DROP ROLE IF EXISTS plain_reader")
    await conn.execute("CREATE ROLE plain_reader LOGIN PASSWORD 'plain'")
    await conn.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO plain_reader")
    url = urlsplit(database_url)
    plain = url._replace(netloc=f"plain_reader:plain@{url.hostname}:{url.port}").geturl()
    try:
        async with connected(database_url, 1) as (slow,), connected(plain, 1) as (reader,):
            follow = Reader()
            async with scene.unfinished(slow) as transaction:
                await scene.place(slow, "a")
                await scene.place(conn, "b")
                assert await follow.read(reader) == []
                await transaction.commit()
            assert len(await follow.read(reader)) == 2
    finally:
        await conn.execute("DROP OWNED BY plain_reader; DROP ROLE plain_reader")


async def test_each_tenant_reads_its_own(conn: holds.Conn) -> None:
    """Others' events are not there, nor do they cost a page anything."""
    mine = await scene.place(conn, "a")
    for _ in range(3):
        await scene.place(conn, "a", tenant_id="other")
    assert await Reader().read(conn, limit=1) == [f"place:{mine.id}:1"]


async def test_types_and_holds_can_be_picked(conn: holds.Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that finds nothing in the rows it looks at goes on after them."""
    monkeypatch.setattr(outbox, "SCAN_MAX", 4)
    picked = await scene.place(conn, "a")
    for _ in range(10):
        await scene.place(conn, "a")
    await holds.release(conn, picked.id, tenant_id=TENANT)
    page = await outbox.read(conn, tenant_id=TENANT, type_="hold.released", limit=2)
    assert (page.events, page.more) == ([], True)
    assert await Reader().read(conn, limit=2, type_="hold.released") == [f"release:{picked.id}:1"]
    assert await Reader().read(conn, hold_id=picked.id) == [f"place:{picked.id}:1", f"release:{picked.id}:1"]
    assert await Reader().read(conn, hold_id=picked.id, type_="hold.placed") == [f"place:{picked.id}:1"]


async def test_the_sequence_counts_upwards(conn: holds.Conn) -> None:
    """Placed and renewed have the generation, the end one more, a return two more."""
    hold = await scene.place(conn, "a")
    await holds.renew(conn, hold.id, tenant_id=TENANT, ttl_s=60)
    await holds.confirm(conn, hold.id, tenant_id=TENANT)
    await holds.return_(conn, hold.id, tenant_id=TENANT)
    page = await outbox.read(conn, tenant_id=TENANT)
    assert [(e.type, e.sequence) for e in page.events] == [
        ("hold.placed", 1),
        ("hold.renewed", 2),
        ("hold.confirmed", 3),
        ("hold.returned", 4),
    ]


# --- retention

BEFORE = datetime(2999, 1, 1, tzinfo=UTC)


async def test_a_cursor_before_what_was_pruned_has_expired(conn: holds.Conn) -> None:
    """Who has missed events is told; who has read all of them, and who begins anew, is not."""
    behind, abreast = Reader(), Reader()
    await scene.place(conn, "a")
    await behind.read(conn)
    for _ in range(2):
        await scene.place(conn, "a")
    await abreast.read(conn)
    assert await conn.fetchval(prune.PRUNE_OUTBOX, BEFORE, 2, TENANT) == 2
    page = await outbox.read(conn, tenant_id=TENANT, after=behind.after)
    assert page.expired
    assert await abreast.read(conn) == []
    assert len(await Reader().read(conn)) == 1
    await conn.fetchval(prune.PRUNE_OUTBOX, BEFORE, 2, TENANT)
    assert await abreast.read(conn) == []


async def test_a_quiet_reader_does_not_expire(conn: holds.Conn) -> None:
    """Whoever reads an empty page stays up to date: its cursor is past events that it never had to see."""
    quiet = Reader()
    await scene.place(conn, "a")
    await quiet.read(conn, type_="hold.expired")
    await conn.fetchval(prune.PRUNE_OUTBOX, BEFORE, 10, TENANT)
    assert await quiet.read(conn, type_="hold.expired") == []


async def test_a_reader_of_a_quiet_hold_does_not_expire(conn: holds.Conn) -> None:
    """Its cursor moves on with what happens to others, of which it has missed nothing."""
    quiet = Reader()
    hold = await scene.place(conn, "a")
    assert len(await quiet.read(conn, hold_id=hold.id)) == 1
    for _ in range(3):
        await scene.place(conn, "a")
        assert await quiet.read(conn, hold_id=hold.id) == []
    await conn.fetchval(prune.PRUNE_OUTBOX, BEFORE, 10, TENANT)
    await holds.release(conn, hold.id, tenant_id=TENANT)
    assert await quiet.read(conn, hold_id=hold.id) == [f"release:{hold.id}:1"]


async def test_a_reader_of_nothing_is_told_what_it_missed(conn: holds.Conn) -> None:
    """A cursor of an empty feed is not that of a beginner: events that came and were pruned expire it."""
    for began in (Reader(), Reader()):  # on a feed that was ever empty, and on one that is pruned empty
        assert await began.read(conn) == []
        assert await began.read(conn) == []
        await scene.place(conn, "a")
        await conn.fetchval(prune.PRUNE_OUTBOX, BEFORE, 10, TENANT)
        assert (await outbox.read(conn, tenant_id=TENANT, after=began.after)).expired


async def test_what_was_pruned_is_not_passed_while_older_ones_may_come(database_url: str) -> None:
    """A transaction older than the retention still comes; who begins now is told, or reads it, but never skips it."""
    async with connected(database_url, 2) as (slow, conn):
        async with scene.unfinished(slow) as transaction:
            await scene.place(slow, "a")
            await scene.place(conn, "b")
            await conn.fetchval(prune.PRUNE_OUTBOX, BEFORE, 10, TENANT)
            page = await outbox.read(conn, tenant_id=TENANT)
            assert page.events == []
            await transaction.commit()
        assert (await outbox.read(conn, tenant_id=TENANT, after=page.next)).expired
        assert len(await Reader().read(conn)) == 1


async def test_the_end_is_where_a_reader_of_everything_stands(conn: holds.Conn) -> None:
    """Whoever begins there gets what comes, and nothing that was."""
    for n in range(2):
        reader = Reader(await outbox.end(conn, tenant_id=TENANT))
        assert await reader.read(conn) == []
        everything = Reader()
        assert len(await everything.read(conn)) == n
        assert everything.after == reader.after
        await scene.place(conn, "a")
        assert len(await reader.read(conn)) == 1


async def test_a_cursor_is_never_beyond_what_was_committed(conn: holds.Conn) -> None:
    """Transactions that left no trace do not move it: after a crash their numbers are given out again."""
    reader = Reader()
    await scene.place(conn, "a")
    await reader.read(conn)
    read = reader.after
    async with scene.unfinished(conn) as transaction:
        await conn.execute("SELECT pg_current_xact_id()")
        await transaction.rollback()
    await reader.read(conn)
    assert reader.after == read


async def test_a_cursor_from_a_future_that_never_was_has_expired(conn: holds.Conn) -> None:
    """Nothing was ever written there: the database was set back behind everybody's back."""
    await scene.place(conn, "a")
    end = await outbox.end(conn, tenant_id=TENANT)
    for place in (Position(end.epoch, end.xid + 1_000_000, 1), Position(end.epoch + 1, 5, 1)):
        assert (await outbox.read(conn, tenant_id=TENANT, after=place)).expired


# --- restarts and restores


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """Name a directory for servers of the test's own."""
    with tempfile.TemporaryDirectory(prefix="expiry-", dir=data_parent()) as parent:
        yield Path(parent)


async def served(data_dir: Path, reader: Reader, *settings: str) -> list[str]:
    """Run servers on the directory, place a hold, read to the end; answer what was read."""
    with local.start(data_dir / "data", durable=False) as servers:
        async with connected(servers.database_url, 1) as (conn,):
            await schema.apply(conn)
            await scene.place(conn, "a")
            new = await reader.read(conn)
            for setting in settings:
                await conn.execute(setting)
            return new


async def connect_again(url: str) -> asyncpg.Connection[asyncpg.Record] | None:
    """Connect; None while the server recovers."""
    try:
        return await asyncpg.connect(url)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return None


@pytest.mark.parametrize("only", [{}, {"type_": "hold.placed"}, {"hold_id": UUID(int=0)}], ids=str)
async def test_a_crash_of_one_backend_skips_nothing(data_dir: Path, only: dict[str, Any]) -> None:
    """The server recovers without a new start and hands out again the numbers of transactions that left no trace."""
    reader, unfiltered = Reader(), Reader()
    with local.start(data_dir / "data") as servers:
        async with connected(servers.database_url, 1) as (conn,):
            await schema.apply(conn)
            await scene.place(conn, "a")
            for _ in range(20):
                async with scene.unfinished(conn) as transaction:
                    unwritten = await conn.fetchval("SELECT pg_current_xact_id()::text")
                    await transaction.rollback()
            await reader.read(conn, **only)
            await unfiltered.read(conn)
            os.kill(await conn.fetchval("SELECT pg_backend_pid()"), signal.SIGKILL)
        again = await eventually(lambda: connect_again(servers.database_url))
        assert again is not None
        try:
            placed = [await scene.place(again, "a") for _ in range(3)]
            first = await again.fetchval("SELECT xid::text FROM outbox WHERE hold_id = $1", placed[0].id)
            assert int(first) <= int(unwritten)  # or the test tests nothing
            expected = [f"place:{hold.id}:1" for hold in placed]
            assert await unfiltered.read(again) == expected
            assert await reader.read(again) == expected
        finally:
            await again.close()


async def test_a_restored_copy_continues_after_all_that_was_read(data_dir: Path) -> None:
    """Set back to yesterday's files, the server counts its transactions again: its events still come after."""
    reader = Reader()
    await served(data_dir, reader)
    shutil.copytree(data_dir / "data", data_dir / "backup", symlinks=True)
    for path in [data_dir / "backup", *(data_dir / "backup").rglob("*")]:
        owner = (data_dir / "data" / path.relative_to(data_dir / "backup")).stat()
        os.chown(path, owner.st_uid, owner.st_gid)
    for _ in range(3):
        assert len(await served(data_dir, reader)) == 1
    shutil.rmtree(data_dir / "data")
    (data_dir / "backup").rename(data_dir / "data")
    for _ in range(2):
        assert len(await served(data_dir, reader)) == 1


async def test_a_dump_restored_elsewhere_continues_after_all_that_was_read(
    data_dir: Path, database_url: str, conn: holds.Conn
) -> None:
    """A young server's transactions have small numbers: its events come after those of the dump all the same."""
    reader = Reader()
    await scene.place(conn, "a")
    await reader.read(conn)
    unread = await scene.place(conn, "b")
    dump = await asyncio.create_subprocess_exec(
        wheels.postgres_bin() / "pg_dump",
        "--no-owner",
        "--inserts",
        database_url,
        stdout=asyncio.subprocess.PIPE,
    )
    script, _ = await dump.communicate()
    assert dump.returncode == 0
    with local.start(data_dir / "young", durable=False) as servers:
        async with connected(servers.database_url, 1) as (young,):
            # What psql alone understands is left out.
            text = "\n".join(x for x in script.decode().splitlines() if not x.startswith("\\"))
            await young.execute(text)
            await young.execute("SET search_path = public")  # the dump has none
            # As if the old server had been in use for years.
            await young.execute("UPDATE outbox SET xid = (xid::text::bigint + 1000000000)::text::xid8")
            reader.after = reader.after._replace(xid=reader.after.xid + 1_000_000_000)
            placed = await scene.place(young, "c")
            assert await reader.read(young) == [f"place:{unread.id}:1", f"place:{placed.id}:1"]
            assert sorted(reader.keys) == await keys_of(young)


async def test_a_prepared_transaction_is_awaited_across_a_restart(data_dir: Path) -> None:
    """What was prepared before the restart and is committed after it is read before what came meanwhile."""
    reader = Reader()
    await served(data_dir, reader, "ALTER SYSTEM SET max_prepared_transactions = 5")
    with local.start(data_dir / "data", durable=False) as servers:
        async with connected(servers.database_url, 1) as (conn,):
            await conn.execute("BEGIN")
            prepared = await scene.place(conn, "b")
            await conn.execute("PREPARE TRANSACTION 'p'")
    later = []
    for last in (False, True):
        with local.start(data_dir / "data", durable=False) as servers:
            async with connected(servers.database_url, 1) as (conn,):
                later.append(await scene.place(conn, "c"))
                assert await reader.read(conn) == []
                if last:
                    await conn.execute("COMMIT PREPARED 'p'")
                    expected = [f"place:{hold.id}:1" for hold in (prepared, *later)]
                    assert await reader.read(conn) == expected


async def test_old_events_leave_tenant_by_tenant(conn: holds.Conn) -> None:
    """Only tenants whose oldest event is old are visited."""
    for tenant_id in ("a", "b", "c"):
        await scene.place(conn, "r", tenant_id=tenant_id)
    await conn.execute("UPDATE outbox SET occurred_at = occurred_at - interval '2 d' WHERE tenant_id <> 'b'")
    since = datetime.now(UTC) - timedelta(days=1)
    found = [row["tenant_id"] for row in await conn.fetch(prune.TENANTS_WITH_OLD_EVENTS, since, 10)]
    assert found == ["a", "c"]
