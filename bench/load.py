"""A load of POST /v1/holds: as fast as the connections allow, or at a fixed rate.

python -m bench.load PORT SECONDS CONNECTIONS RATE RESOURCE...

RATE 0: each connection sends its next request when it has its answer. Otherwise requests are due at fixed times, and
the time that one waits for a free connection counts as latency. Prints one line of JSON. The key is in $KEY. Raw
HTTP, because a client library would need more of the two cores than what is measured.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from typing import cast
from uuid import uuid4

import uvloop

HEAD = (
    "POST /v1/holds HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
)
GRACE_S = 5.0  # for the last answers


class Load:
    """All connections, and what came back."""

    def __init__(self, *, seconds: float, rate: float, resources: list[str]) -> None:
        """Send for so long."""
        self.latencies_ms: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.idle: deque[Connection] = deque()
        self.waiting: deque[float] = deque()  # when they were due
        self.until_s = 0.0
        self.seconds = seconds
        self._rate = rate
        self._head = HEAD % os.environ["KEY"]
        self._resources = resources
        self._sent = 0
        self._open = 0  # requests without an answer yet
        self.answered = asyncio.Event()

    def request(self) -> bytes:
        """Answer the next request; each has a key of its own, and the resources take turns."""
        self._sent += 1
        self._open += 1
        self.answered.clear()
        body = json.dumps({"ttl_s": 900, "resource_id": self._resources[self._sent % len(self._resources)]})
        return f"{self._head}Idempotency-Key: {uuid4().hex}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()

    def done(self, status: str) -> None:
        """Count an answer, or that none will come."""
        self.statuses[status] += 1
        self._open -= 1
        if not self._open:
            self.answered.set()

    def free(self, connection: "Connection") -> None:
        """Give the connection its next request, if there is one."""
        if self._rate:
            if self.waiting:
                connection.send(self.waiting.popleft())
            else:
                self.idle.append(connection)
        elif time.perf_counter() < self.until_s:
            connection.send(time.perf_counter())

    async def run(self, port: int, connections: int) -> float:
        """Send until the time is over and everything is answered; answer the seconds until then."""
        loop = asyncio.get_running_loop()
        started_s = time.perf_counter()
        self.until_s = started_s + self.seconds
        for _ in range(connections):
            await loop.create_connection(lambda: Connection(self), "127.0.0.1", port)
        due_s = started_s
        while self._rate and due_s < self.until_s:
            await asyncio.sleep(max(due_s - time.perf_counter(), 0))
            while due_s <= time.perf_counter():
                if self.idle:
                    self.idle.popleft().send(due_s)
                else:
                    self.waiting.append(due_s)
                due_s += 1 / self._rate
        await asyncio.sleep(max(self.until_s - time.perf_counter(), 0))
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self.answered.wait()
        return time.perf_counter() - started_s


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, load: Load) -> None:
        """Belong to a load."""
        self._load = load
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self.sent_s: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._load.free(self)

    def send(self, due_s: float) -> None:
        """Send a request that was due then."""
        assert self._transport is not None  # noqa: S101 - connected
        self.sent_s = due_s
        self._transport.write(self._load.request())

    def data_received(self, data: bytes) -> None:
        """Take an answer."""
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator or len(body) < _length(head):
            return
        assert self.sent_s is not None  # noqa: S101 - nobody answers without a request
        self._load.latencies_ms.append((time.perf_counter() - self.sent_s) * 1000)
        self._buffer, self.sent_s = b"", None
        self._load.done(head[9:12].decode())
        self._load.free(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        """Count a request that got no answer."""
        if self.sent_s is not None:
            self.sent_s = None
            self._load.done("lost")


def _length(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"content-length: ")
    return int(rest.split(b"\r\n", 1)[0])


async def main() -> None:
    """Read the arguments, load, print."""
    port, seconds, connections, rate, *resources = sys.argv[1:]
    load = Load(seconds=float(seconds), rate=float(rate), resources=resources)
    took_s = await load.run(int(port), int(connections))
    print(
        json.dumps(
            {
                "seconds": took_s,
                "statuses": load.statuses,
                "latencies_ms": [round(v, 2) for v in load.latencies_ms],
            }
        )
    )


if __name__ == "__main__":
    uvloop.run(main())
