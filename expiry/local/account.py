"""Whose account the servers run under. PostgreSQL refuses root, so root needs another one."""

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from expiry.local.errors import PathClosedError, PlatformUnsupportedError

# Accounts that exist already, best first; none is created.
UNPRIVILEGED = ("postgres", "nobody")


@dataclass(frozen=True, slots=True)
class Account:
    """An account of the operating system, as the servers take it on."""

    uid: int
    gid: int

    @property
    def is_ours(self) -> bool:
        """Whether nothing changes hands."""
        return self.uid == os.geteuid()


def choose(home: Path) -> Account:
    """Return the caller's own account; for root, that of home's owner or an unprivileged one.

    The owner of the nearest existing directory comes first, so that data keep their owner
    and a project in somebody's own directory needs no permission changed.
    """
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid())
    for entry in _candidates(home):
        if entry.pw_uid != 0:
            return Account(entry.pw_uid, entry.pw_gid)
    raise PlatformUnsupportedError(
        f"PostgreSQL does not run as root and there is neither {' nor '.join(UNPRIVILEGED)} "
        "on this machine: run as an ordinary user."
    )


def _candidates(home: Path) -> Iterator[pwd.struct_passwd]:
    nearest = next(path for path in (home, *home.parents) if path.exists())
    with suppress(KeyError):  # an owner may have no name, as on a volume in a container
        yield pwd.getpwuid(nearest.stat().st_uid)
    for name in UNPRIVILEGED:
        with suppress(KeyError):
            yield pwd.getpwnam(name)


def hand_over(path: Path, account: Account) -> None:
    """Make the account the owner of what was just created at path."""
    if not account.is_ours:
        os.chown(path, account.uid, account.gid)


def open_way(path: Path, account: Account) -> None:
    """Let the account pass through the directories above path, but not list them.

    Only what is missing is granted (o+x), and only on directories that are the caller's own.

    Raises:
        PathClosedError: a directory of somebody else's is closed; run as that user.
    """
    if account.is_ours:
        return
    for directory in path.resolve().parents:
        status = directory.stat()
        if _may_pass(status, account):
            continue
        if status.st_uid != os.geteuid():
            raise PathClosedError(f"{directory} is closed to the servers: run as the owner of it.")
        directory.chmod(stat.S_IMODE(status.st_mode) | stat.S_IXOTH)


def _may_pass(status: os.stat_result, account: Account) -> bool:
    if status.st_uid == account.uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid == account.gid and status.st_mode & stat.S_IXGRP:
        return True
    return bool(status.st_mode & stat.S_IXOTH)
