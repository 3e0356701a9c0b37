"""Every example of the documents runs as it stands, and prints what it says."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from expiry import keys
from expiry.client import Client
from tests.api_client import PLATFORM
from tests.gateway import url_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/http.md")
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROMISED = re.compile(r"# => (.+)")
END = "=== end of the block ==="


def blocks(document: str, language: str) -> list[str]:
    """Answer the examples of a document in one language."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [code for found, code in BLOCK.findall(text) if found == language]


def check(code: str, printed: str) -> None:
    """Check that what a block promises is printed, in that order."""
    at = 0
    for promised in PROMISED.findall(code):
        found = printed.find(promised.strip(), at)
        assert found >= 0, f"{promised!r} is not in what is printed after {printed[:at]!r}:\n{printed[at:]}"
        at = found + len(promised.strip())


@pytest.fixture
async def url(
    start_api: Callable[..., Any], redis_url: str, conn: asyncpg.Connection[Any], tmp_path: Path
) -> str:
    """Run an API as `expiry dev` would, with its key and its file."""
    api = await start_api(redis_url)
    await keys.create(conn, tenant_id="dev", scopes=["holds", "read", "operate"], key="demo")
    (tmp_path / "expiry-data").mkdir()
    (tmp_path / "expiry-data/dev.json").write_text(json.dumps({"platform_key": PLATFORM}))
    return url_of(api)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are for those who have curl")
@pytest.mark.parametrize("document", DOCUMENTS)
async def test_the_shell_examples_run(document: str, url: str, tmp_path: Path) -> None:
    """One after the other, in one shell, which ends at the first failure."""
    codes = blocks(document, "bash")
    script = "set -euo pipefail\n" + "".join(f"{code}\necho '{END}'\n" for code in codes)
    shell = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        script.replace("http://127.0.0.1:8080", url),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await shell.communicate()
    assert shell.returncode == 0, printed.decode()
    for code, part in zip(codes, printed.decode().split(END), strict=False):
        check(code, part)


@pytest.mark.parametrize("document", DOCUMENTS)
async def test_the_python_examples_run(
    document: str,
    url: str,
    redis_url: str,
    conn: asyncpg.Connection[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other, with names in common, as `python -m asyncio` would."""
    await conn.execute("CREATE TABLE orders (id int)")
    monkeypatch.chdir(tmp_path)
    async with Client(url, key="demo") as client:
        names = {"client": client, "conn": conn}
        for code in blocks(document, "python"):
            here = code.replace("http://127.0.0.1:8080", url).replace("redis://localhost", redis_url)
            compiled = compile(here, document, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                running = eval(compiled, names)  # noqa: S307 - our own documents
                if inspect.isawaitable(running):
                    await running
            check(code, printed.getvalue())


def test_every_operation_has_examples() -> None:
    """What a client can do is shown, in both languages."""
    python = "".join(blocks("docs/http.md", "python"))
    methods = {name for name in vars(Client) if not name.startswith("_") and not name.endswith("_page")}
    assert {name for name in methods if f".{name}(" not in python} == set()
    assert len(blocks("docs/http.md", "bash")) == len(blocks("docs/http.md", "python")) + 1
