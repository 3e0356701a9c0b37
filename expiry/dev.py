"""Everything in one process, for a developer's machine and for the demonstration."""

import asyncio
import json
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
from pydantic import SecretStr
from rich.console import Console

from expiry import keys, local, replay, schema, shop
from expiry.errors import SetupError
from expiry.service import Service, connect_database
from expiry.settings import Settings
from governor import GovernorSettings
from governor.probes.settings import ProbeSettings

TENANT = "dev"
# With the servers' own stop, Ctrl-C takes less than 5 s; no load balancer has to notice it first.
DEFAULTS: dict[str, Any] = {"stop_grace_s": 1.5, "api_drain_s": 0}


@contextmanager
def servers(data_dir: Path, given: dict[str, Any]) -> Iterator[dict[str, SecretStr]]:
    """Start embedded servers for what was not given; answer their URLs."""
    if "database_url" in given and "redis_url" in given:
        yield {}
        return
    try:
        running = local.start(data_dir)
    except (local.DataDirInUseError, local.DataDirUnusableError) as error:
        raise SetupError(f"{error} Choose another --data-dir.") from error
    with running:
        urls = {"database_url": running.database_url, "redis_url": running.redis_url}
        yield {name: SecretStr(url) for name, url in urls.items() if name not in given}


def stop_on_signals() -> asyncio.Event:
    """Answer an event that SIGTERM and Ctrl-C set; needs a running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def run(
    settings: Settings,
    governor: GovernorSettings,
    data_dir: Path,
    *,
    api_key: str | None,
    measured: ProbeSettings | None = None,
) -> None:
    """Run all parts until a signal, and keep data_dir/dev.json as the description of it."""
    stop = stop_on_signals()
    made = await _prepare(settings, data_dir, api_key)
    running, port = await _start(settings, governor, stop, measured)
    try:
        _describe(settings, data_dir, made, port)
    except SetupError:
        stop.set()
        await running
        raise
    print(  # noqa: T201 - for the person at the terminal; events go to the log
        f"expiry: API at http://{settings.api_host}:{port}, its key in {data_dir / 'dev.json'}. "
        "Ctrl-C stops it; the data stay.",
        flush=True,
    )
    await running


async def demo(
    settings: Settings,
    governor: GovernorSettings,
    data_dir: Path,
    *,
    events: Iterator[shop.Event],
    speed: float,
    measured: ProbeSettings | None = None,
) -> int:
    """Run all parts, replay the events against them, and answer 0 if every check passed."""
    stop = stop_on_signals()
    made = await _prepare(settings, data_dir, None)
    running, port = await _start(settings, governor, stop, measured)
    try:
        work = asyncio.create_task(
            replay.run(
                events=events,
                api_url=f"http://{settings.api_host}:{port}",
                api_key=made["api_key"],
                database_url=settings.database_url.get_secret_value(),
                speed=speed,
                ttl_s=replay.DEMO_TTL_S,
                settings=settings,
                console=Console(),
                behind_s_max=replay.DEMO_BEHIND_S_MAX,
            )
        )
        await asyncio.wait([work, running], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():  # interrupted
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return 130
        return work.result()
    finally:
        stop.set()
        await running


async def _start(
    settings: Settings,
    governor: GovernorSettings,
    stop: asyncio.Event,
    measured: ProbeSettings | None,
) -> tuple["asyncio.Task[None]", int]:
    """Run all parts; answer once the API listens, with its port. Raises what kept it from that."""
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    service = Service(
        settings,
        governor,
        api=True,
        background=True,
        stop=stop,
        bound=bound,
        role="dev",
        measured=measured,
    )
    running = asyncio.create_task(service.run())
    waiting: list[asyncio.Future[Any]] = [bound, running]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not bound.done():
        await running
        raise asyncio.CancelledError("stopped before the API listened")  # as Ctrl-C anywhere else
    return running, bound.result()


async def _prepare(settings: Settings, data_dir: Path, api_key: str | None) -> dict[str, str]:
    """Create the schema and the keys; keys made earlier are kept."""
    kept = _read(data_dir)
    made = {
        "api_key": api_key or kept.get("api_key") or secrets.token_urlsafe(24),
        "platform_key": kept.get("platform_key") or secrets.token_urlsafe(24),
    }
    pool = await connect_database(settings, "dev")
    try:
        async with pool.acquire() as conn:
            await schema.apply(conn)
            await schema.check(conn)
            await _register(conn, made)
    finally:
        await pool.close()
    return made


async def _register(conn: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]", made: dict[str, str]) -> None:
    scopes = ["holds", "read", "operate"]
    await keys.create(conn, tenant_id=TENANT, scopes=scopes, name="dev", key=made["api_key"])
    await keys.create(conn, tenant_id=None, scopes=["platform"], name="dev", key=made["platform_key"])


def _read(data_dir: Path) -> dict[str, str]:
    try:
        kept = json.loads((data_dir / "dev.json").read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in kept.items() if isinstance(v, str)} if isinstance(kept, dict) else {}


def _describe(settings: Settings, data_dir: Path, made: dict[str, str], port: int) -> None:
    """Write dev.json for its owner only, whole or not at all."""
    api_url = f"http://{settings.api_host}:{port}"
    described = {
        "api_url": api_url,
        "metrics_url": f"{api_url}/metrics",
        "database_url": settings.database_url.get_secret_value(),
        "redis_url": settings.redis_url.get_secret_value(),
    } | made
    path = data_dir / "dev.json"
    draft = path.with_suffix(".new")
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(described, indent=2))
        draft.replace(path)
    except OSError as error:
        raise SetupError(f"{data_dir} cannot be written: {error}. Choose another --data-dir.") from error
