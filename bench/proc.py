"""Processes: started, ended by pid, and their CPU time with that of their children."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
END_S_MAX = 8.0  # after that a process is killed


def parse_stat(stat: str) -> tuple[int, float]:
    """Answer parent and CPU seconds of a /proc/<pid>/stat: its own and those of children that it has reaped."""
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold anything
    parent, ticks = int(fields[1]), sum(int(f) for f in fields[11:15])
    return parent, ticks / TICKS_PER_S


def cpu_s(*roots: int) -> float:
    """Answer the CPU seconds of these processes and all below them, so far."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may have ended
            pid = int(path.parent.name)
            parents[pid], seconds[pid] = parse_stat(path.read_text())
    total, level = 0.0, set(roots) & set(seconds)
    while level:
        total += sum(seconds[pid] for pid in level)
        level = {pid for pid, parent in parents.items() if parent in level}
    return total


@contextmanager
def started(
    commands: Sequence[Sequence[str]], env: Mapping[str, str], log: Path
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run these at once, what they write going to files beside `log`; end them, whatever happens.

    Each is in a session of its own, so that children of a pool end with it.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for number, command in enumerate(commands):
            with Path(f"{log}.{number}").open("w") as stream:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=dict(env),
                        stdin=subprocess.PIPE,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        text=True,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.terminate()
        deadline_s = time.monotonic() + END_S_MAX
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline_s - time.monotonic(), 0))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()


def said(log: Path, number: int = 0) -> str:
    """Answer what a process wrote so far."""
    return Path(f"{log}.{number}").read_text(errors="replace")
