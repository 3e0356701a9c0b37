"""Whether the promises are kept by the rows that are there: `expiry doctor`.

Only reads, and only so much; what is asked is in `expiry.promises`.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
from redis.asyncio import Redis
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from expiry import schema
from expiry.holds import Conn
from expiry.permits import FLEET
from expiry.promises import CHECKS, COUNTERS, Check
from expiry.settings import Settings
from expiry.wakeups import REDIS_AWAY
from governor import GovernorSettings, explain

ROWS_MAX = 50_000  # things one check looks at: about a second on a small machine
EXAMPLES_MAX = 5
PRUNE_MARGIN = timedelta(hours=1)  # what is about to be pruned may go piece by piece while we look


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found: `count` things wrong; the note says among how many, and what was left out."""

    check: Check
    ok: bool
    count: int = 0
    examples: Sequence[str] = ()
    seconds: float = 0.0
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        """Say it for machines."""
        return asdict(self) | {"check": self.check.name, "promise": self.check.promise}


SCHEMA = Check("schema", "", "", "schema")
CLOCKS = Check("clocks", "", "SELECT clock_timestamp()", "clocks, against this machine's")
DUE_SOON = """
SELECT count(*) FROM (SELECT FROM holds WHERE state = 'held' AND next_attempt_at IS NULL
    AND expires_at <= statement_timestamp() + $1::double precision * interval '1 second' LIMIT 1000000) h
"""
PAUSED = """
SELECT string_agg(name || ' by ' || changed_by || ' since ' || date_trunc('second', changed_at)
                  || coalesce(' (' || reason || ')', ''), ', ' ORDER BY name)
  FROM loops WHERE paused
"""
LOOPS = Check("loops", "", PAUSED, "paused loops")
# Who may see the sessions of others: without that the probes read a busy database as an idle one.
MAY_MEASURE = "SELECT pg_has_role('pg_read_all_stats', 'USAGE') AS may_measure, current_user AS role"
GOVERNOR = Check("governor", "", MAY_MEASURE, "governor")
WAKEUPS = Check("wakeups", "", DUE_SOON, "wake-ups in Redis")


async def examine(
    conn: Conn,
    *,
    since: datetime | None,
    settings: Settings,
    redis: Redis | None = None,
    governor: GovernorSettings | None = None,
    rows_max: int = ROWS_MAX,
) -> list[Finding]:
    """Run every check on what was placed or changed since then (None: all that is kept).

    Takes a connection outside of a transaction and only reads. A check that does not finish within
    `statement_timeout_s` has failed, for nobody can vouch for it. Without our schema the rest is left.
    """
    version = await schema.version(conn)
    found = f"version {version}, needed {schema.VERSION}"
    findings = [Finding(check=SCHEMA, ok=version == schema.VERSION, note=found)]
    if version != schema.VERSION:
        return findings
    clocks, now = await _clocks(conn, redis)
    paused = await conn.fetchval(PAUSED)
    if paused:
        findings.append(Finding(check=LOOPS, ok=True, note=paused))
    if governor is not None:
        findings.append(await _governor(conn, governor))
    kept_since = now - timedelta(seconds=settings.retention_s) + PRUNE_MARGIN
    oldest = max(since or kept_since, kept_since)
    first_id = UUID(int=int(oldest.timestamp() * 1000) << 80)
    late_s = settings.sweep_interval_s + settings.grace_s + settings.lease_s
    given = (first_id, oldest, rows_max, late_s)
    findings += [await _run(conn, check, given, settings) for check in CHECKS]
    findings.append(clocks)
    if redis is not None:
        findings.append(await _wakeups(conn, redis, settings, now))
    return findings


def healthy(findings: Iterable[Finding]) -> bool:
    """Whether no check failed."""
    return all(f.ok for f in findings)


# Every parameter is named once, or a statement that has no use for one would not be prepared.
VERDICT = """
SELECT count(*) AS seen, count(f.wrong) AS wrong, (array_agg(f.wrong) FILTER (WHERE f.wrong IS NOT NULL))[1:{examples}]
       AS examples
  FROM ({statement}) f
 WHERE num_nonnulls($1::uuid, $2::timestamptz, $3::bigint, $4::double precision) = 4
"""


