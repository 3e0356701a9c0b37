"""Where the servers listen, kept in the data directory so that a restart finds the same URLs."""

import json
import secrets
import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from expiry.local.child import private
from expiry.local.errors import DataDirUnusableError

LOOPBACK = "127.0.0.1"
USER = "expiry"
DATABASE = "expiry"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Two ports of the loopback interface and the password of both servers.

    There is a password because the loopback interface is open to everybody on the machine.
    """

    postgres_port: int
    valkey_port: int
    password: str

    @property
    def database_url(self) -> str:
        """The URL of the service's database."""
        return f"postgresql://{USER}:{self.password}@{LOOPBACK}:{self.postgres_port}/{DATABASE}"

    @property
    def redis_url(self) -> str:
        """The URL of Valkey's first database."""
        return f"redis://:{self.password}@{LOOPBACK}:{self.valkey_port}/0"

    @classmethod
    def settle(cls, file: Path) -> Self:
        """Return the endpoints kept in file, with another port where one is taken by now."""
        try:
            kept = cls(**json.loads(file.read_text()))
            postgres_port, valkey_port = _free_ports(kept.postgres_port, kept.valkey_port)
        except FileNotFoundError:
            kept = cls(0, 0, secrets.token_urlsafe(24))
            postgres_port, valkey_port = _free_ports(0, 0)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataDirUnusableError(
                f"{file} is damaged ({error}): restore it, or use another data dir."
            ) from error
        settled = cls(postgres_port, valkey_port, kept.password)
        if settled != kept:
            settled._keep(file)
        return settled

    def _keep(self, file: Path) -> None:
        # Renamed into place: the password must not be lost to a half-written file.
        new = file.with_suffix(".new")
        with open(new, "w", opener=private) as stream:
            json.dump(asdict(self), stream)
        new.replace(file)


def _free_ports(*wanted: int) -> list[int]:
    # All are held until all are found, so that no two are the same.
    with ExitStack() as held:
        return [_bind(held, port) or _bind(held, 0) for port in wanted]


def _bind(held: ExitStack, port: int) -> int:
    listener = held.enter_context(socket.socket())
    # As the servers do it: connections of the last run that linger do not take the port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except OSError:
        return 0
    return int(listener.getsockname()[1])
