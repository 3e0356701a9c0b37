"""The embedded PostgreSQL: a cluster created once, a server, a database."""

import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

from expiry.local import wheels
from expiry.local.account import Account, hand_over
from expiry.local.child import ENVIRONMENT, Child, Program, end, log_end, private, spawn
from expiry.local.endpoints import DATABASE, LOOPBACK, USER, Endpoints
from expiry.local.errors import ServerFailedError

# For a developer's machine with a few GB to spare.
SETTINGS = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",  # a path of ours may be longer than a socket's may be
    "max_connections": "200",  # pools of several workers and an API, and tests side by side
    "shared_buffers": "256MB",
    "timezone": "UTC",
    # In the data directory: containers have little of the other kind, and a kill leaves it behind.
    "dynamic_shared_memory_type": "mmap",
    "io_method": "sync",  # no workers for reading ahead: everything is in memory here
    "jit": "off",  # short statements; compiling one costs more than it can save
    "random_page_cost": "1.1",  # the disk is an SSD: an index is rarely the wrong choice
    # The holds table is small and changes all the time: clean it up early and often.
    "autovacuum_naptime": "10s",
    "autovacuum_vacuum_scale_factor": "0.05",
    "autovacuum_analyze_scale_factor": "0.02",
}

# Everything is lost with the machine, nothing with the server alone; several times faster.
UNSAFE_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}

# fast shutdown, immediate shutdown, force
FAREWELL = ((signal.SIGINT, 3.0), (signal.SIGQUIT, 0.5), (signal.SIGKILL, 0.4))

# Renamed rather than created: a copy of the template takes a disk 0.3 s, half of a first start.
NAME_DATABASE = """
SELECT format('ALTER DATABASE postgres RENAME TO %I', :'name')
 WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = :'name') \\gexec
"""


def program(data_dir: Path) -> Program:
    """Return the server on the cluster in data_dir."""
    home = data_dir / "postgres"
    return Program(
        name="PostgreSQL",
        home=home,
        log=data_dir / "postgres.log",
        pid_file=home / "postmaster.pid",
        farewell=FAREWELL,
    )


def command(store: Program, port: int, *, durable: bool) -> list[str]:
    """Return the command that runs the server."""
    settings = {"port": str(port)} | SETTINGS | ({} if durable else UNSAFE_SETTINGS)
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return [str(wheels.postgres_bin() / "postgres"), "-D", str(store.home), *options]


def is_ready(child: Child, _endpoints: Endpoints) -> bool:
    """Tell whether the server accepts clients, by its own word in its pid file."""
    try:
        lines = child.program.pid_file.read_text().splitlines()
    except FileNotFoundError:
        return False
    return lines[:1] == [str(child.process.pid)] and "".join(lines[7:8]).strip() == "ready"


def create_cluster(store: Program, password: str, account: Account, *, durable: bool) -> None:
    """Create the cluster unless it is there; a half-created one never counts.

    Raises:
        ServerFailedError: initdb failed; with the end of its log.
    """
    if store.home.exists():
        return
    draft = store.home.with_suffix(".new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(0o700)
    hand_over(draft, account)
    password_file = draft.with_suffix(".password")
    with open(password_file, "w", opener=private) as stream:
        stream.write(password)
    hand_over(password_file, account)
    try:
        _initdb(replace(store, home=draft), password_file, account, durable=durable)
    finally:
        password_file.unlink()
    draft.rename(store.home)


def _initdb(draft: Program, password_file: Path, account: Account, *, durable: bool) -> None:
    command = [str(wheels.postgres_bin() / "initdb"), "-D", str(draft.home), "--no-instructions"]
    command += [f"--username={USER}", "--auth=scram-sha-256", f"--pwfile={password_file}"]
    # Rounds make guessing costly; a random password is beyond guessing, and each costs a client.
    command += ["--set=scram_iterations=1"]
    # The same order and characters on every machine, whatever its locales.
    command += ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin"]
    command += ["--builtin-locale=C.UTF-8"]
    command += [] if durable else ["--no-sync"]
    child = spawn(draft, command, account)
    try:
        if child.process.wait() != 0:
            raise ServerFailedError(f"PostgreSQL was not set up.\n{log_end(draft.log)}")
    finally:
        end(child)


def name_database(endpoints: Endpoints) -> None:
    """Give the cluster's one database the service's name unless it has it.

    Raises:
        ServerFailedError: psql could not; with its message.
    """
    command = [str(wheels.postgres_bin() / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1"]
    command += ["-h", LOOPBACK, "-p", str(endpoints.postgres_port), "-U", USER, "-d", "template1"]
    command += ["-v", f"name={DATABASE}"]
    psql = subprocess.run(
        command,
        check=False,
        input=NAME_DATABASE,
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"PGPASSWORD": endpoints.password},
    )
    if psql.returncode != 0:
        raise ServerFailedError(f"PostgreSQL has no database {DATABASE}.\n{psql.stderr.strip()}")
