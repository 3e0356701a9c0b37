"""A server as our child: started, awaited, ended within a bound; and found again if left over."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from expiry.local import launch
from expiry.local.account import Account
from expiry.local.errors import ServerFailedError

POLL_S = 0.01
READY_WITHIN_S = 60.0  # recovery after a crash may replay much
LOG_LINES = 12  # shown when a server fails
PROC = Path("/proc")  # Linux

# PG* and the like of the caller's environment must not reach the servers.
ENVIRONMENT = {"LC_ALL": "C", "PATH": os.defpath, "TZ": "UTC"}


@dataclass(frozen=True, slots=True)
class Program:
    """A server as it lies in the data directory, and how it is asked to end."""

    name: str
    home: Path  # named in its command line, by which a server left over is recognised
    log: Path
    pid_file: Path
    # Signals in turn, each with the seconds to wait for the end; 4 s at most in all. The first
    # is the orderly one, sent also when the parent dies.
    farewell: tuple[tuple[signal.Signals, float], ...]


@dataclass(frozen=True, slots=True)
class Child:
    """A program that was started."""

    program: Program
    process: subprocess.Popen[bytes]


def private(path: str | Path, flags: int) -> int:
    """Open a file, as the opener of `open`: for its owner only, never through a link.

    A link could have been laid there by somebody whom root runs in the directory of.
    """
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def spawn(program: Program, command: list[str], account: Account) -> Child:
    """Start the server. It ends when the calling thread does (Linux)."""
    death_signal, _ = program.farewell[0]
    numbers = (os.getpid(), int(death_signal), account.uid, account.gid)
    with open(program.log, "wb", opener=private) as log:
        process = subprocess.Popen(
            # -I -S: nothing of the caller's Python set-up, and a start in a few milliseconds.
            [sys.executable, "-I", "-S", launch.__file__, *map(str, numbers), *command],
            cwd=program.home,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal is for the parent, which then ends the servers in order.
            start_new_session=True,
        )
    return Child(program, process)


def await_ready(child: Child, is_ready: Callable[[], bool]) -> None:
    """Return once the server accepts clients.

    Raises:
        ServerFailedError: it ended, or took longer than READY_WITHIN_S; with the end of its log.
    """
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not is_ready():
        if child.process.poll() is not None or time.monotonic() > deadline_s:
            name, log = child.program.name, child.program.log
            raise ServerFailedError(f"{name} did not start.\n{log_end(log)}")
        time.sleep(POLL_S)


def log_end(log: Path) -> str:
    """Return the last lines of a log."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES:])


def end(child: Child) -> None:
    """End the server: in order if it can, by force after the seconds its farewell allows."""
    process = child.process
    _end(child.program, process.pid, lambda: process.poll() is None)


def end_left_over(program: Program) -> None:
    """End a server of an earlier parent that still runs on this home, if there is one."""
    pid = _read_pid(program.pid_file)
    if pid is None:
        return
    _end(program, pid, lambda: _runs_on(program.home, pid))
    if not _runs_on(program.home, pid):
        # PostgreSQL would take a process that has the pid by now, or a zombie, for a server.
        program.pid_file.unlink(missing_ok=True)


def _end(program: Program, pid: int, is_alive: Callable[[], bool]) -> None:
    for number, wait_s in program.farewell:
        deadline_s = time.monotonic() + wait_s
        if is_alive():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while is_alive() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)


def _read_pid(pid_file: Path) -> int | None:
    try:
        return int(pid_file.read_text().split("\n", 1)[0])
    except (OSError, ValueError):
        return None


def _runs_on(home: Path, pid: int) -> bool:
    # A pid alone proves nothing: after a reboot it may be anybody's. That of a zombie is empty.
    return str(home) in _command_line(pid)


def _command_line(pid: int) -> str:
    if PROC.is_dir():
        try:
            return (PROC / str(pid) / "cmdline").read_text(errors="surrogateescape")
        except OSError:
            return ""
    command = ["/bin/ps", "-ww", "-o", "command=", "-p", str(pid)]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout
