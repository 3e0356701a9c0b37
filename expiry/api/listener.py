"""Listen, and take no more connections than there is room for.

asyncio's own server accepts whatever comes. Here a connection that finds no room waits with the kernel: a burst
costs it a moment instead of an error, memory and open files stay bounded, and where the wait is long the probe of
a load balancer waits as well, so that it turns to others.
"""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from expiry.api.connection import Connection, Connections
from expiry.errors import SetupError

BACKLOG = 1024  # connections that wait with the kernel; the system may allow fewer (net.core.somaxconn)
RETRY_S = 1.0  # after the system ran out of what a connection needs

# To be waited out; any other failure of accept is one of a connection, which is gone.
_RAN_OUT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = structlog.get_logger()


@asynccontextmanager
async def listening(host: str, port: int, connections: Connections) -> AsyncIterator[int]:
    """Accept connections while inside; gives the port. Raises SetupError when the address cannot be had.

    In the end whoever waits with the kernel is still accepted, for closing would reset those connections.
    """
    sockets = await _bind(host, port)
    async with asyncio.TaskGroup() as connecting:
        listeners = [_Listener(sock, connections, connecting) for sock in sockets]
        try:
            yield sockets[0].getsockname()[1]
        finally:
            for listener in listeners:
                listener.close()


async def _bind(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of the host, or on none."""
    sockets: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, address in dict.fromkeys(found):
            sockets.append(socket.create_server(address, family=family, backlog=BACKLOG))
            sockets[-1].settimeout(0)
    except OSError as error:
        for sock in sockets:
            sock.close()
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise SetupError(
            f"Cannot listen on {host}:{port} ({reason}): free it, or choose another port or host "
            "(--port, EXPIRY_API_PORT, EXPIRY_METRICS_PORT, EXPIRY_API_HOST)."
        ) from error
    return sockets


class _Listener:
    """Accepts on one socket, whenever there is room.

    By callbacks: a task that is cancelled in `sock_accept` may lose a connection that it had accepted.
    """

    def __init__(self, sock: socket.socket, connections: Connections, connecting: asyncio.TaskGroup) -> None:
        self._sock = sock
        self._connections = connections
        self._connecting = connecting
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._watch()

    def close(self) -> None:
        self._accept()
        self._unwatch()
        self._sock.close()

    def _watch(self) -> None:
        self._loop.add_reader(self._sock, self._accept)

    def _unwatch(self) -> None:
        self._loop.remove_reader(self._sock)
        self._connections.freed.discard(self._watch)
        if self._retry is not None:
            self._retry.cancel()

    def _accept(self) -> None:
        while self._connections.room:
            try:
                client, _ = self._sock.accept()
            except OSError as error:  # nobody waits any more, mostly
                if error.errno in _RAN_OUT:
                    log.warning("http.accept_failed", reason=str(error))
                    self._unwatch()
                    self._retry = self._loop.call_later(RETRY_S, self._watch)
                return
            self._connecting.create_task(self._connect(client, self._connections.enter()))
        self._loop.remove_reader(self._sock)
        self._connections.freed.add(self._watch)

    async def _connect(self, client: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, client)
        except OSError:  # gone again
            client.close()
            self._connections.gone(connection)
