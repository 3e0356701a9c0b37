"""Every example of the documents runs as it stands, in any order and again and again, and prints what it says."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import asyncpg
import pytest

from expiry import keys
from expiry.client import Client
from tests.api_client import PLATFORM
from tests.gateway import url_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/http.md")
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ON_THE_PAGE = re.compile(r'<pre class="(shell|python)"[^>]*><code>(.*?)</code></pre>', re.DOTALL)
PROMISED = re.compile(r"# => (.+)")
END = "=== end of the block ==="
# What reads code as it comes, how the end of a block is said to it, and what it says of a failure.
READERS = {
    "bash": (("bash",), f"echo '{END}'\n"),
    "python": ((sys.executable, "-u", "-m", "asyncio"), f"\nprint({END!r})\n"),
}
TRACEBACK = 'File "<'


class Block(NamedTuple):
    """One example."""

    language: str
    code: str


def blocks(document: str) -> list[Block]:
    """Answer the examples of a document, in reading order."""
    return [Block(*found) for found in BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))]


def blocks_of_page(page: str) -> list[Block]:
    """Answer the examples of /docs, in reading order."""
    found = ON_THE_PAGE.findall(page)
    return [Block({"shell": "bash"}.get(kind, kind), f"{html.unescape(code)}\n") for kind, code in found]


def check(code: str, printed: str) -> None:
    """Check that what a block promises is printed, in that order."""
    at = 0
    for promised in PROMISED.findall(code):
        found = printed.find(promised.strip(), at)
        assert found >= 0, f"{promised!r} is not in what is printed after {printed[:at]!r}:\n{printed[at:]}"
        at = found + len(promised.strip())


class Terminal:
    """A shell, or `python -m asyncio`, into which somebody pastes one block after the other."""

    def __init__(self, process: asyncio.subprocess.Process, end: str) -> None:
        """Paste into this process, then what makes it print END."""
        self._process = process
        self._end = end

    async def paste(self, code: str) -> str:
        """Answer what the block prints."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write((code + self._end).encode())
        try:
            return (await self._process.stdout.readuntil(f"{END}\n".encode())).decode()
        except asyncio.IncompleteReadError as error:
            raise AssertionError(f"it ended at\n{code}\n{error.partial.decode()}") from None


@asynccontextmanager
async def terminal(language: str, directory: Path) -> AsyncIterator[Terminal]:
    """Start what reads this language."""
    command, end = READERS[language]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=2**24,
    )
    try:
        opened = Terminal(process, end)
        if language == "bash":
            await opened.paste("set -euo pipefail\n")
        yield opened
    finally:
        process.kill()
        await process.communicate()


@pytest.fixture
async def url(
    start_api: Callable[..., Any],
    redis_url: str,
    database_url: str,
    conn: asyncpg.Connection[Any],
    tmp_path: Path,
) -> str:
    """Run an API as `expiry dev` would, with its key and its file."""
    api = await start_api(redis_url)
    await keys.create(conn, tenant_id="dev", scopes=["holds", "read", "operate"], key="demo")
    (tmp_path / "expiry-data").mkdir()
    described = {"platform_key": PLATFORM, "database_url": database_url, "redis_url": redis_url}
    (tmp_path / "expiry-data/dev.json").write_text(json.dumps(described, indent=2))
    return url_of(api)


@pytest.mark.timeout(240)
async def test_the_examples_run(url: str, tmp_path: Path) -> None:
    """All documents on one server, in reading order, twice: what one leaves is in the way of no other."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/docs") as page:
        read = {**{name: blocks(name) for name in DOCUMENTS}, "/docs": blocks_of_page(await page.text())}
    for document, found in [*read.items(), *read.items()]:
        async with terminal("python", tmp_path) as python, terminal("bash", tmp_path) as shell:
            for block in found:
                if block.language == "bash" and shutil.which("curl") is None:
                    continue
                code = block.code.replace("http://127.0.0.1:8080", url)
                printed = await (shell if block.language == "bash" else python).paste(code)
                assert TRACEBACK not in printed, f"{document}:\n{code}\n{printed}"
                check(code, printed)
                if document == "/docs" and block.language == "bash":
                    assert re.findall(r"HTTP/1\.1 (\d).*\r\n", printed)[-1] == "2", printed
    # Nothing that one would have to clean up.
    assert [path.name for path in tmp_path.iterdir()] == ["expiry-data"]  # noqa: ASYNC240 - a test's own folder


def test_every_operation_has_examples() -> None:
    """What a client can do is shown, in both languages."""
    found = blocks("docs/http.md")
    python = "".join(block.code for block in found if block.language == "python")
    methods = {name for name in vars(Client) if not name.startswith("_") and not name.endswith("_page")}
    assert {name for name in methods if f".{name}(" not in python} == set()
    assert 2 * sum(block.language == "bash" for block in found) == len(found)
