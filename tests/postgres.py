"""A PostgreSQL of a test's own, of any version whose binaries there are; durable, as it is measured."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from expiry.local import postgres
from expiry.local.account import Account, choose, hand_over, open_way
from expiry.local.child import ENVIRONMENT, Child, Program, await_ready, end, spawn
from expiry.local.endpoints import Endpoints
from tests.helpers import data_parent

ADMIN = "admin"
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "20",
    "max_wal_senders": "4",
    "shared_buffers": "32MB",
    "dynamic_shared_memory_type": "mmap",
    "timezone": "UTC",
}


@dataclass
class Postgres:
    """A cluster and, between start and stop, its server. Everybody on this machine may log in."""

    bin_dir: Path
    home: Path
    account: Account
    settings: dict[str, str] = field(default_factory=dict)
    port: int = 0
    _child: Child | None = None

    def url(self, user: str = ADMIN) -> str:
        """The URL for a user, with a password that nobody asks for."""
        return f"postgresql://{user}:s3cret@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start the server, on the port it had before if it had one."""
        self.port = self.port or _free_port()
        settings = {**SETTINGS, **self.settings, "port": str(self.port)}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self._child = spawn(
            self._program, [str(self.bin_dir / "postgres"), "-D", str(self.home), *options], self.account
        )
        child = self._child
        await_ready(child, lambda: postgres.is_ready(child, Endpoints(self.port, 0, "")))

    def stop(self) -> None:
        """Stop the server if it runs."""
        child, self._child = self._child, None
        if child is not None:
            end(child)

    def initialise(self) -> None:
        """Create the cluster."""
        self.run(
            "initdb", "-D", str(self.home), f"--username={ADMIN}", "--auth=trust", "--no-sync", "--locale=C"
        )

    @contextmanager
    def standby(self, **settings: str) -> Iterator[Postgres]:
        """Run a streaming replica of this server, with settings of its own."""
        with tempfile.TemporaryDirectory(prefix="standby-", dir=data_parent()) as parent:
            replica = _in(Path(parent), self.bin_dir, settings=settings)
            replica.run(
                "pg_basebackup", "-D", str(replica.home), "-d", self.url(), "-R", "-X", "stream", "-c", "fast"
            )
            try:
                replica.start()
                yield replica
            finally:
                replica.stop()

    @property
    def _program(self) -> Program:
        return Program(
            name="PostgreSQL",
            home=self.home,
            log=self.home.with_suffix(".log"),
            pid_file=self.home / "postmaster.pid",
            farewell=postgres.FAREWELL,
        )

    def run(self, name: str, *words: str) -> None:
        """Run a program of this version to its end, as the server's account."""
        ours, account = self.account.is_ours, self.account
        subprocess.run(
            [self.bin_dir / name, *words],
            check=True,
            capture_output=True,
            cwd=self.home,
            env=ENVIRONMENT,
            user=None if ours else account.uid,
            group=None if ours else account.gid,
        )


@contextmanager
def running(bin_dir: Path, **settings: str) -> Iterator[Postgres]:
    """Run a new cluster, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="postgres-", dir=data_parent()) as parent:
        server = _in(Path(parent), bin_dir, settings=settings)
        server.initialise()
        try:
            server.start()
            yield server
        finally:
            server.stop()


def _in(parent: Path, bin_dir: Path, *, settings: dict[str, str]) -> Postgres:
    home = parent / "data"
    account = choose(home)
    home.mkdir(0o700)
    hand_over(home, account)
    for path in (home, bin_dir / "postgres"):
        open_way(path, account)
    return Postgres(bin_dir, home, account, settings)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
