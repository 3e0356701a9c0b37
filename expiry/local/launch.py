"""Become a server that ends with its parent: run as a program between fork and exec.

Arguments: the parent's pid, the signal to receive at its death, uid, gid, then the command.
A program rather than a preexec_fn, which is not safe in a parent that has threads. The order
matters: a change of uid would clear the parent-death signal.
"""

import os
import sys

try:
    # Before the account changes: the new one may not be allowed to read this Python's library.
    from ctypes import CDLL
except ImportError:  # a Python built without it; the next start then stops what was left
    CDLL = None  # type: ignore[assignment,misc]

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int, death_signal: int, uid: int, gid: int, *command: str) -> None:
    """Take on the account, tie this process to its parent, run the command in its place."""
    libc = CDLL(None) if CDLL is not None and sys.platform == "linux" else None
    if uid != os.geteuid():
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if libc is not None:
        libc.prctl(PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:
        sys.exit("the parent has ended already")
    os.umask(0o077)
    try:
        os.execv(command[0], command)  # noqa: S606 - becoming the server is the point
    except OSError as error:
        sys.exit(f"cannot run {command[0]} as uid {uid}: {error.strerror}")


if __name__ == "__main__":
    own, command = sys.argv[1:5], sys.argv[5:]
    main(*map(int, own), *command)  # type: ignore[arg-type] # four numbers, then words
