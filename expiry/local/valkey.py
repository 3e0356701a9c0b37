"""The embedded Valkey: a configuration written anew at each start, a server."""

import signal
from pathlib import Path

from redis import Redis, RedisError

from expiry.local import wheels
from expiry.local.account import Account, hand_over
from expiry.local.child import Child, Program, private
from expiry.local.endpoints import LOOPBACK, Endpoints

PING_TIMEOUT_S = 1.0

CONFIGURATION_FILE = "valkey.conf"

# orderly end, force
FAREWELL = ((signal.SIGTERM, 3.0), (signal.SIGKILL, 0.5))

# Relative paths are meant from the server's home, its working directory.
CONFIGURATION = """\
bind {host}
port {port}
requirepass {password}
pidfile valkey.pid
# The queue must refuse a wake-up rather than forget another one.
maxmemory-policy noeviction
# The command line stays as started: a server left over is recognised by it.
set-proc-title no
save ""
appendonly {appendonly}
appendfsync everysec
"""


def program(data_dir: Path) -> Program:
    """Return the server on what is kept in data_dir."""
    home = data_dir / "valkey"
    return Program(
        name="Valkey",
        home=home,
        log=data_dir / "valkey.log",
        pid_file=home / "valkey.pid",
        farewell=FAREWELL,
    )


def configure(queue: Program, endpoints: Endpoints, account: Account, *, durable: bool) -> None:
    """Write the configuration; durable keeps a log of every write across restarts."""
    if not queue.home.exists():
        queue.home.mkdir(0o700)
        hand_over(queue.home, account)
    text = CONFIGURATION.format(
        host=LOOPBACK,
        port=endpoints.valkey_port,
        password=endpoints.password,
        appendonly="yes" if durable else "no",
    )
    file = queue.home / CONFIGURATION_FILE
    with open(file, "w", opener=private) as stream:
        stream.write(text)
    hand_over(file, account)


def command(queue: Program) -> list[str]:
    """Return the command that runs the server as configured."""
    return [str(wheels.valkey_server()), str(queue.home / CONFIGURATION_FILE)]


def is_ready(_child: Child, endpoints: Endpoints) -> bool:
    """Tell whether the server answers; while it loads its data it does not."""
    try:
        with Redis.from_url(endpoints.redis_url, socket_timeout=PING_TIMEOUT_S) as client:
            return bool(client.ping())
    except RedisError:
        return False
