"""The page of the API: whole, safe to open, and every command on it works when pasted."""

from __future__ import annotations

import ast
import asyncio
import base64
import hashlib
import html
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from expiry import keys
from expiry.api.app import OPERATIONS
from expiry.api.document.curl import BASE_URL, DATA_DIR, KEY
from expiry.api.document.docs import base_url
from expiry.api.document.openapi import document
from expiry.api.document.python import CALLS
from expiry.client import Client
from tests.api_client import PLATFORM, Api

ROOT = Path(__file__).parents[2]
COMMANDS = re.compile(r'<pre class="shell"[^>]*><code>(.*?)</code></pre>', re.DOTALL)
LOADS = re.compile(
    r"<(?:link|img|iframe|object|embed|source|video|audio)\b|\bsrc=|url\(|@import|fetch\(|import\("
)


@pytest.fixture
async def api(start_api: Callable[..., Any]) -> Api:
    """Give the test an API without a queue: the page is the same."""
    started: Api = await start_api(None)
    return started


async def page(api: Api) -> str:
    """Read the page, as anybody may."""
    response = await api.ask("GET", "/docs", key=None)
    assert (response.status, response.content_type) == (200, "text/html")
    return await response.text()


async def test_the_page_shows_all_of_the_document(api: Api) -> None:
    """Each operation has its place and a link to it, each code its line, each link of the page its target."""
    text = await page(api)
    described = document(OPERATIONS)
    for path, item in described["paths"].items():
        for operation in item.values():
            assert text.count(f'id="{operation["operationId"]}"') == 1
            assert f'href="#{operation["operationId"]}"' in text
        assert path in html.unescape(re.sub(r"<[^>]+>", "", text))
    for response in described["components"]["responses"].values():
        for code in response["x-codes"]:
            assert f"<code>{code}</code>" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)
    assert not re.search(r"<!-- [a-z]+ -->", text)


async def test_the_page_loads_nothing(api: Api) -> None:
    """It asks for no other file; style and script run only as they were written, by their hashes."""
    text = await page(api)
    assert not LOADS.search(re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL))
    policy = (await api.ask("GET", "/docs", key=None)).headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert " style=" not in text
    assert not re.search(r"\son[a-z]+=", text)


async def test_every_command_works_as_it_stands(
    api: Api, conn: asyncpg.Connection[asyncpg.Record], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Pasted into a shell beside `expiry dev --api-key demo`, the last request of each answers 2xx."""
    await keys.create(conn, tenant_id="dev", scopes=("holds", "read", "operate"), key=KEY)
    described = tmp_path / DATA_DIR / "dev.json"
    described.parent.mkdir()
    described.write_text(json.dumps({"api_key": KEY, "platform_key": PLATFORM}, indent=2))
    commands = [html.unescape(found) for found in COMMANDS.findall(await page(api))]
    assert len(commands) > len(OPERATIONS)
    for command in commands:
        with subtests.test(command=command.splitlines()[-1]):
            said = await in_shell(command, tmp_path)
            assert re.match(r"HTTP/1\.1 20[0-4] ", said), said
            assert "urn:expiry:problem" not in said or "openapi" in command or "/docs" in command


async def test_the_python_example_works_as_it_stands(
    api: Api, conn: asyncpg.Connection[asyncpg.Record], capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python -m asyncio` would run it: a hold is placed and confirmed."""
    await keys.create(conn, tenant_id="dev", scopes=("holds", "read", "operate"), key=KEY)
    [example] = re.findall(r'<pre class="python"[^>]*><code>(.*?)</code></pre>', await page(api), re.DOTALL)
    code = compile(html.unescape(example), "/docs", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, {})  # noqa: S307 - our own page
    assert capsys.readouterr().out == "confirmed\n"


def test_each_operation_has_its_call() -> None:
    """Every one that needs a key; with arguments that the client's method takes, awaited or gone through."""
    described = document(OPERATIONS)["paths"].values()
    assert set(CALLS) == {o["operationId"] for item in described for o in item.values() if o.get("x-scope")}
    shown = set()
    for call in CALLS.values():
        [statement] = ast.parse(f"async def call():\n    {call}").body
        found = next(
            n
            for n in ast.walk(statement)
            if isinstance(n, ast.Call) and ast.unparse(n.func).startswith("client.")
        )
        method = getattr(Client, ast.unparse(found.func).removeprefix("client."))
        inspect.signature(method).bind(None, *found.args, **{str(k.arg): k.value for k in found.keywords})
        assert inspect.isasyncgenfunction(method) == call.startswith("async for")
        shown.add(method.__name__)
    methods = {name for name in vars(Client) if not name.startswith("_") and not name.endswith("_page")}
    assert methods - shown == {"events"}  # `follow` asks for its pages


async def test_the_page_asks_where_it_was_asked(api: Api) -> None:
    """Its commands go to the host that the page came from, and may be cached for nobody else."""
    here = await api.ask("GET", "/docs", key=None, headers={"Host": "holds.example:8443"})
    assert '"http://holds.example:8443/v1/holds"' in html.unescape(await here.text())
    assert BASE_URL not in await here.text()
    assert here.headers["Cache-Control"] == "no-store"
    forged = await api.ask("GET", "/docs", key=None, headers={"Host": "a$(id)"})
    assert BASE_URL in await forged.text()
    assert "$(id)" not in await forged.text()


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ({"Host": "10.0.0.7:8137"}, "http://10.0.0.7:8137"),
        ({"Host": "[::1]:8080"}, "http://[::1]:8080"),
        ({"Host": "api_1"}, "http://api_1"),
        ({"Host": "holds.example", "X-Forwarded-Proto": "https"}, "https://holds.example"),
        ({"Host": "holds.example", "X-Forwarded-Proto": "javascript"}, "http://holds.example"),
        *(
            ({"Host": host}, BASE_URL)
            for host in (
                "",
                "a b",
                "a;id",
                "a\nb",
                "$HOME",
                "`id`",
                "<b>",
                "a/b",
                "u@a",
                "a:b",
                "a:123456",
                "-x",
            )
        ),
    ],
)
def test_a_host_is_shown_only_if_it_is_one(headers: dict[str, str], shown: str) -> None:
    """What else a head may hold would be pasted into somebody's shell."""
    assert base_url(headers) == shown


async def in_shell(command: str, directory: Path) -> str:
    """Run a command of the page as it stands; answer what it says."""
    # Where there is no curl, a stand-in does what these commands ask of it.
    stand_in = directory / "bin" / "curl"
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests/curl.py"}" "$@"\n')
    stand_in.chmod(0o755)
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", command),
        cwd=directory,
        env={"PATH": f"{os.environ['PATH']}{os.pathsep}{stand_in.parent}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    return said.decode()
