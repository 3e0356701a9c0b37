"""The caller's session is left as it is, and the key is shown to nobody but the API."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from expiry import errors
from tests.api_client import Api
from tests.gateway import SPOILT, answering, client_at, url_of

KEY = "exk_a_secret"
HOLD = "0193b0c5-8f4a-7c3e-9d5e-2f6a1b8c4d7e"


async def test_a_session_of_the_callers_stays_open(api: Api) -> None:
    """It is used as it is, whatever its own habits, and needs no `async with`."""
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        client = client_at(url_of(api), session=session)
        async with client:
            await client.declare("room-12", capacity=0)
        with pytest.raises(errors.InsufficientCapacityError):
            await client.place("room-12", ttl_s=60)


async def _garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"NONSENSE\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("spoilt", [None, *SPOILT.values()])
async def test_no_error_shows_the_key(
    spoilt: tuple[int, str] | None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither its text, nor what it holds, nor the errors it came of, nor a log."""
    server = None
    if spoilt is None:
        server = await asyncio.start_server(_garbage, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        serving: Any = _nothing(url)
    else:
        serving = answering((*spoilt, {}))
    async with serving as (_, url), client_at(url, key=KEY, attempts_max=2) as client:
        with pytest.raises(errors.ExpiryError) as refused:
            await client.confirm(HOLD)
    if server is not None:
        server.close()
    chain: list[BaseException] = [refused.value]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    shown = [repr((e, e.args, vars(e))) for e in chain] + traceback.format_exception(refused.value)
    shown += [caplog.text, *capsys.readouterr(), repr(client)]
    assert KEY not in "".join(shown)


@asynccontextmanager
async def _nothing(url: str) -> AsyncIterator[tuple[None, str]]:
    yield None, url