async def _run(
    conn: Conn,
    check: Check,
    given: tuple[UUID, datetime, int, float],
    settings: Settings,
) -> Finding:
    started_s = time.perf_counter()
    try:
        async with conn.transaction(readonly=True):
            timeout_ms = str(round(settings.statement_timeout_s * 1000))
            # For this transaction only; compiling would take longer than most of these statements.
            await conn.execute(
                "SELECT set_config('statement_timeout', $1, true), set_config('jit', 'off', true)",
                timeout_ms,
            )
            statement = VERDICT.format(statement=check.statement, examples=EXAMPLES_MAX)
            row = await conn.fetchrow(statement, *given)
    except asyncpg.QueryCanceledError:
        waited_s = time.perf_counter() - started_s
        note = f"not finished after {waited_s:.0f} s: look at less (since)"
        return Finding(check=check, ok=False, seconds=waited_s, note=note)
    assert row is not None  # noqa: S101 - an aggregate answers one row
    return Finding(
        check=check,
        ok=not row["wrong"],
        count=row["wrong"],
        examples=row["examples"] or (),
        seconds=time.perf_counter() - started_s,
        note=_looked_at(check, row["seen"], rows_max=given[2]),
    )


def _looked_at(check: Check, seen: int, *, rows_max: int) -> str:
    bound = "" if seen < rows_max else "sample of " if check.statement == COUNTERS else "newest "
    return f"{bound}{seen:,} {check.subject}"


async def _clocks(conn: Conn, redis: Redis | None) -> tuple[Finding, datetime]:
    """Compare the clocks, to half a round trip; the database's is the one that counts."""
    asked_at = datetime.now(UTC)
    now: datetime = await conn.fetchval(CLOCKS.statement)
    travel = (datetime.now(UTC) - asked_at) / 2
    note = f"PostgreSQL {(now - asked_at - travel).total_seconds() * 1000:+.1f} ms"
    if redis is not None:
        try:
            asked_at = datetime.now(UTC)
            seconds, micros = await redis.time()
            travel = (datetime.now(UTC) - asked_at) / 2
            skew_s = seconds + micros / 1e6 - (asked_at + travel).timestamp()
            note += f", Redis {skew_s * 1000:+.1f} ms"
        except REDIS_AWAY as error:
            note += f", Redis does not answer ({error!r})"
    return Finding(check=CLOCKS, ok=True, note=note), now


async def _governor(conn: Conn, governor: GovernorSettings) -> Finding:
    """Say why the rate is what it is, and whether the database can be measured by this role."""
    row = await conn.fetchrow(MAY_MEASURE)
    note = explain.sentence(await explain.read(conn, FLEET, governor))
    if row is not None and not row["may_measure"]:
        note += (
            f" The role {row['role']} lacks pg_read_all_stats, so errors and timeouts alone limit the rate: "
            f"GRANT pg_read_all_stats TO {row['role']}."
        )
    return Finding(check=GOVERNOR, ok=True, note=note)


async def _wakeups(conn: Conn, redis: Redis, settings: Settings, now: datetime) -> Finding:
    """Count both sides; they differ by what is in flight, and by wake-ups that a renewal made stale."""
    held = await conn.fetchval(DUE_SOON, float(settings.horizon_s))
    try:
        until_ms = (now.timestamp() + settings.horizon_s) * 1000
        queued = await redis.zcount(settings.queue, "-inf", until_ms)
        aside = await redis.zcard(f"{settings.queue}:unknown")
    except REDIS_AWAY as error:
        return Finding(check=WAKEUPS, ok=True, note=f"Redis does not answer ({error!r})")
    note = f"{queued:,} for {held:,} holds due within {settings.horizon_s:.0f} s, {aside:,} moved aside"
    return Finding(check=WAKEUPS, ok=True, note=note)


def render(findings: Sequence[Finding]) -> RenderableType:
    """Lay the findings out for a terminal of 80 columns; examples of what is wrong come below."""
    table = Table(box=box.SIMPLE_HEAD, title="doctor", title_justify="left", pad_edge=False, width=80)
    for name in ("", ""):
        table.add_column(name)
    table.add_column("promise", ratio=1)
    for name in ("looked at", "ms"):
        table.add_column(name, justify="right", style="dim", no_wrap=True)
    for finding in findings:
        check, note = finding.check, escape(finding.note)
        took = f"{finding.seconds * 1000:,.0f}" if finding.seconds else ""
        if not check.promise and finding.ok:
            table.add_row("[dim]·[/]", "", f"[dim]{check.explains}: {note}[/]", "", took)
        elif finding.ok:
            table.add_row("[green]✓[/]", check.promise, check.explains, note, took)
        elif finding.count:
            looked_at = f"[red]{finding.count:,} wrong[/] of {note}"
            table.add_row("[red]✗[/]", check.promise, f"[red]{check.explains}[/]", looked_at, took)
        else:
            table.add_row("[red]✗[/]", check.promise, f"[red]{check.explains}: {note}[/]", "", took)
    examples = (
        Text(f"✗ {f.check.promise}  {example}", style="red") for f in findings for example in f.examples
    )
    checked = [f for f in findings if f.check.promise]
    kept = sum(f.ok for f in checked)
    verdict = Text(f"{kept} of {len(checked)} checks passed.", style="green" if healthy(findings) else "red")
    return Group(table, *examples, verdict)
