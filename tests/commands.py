"""`expiry` as people run it, with an environment of its own.

A process, run to its end or watched and signalled; or within this one, where many runs are to be cheap.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from uuid import uuid4

import aiohttp
import structlog
from typer.testing import CliRunner

from expiry.__main__ import app
from tests.helpers import eventually

ROOT = Path(__file__).parents[1]
ENDS_WITHIN_S = 30


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command left: its exit status and what it wrote."""

    status: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Running:
    """A command that runs; its log goes to a file, so that nothing waits for a reader."""

    process: asyncio.subprocess.Process
    log: IO[bytes]

    @property
    def said(self) -> str:
        """What it has written to standard error so far."""
        return os.pread(self.log.fileno(), 1 << 20, 0).decode()

    async def event(self, name: str) -> dict[str, Any]:
        """Wait for a log event (JSON) of this name, and return it."""

        async def found() -> dict[str, Any] | None:
            for line in self.said.splitlines():
                if line.startswith("{") and json.loads(line)["event"] == name:
                    return dict(json.loads(line))
            assert self.process.returncode is None, self.said
            return None

        event = await eventually(found, within_s=ENDS_WITHIN_S)
        assert event is not None
        return event

    async def api(self) -> str:
        """Wait until it listens, and return its URL."""
        return f"http://127.0.0.1:{(await self.event('http.listening'))['port']}"

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Send the signal; return the exit status and the seconds that it took."""
        started_s = time.monotonic()
        self.process.send_signal(number)
        async with asyncio.timeout(ENDS_WITHIN_S):
            status = await self.process.wait()
        return status, time.monotonic() - started_s


def clean(**environment: str) -> dict[str, str]:
    """Return our environment without what would set up the program, and with what is given."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("EXPIRY_", "GOVERNOR_"))}
    # No load balancer has to notice that a process of a test is about to stop.
    return ours | {"COLUMNS": "100", "EXPIRY_API_DRAIN_S": "0"} | environment


@asynccontextmanager
async def started(*words: str, **environment: str) -> AsyncIterator[Running]:
    """Run a command beside the test, and kill what is left of it in the end."""
    with TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "expiry", *words),
            cwd=ROOT,
            env=clean(**environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=log,
        )
        try:
            yield Running(process, log)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def run(*words: str, **environment: str) -> Ended:
    """Run a command to its end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "expiry", *words),
        cwd=ROOT,
        env=clean(**environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(ENDS_WITHIN_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


def invoke(*words: str, **environment: str) -> Ended:
    """Run a command to its end in this process, as fast as that; needs a thread without a running loop."""
    ambient = {k: None for k in os.environ if k.startswith(("EXPIRY_", "GOVERNOR_"))}
    root, structured = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    try:
        result = CliRunner().invoke(app, words, env=ambient | {"COLUMNS": "100"} | environment)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.configure(**structured)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


async def prints(*words: str, **environment: str) -> str:
    """Run a command that must succeed, in another thread; return what it printed."""
    ended = await asyncio.to_thread(invoke, *words, **environment)
    assert ended.status == 0, ended
    return ended.out


def explained(ended: Ended, *remedies: str, secret: str = "s3cret") -> str:  # noqa: S107 - the one of the tests
    """Check that a command was refused with a sentence that says what to do; return it."""
    assert ended.status == 2, ended
    *logged, sentence = ended.err.strip().splitlines()
    assert all(line.startswith("{") for line in logged), ended.err
    assert "Traceback" not in ended.err + ended.out
    assert secret not in ended.err + ended.out
    assert all(remedy in sentence for remedy in remedies), sentence
    return sentence


def left(data_dir: Path) -> list[str]:
    """Return the command lines that name this directory; a process that is gone has none."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines.append((process / "cmdline").read_text(errors="replace").replace("\0", " "))
    return [line for line in lines if str(data_dir) in line]


async def ask(
    method: str, url: str, *, key: str | None = None, body: Mapping[str, object] | None = None, **headers: str
) -> tuple[int, Any]:
    """Send one request over HTTP; return the status and the JSON of the answer, or its text."""
    auth = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, headers=auth | headers, json=body) as response,
    ):
        text = await response.text()
        return response.status, json.loads(text) if "json" in response.content_type else text


async def place(api: str, key: str, *, ttl_s: float, resource_id: str = "seat") -> dict[str, Any]:
    """Place a hold over HTTP, and return it."""
    status, hold = await ask(
        "POST",
        f"{api}/v1/holds",
        key=key,
        body={"ttl_s": ttl_s, "resource_id": resource_id},
        **{"Idempotency-Key": str(uuid4())},
    )
    assert status == 201, hold
    return dict(hold)
