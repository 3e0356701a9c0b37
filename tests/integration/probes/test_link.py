"""A server in trouble is not asked ever faster."""

from __future__ import annotations

import asyncio

import pytest

from governor.probes import ProbeOverloadedError
from governor.probes.link import Link


class Seconds:
    """A clock that the test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


async def test_each_failure_doubles_the_pause_before_the_next_try() -> None:
    """0.5 s, 1 s, 2 s, up to 8 s; meanwhile the last failure is the answer, and nobody connects."""
    attempts = 0

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.transport.abort()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    clock = Seconds()
    url = f"postgresql://probe:s3cret@127.0.0.1:{port}/postgres?sslmode=disable"
    link = Link(url, application_name="test", timeout_s=5, clock=clock)
    pauses_s = []
    for _ in range(6):
        began_at_s, before = clock.now_s, attempts
        while attempts == before:
            with pytest.raises(ProbeOverloadedError) as refused:
                await link.fetchrow("SELECT 1")
            assert "s3cret" not in str(refused.value)
            clock.now_s += 0.25
        pauses_s.append(clock.now_s - 0.25 - began_at_s)
        clock.now_s -= 0.25
    server.close()
    assert pauses_s == [0, 0.5, 1, 2, 4, 8]
