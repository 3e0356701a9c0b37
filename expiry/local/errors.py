"""What can keep the embedded servers from running, each with its remedy."""

from expiry.errors import SetupError


class EmbeddedNotInstalledError(SetupError):
    """The embedded servers are not installed: pip install 'expiry[embedded]'."""


class PlatformUnsupportedError(SetupError):
    """There are no embedded servers for this platform: set the URLs of servers of your own."""


class DataDirUnusableError(SetupError):
    """The data directory cannot be written: choose another one."""


class DataDirInUseError(SetupError):
    """The data directory is in use by another process: stop that one or choose another one."""


class PathClosedError(SetupError):
    """The servers' account may not pass through a directory: run as the owner of it."""


class ServerFailedError(SetupError):
    """An embedded server did not start: its log says why."""
