"""The command line: the composition root, and the only reader of the environment."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import asyncpg
import typer
import uvloop
from pydantic import SecretStr, ValidationError
from rich.console import Console

from expiry import deadletters as letters
from expiry import dev, doctor, errors, keys, loops, replay, schema, shop
from expiry.holds import Conn
from expiry.permits import FLEET
from expiry.service import Service, connect_database
from expiry.settings import Settings
from expiry.telemetry import mask, set_up_logging
from expiry.wakeups import connect_redis
from governor import GovernorSettings, explain, orders
from governor.commands import write_lines
from governor.probes.settings import ProbeSettings

T = TypeVar("T")
_KNOWN_NAMES = {f"EXPIRY_{name.upper()}" for name in Settings.model_fields} | {
    "EXPIRY_API_URL",
    "EXPIRY_API_KEY",
}
EXIT_SETUP = 2  # the user can mend it; the message says how

app = typer.Typer(
    help="Reservation holds that end exactly once, on time. Start with `expiry dev` or `expiry demo`.",
    epilog="Every command is configured by EXPIRY_* and GOVERNOR_* in the environment; see README.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
keys_app = typer.Typer(help="Keys for the HTTP API.", no_args_is_help=True)
letters_app = typer.Typer(
    help="Holds whose expiry failed for good: list, replay, discard.", no_args_is_help=True
)
governor_app = typer.Typer(help="How many transitions a second may start, and why.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.add_typer(governor_app, name="governor")
app.add_typer(letters_app, name="dead-letters")

DatabaseUrl = Annotated[str | None, typer.Option(help="PostgreSQL to use instead of an embedded one.")]
RedisUrl = Annotated[str | None, typer.Option(help="Redis to use instead of an embedded one.")]
LogFormat = Annotated[str | None, typer.Option(help="auto (console on a terminal), json or console.")]
Reason = Annotated[str, typer.Option(help="Why; kept with who and when.")]
LetterState = Literal["open", "retrying", "recovered", "replayed", "discarded"]
Loop = Annotated[str, typer.Argument(help="worker, promoter, sweep or prune.")]
LetterIds = Annotated[list[int], typer.Argument(help="Their ids, as `expiry dead-letters list` shows them.")]
By = Annotated[str, typer.Option(help="Who; kept in the record.")]


@app.command("dev")
def dev_command(
    *,
    port: Annotated[int, typer.Option(help="Port of the API on 127.0.0.1; 0 picks a free one.")] = 8080,
    data_dir: Annotated[Path, typer.Option(help="Where data and dev.json are kept.")] = Path("expiry-data"),
    api_key: Annotated[
        str | None, typer.Option(help="Tenant key to accept; made and kept if left out.")
    ] = None,
    database_url: DatabaseUrl = None,
    redis_url: RedisUrl = None,
    log_format: LogFormat = None,
) -> None:
    """Run everything here, on embedded servers, until Ctrl-C.

    API, worker, promoter, sweep and pruning in one process. DATA_DIR/dev.json says where it listens and
    which keys it takes. The data stay.
    """
    given = _given(database_url=database_url, redis_url=redis_url, log_format=log_format, api_port=port)
    with _explained():
        settings, governor = _settings(**given | dev.DEFAULTS), GovernorSettings()
        with dev.servers(data_dir, given) as urls:
            settings = settings.model_copy(update=urls)
            _run(dev.run(settings, governor, data_dir, api_key=api_key, measured=ProbeSettings()))


@app.command()
def demo(
    *,
    seed: Annotated[int, typer.Option(help="Of the generated shop.")] = 1,
    speed: Annotated[float, typer.Option(help="Shop seconds in one real second.")] = replay.DEMO_SPEED,
    database_url: DatabaseUrl = None,
    redis_url: RedisUrl = None,
) -> None:
    """Replay a shop's day against it all, watch it, check it.

    A promotion burst makes many carts expire together. Takes about a minute.
    """
    given = _given(database_url=database_url, redis_url=redis_url, api_port=0, log_level="error")
    with (
        _explained(),
        tempfile.TemporaryDirectory(prefix="expiry-demo-") as scratch,
        dev.servers(Path(scratch), given) as urls,
    ):
        settings = _settings(**given | urls | dev.DEFAULTS)
        events = shop.generate(seed)
        code = _run(
            dev.demo(
                settings,
                GovernorSettings(),
                Path(scratch),
                events=events,
                speed=speed,
                measured=ProbeSettings(),
            )
        )
    raise typer.Exit(code)


@app.command("api")
def api_command(*, log_format: LogFormat = None) -> None:
    """Run the HTTP API.

    Needs EXPIRY_DATABASE_URL and EXPIRY_REDIS_URL; run `expiry migrate` once before.
    """
    _serve(api=True, background=False, log_format=log_format)


@app.command()
def worker(*, log_format: LogFormat = None) -> None:
    """Run the loops: worker, promoter, sweep, prune.

    Needs EXPIRY_DATABASE_URL and EXPIRY_REDIS_URL; run `expiry migrate` once before. Each loop can be turned
    off by its setting.
    """
    _serve(api=False, background=True, log_format=log_format)


@app.command()
def migrate() -> None:
    """Create or complete the schema; safe to repeat."""
    with _explained():
        _run(_with_database(_settings(), schema.apply, check=False))
        typer.echo(f"The schema has version {schema.VERSION}.")


@app.command("doctor")
def doctor_command(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    since: Annotated[datetime | None, typer.Option(help="Look at holds since then only (UTC).")] = None,
) -> None:
    """Check every promise in the database; status 1 if broken."""
    with _explained():
        settings, governor = _settings(), GovernorSettings()
        from_ = since and since.replace(tzinfo=UTC)

        async def examine(conn: Conn) -> list[doctor.Finding]:
            if not settings.queue_used:
                return await doctor.examine(conn, since=from_, settings=settings, governor=governor)
            async with connect_redis(settings) as redis:
                return await doctor.examine(
                    conn, since=from_, settings=settings, redis=redis, governor=governor
                )

        findings = _run(_with_database(settings, examine))
    if as_json:
        typer.echo(json.dumps([f.as_dict() for f in findings], default=str))
    else:
        Console().print(doctor.render(findings))
    raise typer.Exit(0 if doctor.healthy(findings) else 1)


@app.command("replay")
def replay_command(
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV with the columns event_time, event_type, product_id, user_id, user_session; .gz too."
        ),
    ],
    *,
    speed: Annotated[float, typer.Option(help="Event seconds in one real second.")] = 60,
    ttl_s: Annotated[float, typer.Option(help="How long a cart is held, real seconds.")] = 15,
    api_url: Annotated[
        str, typer.Option(envvar="EXPIRY_API_URL", help="Where the API listens.")
    ] = "http://127.0.0.1:8080",
    api_key: Annotated[str, typer.Option(envvar="EXPIRY_API_KEY", help="A tenant key.")] = "",
) -> None:
    """Replay a shop's event log against a running API.

    Carts, removals and purchases of a CSV file; then the report and every check of `expiry doctor`.
    """
    with _explained():
        settings = _settings()
        if not api_key:
            raise errors.SetupError("Name a tenant key: --api-key or EXPIRY_API_KEY (dev.json holds one).")
        _run(_with_database(settings, _nothing))  # and its schema
        code = _run(
            replay.run(
                events=shop.read_csv(file),
                api_url=api_url,
                api_key=api_key,
                database_url=settings.database_url.get_secret_value(),
                speed=speed,
                ttl_s=ttl_s,
                settings=settings,
                console=Console(),
            )
        )
    raise typer.Exit(code)


@app.command()
def pause(loop: Loop, *, reason: Reason, by: By = "cli") -> None:
    """Pause a loop in the whole fleet, within a second; data stays as it is."""
    _set_paused(loop, paused=True, by=by, reason=reason)


@app.command()
def resume(loop: Loop, *, reason: Reason = "", by: By = "cli") -> None:
    """Let a paused loop go on."""
    _set_paused(loop, paused=False, by=by, reason=reason or None)


@governor_app.command("explain")
def governor_explain() -> None:
    """Say in one sentence why the rate is what it is."""
    with _explained():
        governor = GovernorSettings()

        async def read(conn: Conn) -> str:
            return explain.sentence(await explain.read(conn, FLEET, governor))

        typer.echo(_run(_with_database(_settings(), read)))


@governor_app.command("pause")
def governor_pause(*, reason: Reason, by: By = "cli") -> None:
    """Allow nothing in the whole fleet, not even the floor, until `resume`."""
    _order(lambda conn: orders.pause(conn, FLEET, reason=reason, by=by))


@governor_app.command("resume")
def governor_resume() -> None:
    """End a pause; the fleet goes on at half the last good rate at most."""
    _order(lambda conn: orders.resume(conn, FLEET))


@governor_app.command("override")
def governor_override(
    *,
    ceiling_per_s: Annotated[float | None, typer.Option(help="Permits a second; may only lower.")] = None,
    ttl_s: Annotated[float, typer.Option(help="It ends by itself after so many seconds.")] = 3600,
    end: Annotated[bool, typer.Option("--end", help="End it now.")] = False,
    reason: Annotated[str, typer.Option(help="Why; kept with who and when.")] = "",
    by: By = "cli",
) -> None:
    """Lower the ceiling for a while, or end that."""
    with _explained():
        if end:
            _order(lambda conn: orders.withdraw(conn, FLEET))
            return
        if ceiling_per_s is None or not reason:
            raise errors.SetupError("Give --ceiling-per-s and --reason, or --end.")
        most_per_s, ceiling = GovernorSettings().ceiling_per_s, ceiling_per_s
    _order(
        lambda conn: orders.override(
            conn, FLEET, ceiling_per_s=ceiling, most_per_s=most_per_s, ttl_s=ttl_s, reason=reason, by=by
        )
    )


@governor_app.command("journal")
def governor_journal(
    *,
    limit: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Newest decisions, at most so many.")
    ] = 100,
    brief: Annotated[bool, typer.Option("--brief", help="Time, rate and reason only.")] = False,
) -> None:
    """Write the last decisions, oldest first, a line of JSON each: `governor replay` takes that."""

    def write(line: str) -> None:
        if not brief:
            sys.stdout.write(line)
            return
        said = json.loads(line)
        decision = said["decision"]
        print(
            f"{said['decided_at']} {decision['allowance_per_s']:g}/s {decision['limited_by']}: {decision['reason']}"
        )

    with _explained():

        async def export(conn: Conn) -> None:
            await write_lines(conn, name=FLEET, limit=limit, write=write)

        _run(_with_database(_settings(), export))


@keys_app.command("create")
def keys_create(
    *,
    tenant: Annotated[str | None, typer.Option(help="Whose holds the key works on.")] = None,
    platform: Annotated[bool, typer.Option(help="A key for operators, without a tenant.")] = False,
    scope: Annotated[
        list[str] | None, typer.Option(help="holds (write), read, operate (nothing yet); all if left out.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What it is for.")] = None,
) -> None:
    """Make a key and print it, this once."""
    with _explained():
        if platform == (tenant is not None):
            raise errors.SetupError("Give either --tenant NAME or --platform.")
        if platform and scope:
            raise errors.SetupError("A platform key has no scopes to choose: leave --scope out.")
        scopes = ["platform"] if platform else scope or ["holds", "read", "operate"]

        async def create(conn: Conn) -> str:
            return await keys.create(conn, tenant_id=tenant, scopes=scopes, name=name)

        typer.echo(_run(_with_database(_settings(), create)))


@keys_app.command("list")
def keys_list() -> None:
    """List keys: id, tenant, scopes, last use; never the keys themselves."""
    with _explained():
        for row in _run(_with_database(_settings(), keys.list_)):
            typer.echo(json.dumps(row, default=str))


@keys_app.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="Its id, as `expiry keys list` shows it.")],
) -> None:
    """Refuse a key from now on (within seconds in every process)."""
    with _explained():

        async def revoke(conn: Conn) -> None:
            await keys.revoke(conn, key_id)

        _run(_with_database(_settings(), revoke))


@letters_app.command("list")
def letters_list(*, state: Annotated[LetterState, typer.Option(help="In which state.")] = "open") -> None:
    """List dead letters, newest first, one JSON object a line."""
    with _explained():

        async def read(conn: Conn) -> list[dict[str, Any]]:
            return await letters.list_(conn, state=state)

        for row in _run(_with_database(_settings(), read)):
            typer.echo(json.dumps(row, default=str))


@letters_app.command("replay")
def letters_replay(
    ids: Annotated[list[int] | None, typer.Argument(help="Their ids, as `list` shows them.")] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All that are open.")] = False,
    by: By = "cli",
) -> None:
    """Try dead letters again, once their cause is mended."""
    with _explained():
        if every == bool(ids):
            raise errors.SetupError("Give either ids or --all.")
    while every and (found := _run(_with_database(_settings(), letters.list_))):
        _resolve(letters.replay, [letter["id"] for letter in found], by)
    if ids:
        _resolve(letters.replay, ids, by)


@letters_app.command("discard")
def letters_discard(ids: LetterIds, *, by: By = "cli") -> None:
    """Close these dead letters; their holds stay as they are."""
    _resolve(letters.discard, ids, by)


# --- what the commands share


def _resolve(verb: Any, ids: list[int], by: str) -> None:  # noqa: ANN401 - replay or discard
    with _explained():

        async def resolve(conn: Conn) -> list[int]:
            done: list[int] = await verb(conn, ids, by=by)
            return done

        for done in _run(_with_database(_settings(), resolve)):
            typer.echo(done)


def _order(order: Callable[[Conn], Awaitable[object]]) -> None:
    """Give an order, and say what the fleet does about it."""
    with _explained():
        governor = GovernorSettings()

        async def give(conn: Conn) -> str:
            try:
                await order(conn)
            except ValueError as error:
                raise errors.SetupError(f"{error}.") from error
            found = await explain.read(conn, FLEET, governor)
            if governor.mode != "enforce":
                return f"Noted; but GOVERNOR_MODE is {governor.mode} here, and then no order counts."
            standing = ", ".join(each["kind"] for each in found.orders.as_list()) or "no order"
            if not found.led:
                return f"Noted: {standing}; but nobody leads, and until somebody does no order counts."
            return f"In force within {governor.interval_s:g} s: {standing}."

        typer.echo(_run(_with_database(_settings(), give)))


def _set_paused(loop: str, *, paused: bool, by: str, reason: str | None) -> None:
    with _explained():

        async def change(conn: Conn) -> None:
            await loops.set_paused(conn, loop, paused=paused, by=by, reason=reason)

        _run(_with_database(_settings(), change))


def _serve(*, api: bool, background: bool, log_format: str | None) -> None:
    with _explained():
        settings = _settings(**_given(log_format=log_format))

        async def serve() -> None:
            await Service(
                settings,
                GovernorSettings(),
                api=api,
                background=background,
                stop=dev.stop_on_signals(),
                role="api" if api else "worker",
                measured=ProbeSettings(),
            ).run()

        _run(serve())


async def _with_database(
    settings: Settings,
    work: Callable[[Conn], Awaitable[Any]],
    *,
    check: bool = True,
) -> Any:  # noqa: ANN401
    pool = await connect_database(settings, "cli")
    try:
        async with pool.acquire() as conn:
            if check:
                await schema.check(conn)
            return await work(conn)
    finally:
        await pool.close()


async def _nothing(_conn: Conn) -> None:
    """Want the right schema and nothing more."""


def _given(**options: Any) -> dict[str, Any]:  # noqa: ANN401 - settings by name
    """Options that were given override the environment."""
    secret = {"database_url", "redis_url"}
    return {k: SecretStr(v) if k in secret else v for k, v in options.items() if v is not None}


def _settings(**overrides: Any) -> Settings:  # noqa: ANN401 - settings by name
    settings = Settings(**overrides)
    for name in sorted(n for n in os.environ if n.startswith("EXPIRY_") and n not in _KNOWN_NAMES):
        print(f"expiry: {name} is no setting and has no effect; README lists them all.", file=sys.stderr)
    set_up_logging(settings.log_format, settings.log_level)
    return settings


def _run(work: Coroutine[Any, Any, T]) -> T:
    return uvloop.run(work)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what the user can mend into one clear sentence and exit status 2."""
    try:
        yield
    except ValidationError as error:
        prefix = "GOVERNOR_" if error.title in ("GovernorSettings", "ProbeSettings") else "EXPIRY_"
        for wrong in error.errors(include_url=False, include_context=False):
            name = prefix + "_".join(str(part) for part in wrong["loc"]).upper()
            given = "" if "url" in name.lower() else f" (it is {wrong['input']!r})"
            what = wrong["msg"].removeprefix("Value error, ")
            said = f"{name}: {what}{given}" if wrong["loc"] else what
            print(f"expiry: {said}.", file=sys.stderr)
        _exit()
    except errors.ExpiryError as error:
        print(f"expiry: {error}", file=sys.stderr)
        _exit()
    except (asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
        reason = " ".join(mask(str(error)).split()) or type(error).__name__
        print(f"expiry: PostgreSQL failed ({reason}): see its log, then try again.", file=sys.stderr)
        _exit()


def _exit() -> NoReturn:
    raise typer.Exit(EXIT_SETUP)


def main() -> None:
    """Run the command line."""
    # Until a loop runs and handles it, SIGTERM is to unwind like Ctrl-C: servers are stopped in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


if __name__ == "__main__":
    main()
