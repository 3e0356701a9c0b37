"""The promises that leave a trace in rows, as queries: `expiry doctor`.

Each is one statement and so one snapshot: what a verb changes together is seen together, and a healthy
store passes under load too. Each looks at a bounded number of rows, the newest first, through an index or
a bounded scan, and answers one row per thing it looked at: what is wrong with it, or null.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich import box
from rich.markup import escape
from rich.table import Table

from expiry import schema
from expiry.settings import Settings

ROWS_MAX = 50_000  # things one check looks at: about a second on a small machine
EXAMPLES_MAX = 5
PRUNE_MARGIN = timedelta(hours=1)  # what is about to be pruned may go piece by piece while we look


@dataclass(frozen=True, slots=True)
class Check:
    """A promise as a query. `explains` says it in plain words, `subject` what was looked at.

    Without a `promise` the figure is told, not judged.
    """

    name: str
    promise: str
    statement: str
    explains: str
    subject: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found: `count` things wrong; the note says among how many, and what was left out."""

    check: Check
    ok: bool
    count: int = 0
    examples: Sequence[str] = ()
    seconds: float = 0.0
    note: str = ""


# $1 oldest id, $2 its time, $3 rows at most, $4 seconds that a hold may be overdue. Ids are of version 7,
# so the primary key is in the order of placing; holds placed earlier but touched since are found by their
# events. LIMIT 1 keeps a lookup one probe of an index, whatever the statistics say.
SEEN = """
WITH touched AS MATERIALIZED (
    SELECT e.* FROM (SELECT * FROM outbox ORDER BY xid DESC, id DESC LIMIT $3) e WHERE e.occurred_at >= $2
), seen AS MATERIALIZED (
    (SELECT h.id FROM holds h WHERE h.id >= $1 ORDER BY h.id DESC LIMIT $3)
    UNION SELECT t.hold_id FROM touched t WHERE t.type LIKE 'hold.%'
)"""
HOLD = "CROSS JOIN LATERAL (SELECT * FROM holds h WHERE h.id = s.id LIMIT 1) h"

# Two witnesses: the row, and the event with the deadline that held when it was written.
NOT_EARLY = f"""{SEEN}
SELECT CASE WHEN h.state = 'expired' AND h.ended_at < h.expires_at
            THEN h.id || ' expired before its deadline, by ' || (h.expires_at - h.ended_at) END AS wrong
  FROM seen s {HOLD}
UNION ALL
SELECT t.key || ' was written before the deadline, by ' || ((t.data->>'expires_at')::timestamptz - t.occurred_at)
  FROM touched t
 WHERE t.type = 'hold.expired' AND t.occurred_at < (t.data->>'expires_at')::timestamptz
"""  # noqa: S608 - constants of this module, here and below

# Over all generations: the unique index of the outbox knows one event per generation and type.
ONE_END = f"""{SEEN}
SELECT CASE WHEN e.ends IS DISTINCT FROM CASE h.state
                WHEN 'held' THEN NULL
                WHEN 'returned' THEN ARRAY['hold.confirmed', 'hold.returned']
                ELSE ARRAY['hold.' || h.state] END
            THEN h.id || ' is ' || h.state || ', its events say: '
                 || coalesce(array_to_string(e.ends, ', '), 'held') END AS wrong
  FROM seen s {HOLD}
 CROSS JOIN LATERAL (
        SELECT array_agg(o.type ORDER BY o.type) AS ends FROM outbox o
         WHERE o.hold_id = s.id
           AND o.type IN ('hold.confirmed', 'hold.released', 'hold.expired', 'hold.returned')) e
 WHERE h.placed_at >= $2 OR (h.ended_at >= $2 AND h.state <> 'returned')
"""  # noqa: S608

WHOLE_HISTORY = f"""{SEEN}
SELECT CASE WHEN (e.placed, e.renewed, e.later) IS DISTINCT FROM (1, h.generation - 1, 0)
            THEN h.id || ' has generation ' || h.generation || ' but ' || e.placed || ' placed, ' || e.renewed
                 || ' renewed and ' || e.later || ' later events' END AS wrong
  FROM seen s {HOLD}
 CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE o.type = 'hold.placed' AND o.generation = 1) AS placed,
               count(*) FILTER (WHERE o.type = 'hold.renewed' AND o.generation BETWEEN 2 AND h.generation)
                   AS renewed,
               count(*) FILTER (WHERE o.generation > h.generation) AS later
          FROM outbox o WHERE o.hold_id = s.id) e
 WHERE h.placed_at >= $2
"""  # noqa: S608

KEYS = f"""{SEEN}
SELECT CASE WHEN t.key <> concat_ws(':', v.verb, t.hold_id, t.generation)
            THEN t.key || ' is the key of ' || concat_ws(':', v.verb, t.hold_id, t.generation) END AS wrong
  FROM touched t
  JOIN (VALUES ('hold.placed', 'place'), ('hold.renewed', 'renew'), ('hold.confirmed', 'confirm'),
               ('hold.released', 'release'), ('hold.expired', 'expire'), ('hold.returned', 'return'))
       AS v (type, verb) ON v.type = t.type
"""  # noqa: S608

CURRENT = f"""{SEEN}
SELECT CASE WHEN t.generation <> h.generation
            THEN t.key || ' ended a hold of generation ' || h.generation END AS wrong
  FROM touched t
 CROSS JOIN LATERAL (SELECT * FROM holds h WHERE h.id = t.hold_id LIMIT 1) h
 WHERE t.type = 'hold.expired'
"""  # noqa: S608

OVERDUE = """(
    SELECT h.* FROM holds h
     WHERE h.state = 'held' AND h.next_attempt_at IS NULL AND h.expires_at <= statement_timestamp()
     ORDER BY h.expires_at, h.id LIMIT $3) h"""
NOT_FORGOTTEN = f"""
SELECT CASE WHEN h.expires_at <= statement_timestamp() - $4::double precision * interval '1 second'
            THEN h.id || ' is overdue by ' || (statement_timestamp() - h.expires_at) END AS wrong
  FROM {OVERDUE}
"""  # noqa: S608

# A discarded dead letter leaves its hold backed off for ever: a person decided so.
BACKED_OFF = f"""
SELECT CASE WHEN h.id NOT IN (SELECT d.hold_id FROM dead_letters d WHERE d.state = 'discarded')
             AND NOT EXISTS (SELECT FROM dead_letters d
                              WHERE d.hold_id = h.id AND d.kind = 'expire' AND d.state IN ('retrying', 'open'))
            THEN h.id || ' failed ' || h.attempts || ' times and has no dead letter' END AS wrong
  FROM ((SELECT b.id, b.attempts FROM holds b
          WHERE b.state = 'held' AND b.next_attempt_at IS NOT NULL
          ORDER BY b.next_attempt_at, b.id LIMIT $3)
        UNION ALL SELECT h.id, h.attempts FROM {OVERDUE} WHERE h.attempts > 0) h
"""  # noqa: S608

IN_TIME = f"""{SEEN}
SELECT CASE WHEN h.ended_at > h.expires_at
            THEN h.id || ' was confirmed after its deadline, by ' || (h.ended_at - h.expires_at) END AS wrong
  FROM seen s {HOLD}
 WHERE h.state IN ('confirmed', 'returned')
"""  # noqa: S608

# No index leads from a resource to its confirmed holds, and none is worth its price at every expiry: the
# newest holds are added up instead, which is exact when they are all there are, else the least there can be.
COUNTERS = """
WITH newest AS MATERIALIZED (
    SELECT h.tenant_id, h.state, h.resource_ids, h.quantities, h.counted FROM holds h ORDER BY h.id DESC LIMIT $3
), confirmed AS MATERIALIZED (
    SELECT n.tenant_id, i.resource_id, sum(i.quantity) AS units
      FROM newest n, unnest(n.resource_ids, n.quantities, n.counted) AS i (resource_id, quantity, counted)
     WHERE n.state = 'confirmed' AND i.counted GROUP BY n.tenant_id, i.resource_id
)
SELECT CASE WHEN r.held <> f.units + m.units
            THEN r.resource_id || ' counts ' || r.held || ' held, its holds have ' || f.units + m.units
            WHEN r.confirmed - r.confirmed_base < coalesce(c.units, 0)
              OR (r.confirmed - r.confirmed_base > coalesce(c.units, 0) AND (SELECT count(*) < $3 FROM newest))
            THEN r.resource_id || ' counts ' || r.confirmed || ' confirmed (' || r.confirmed_base
                 || ' pruned), its holds have ' || coalesce(c.units, 0) END AS wrong
  FROM (SELECT * FROM resources TABLESAMPLE SYSTEM (
            (SELECT least(100, 100 * $3 / greatest(k.reltuples, 1)) FROM pg_class k
              WHERE k.oid = 'resources'::regclass)) LIMIT $3) r
 CROSS JOIN LATERAL (
        SELECT coalesce(sum(h.quantities[1]), 0) AS units FROM holds h
         WHERE h.state = 'held' AND h.tenant_id = r.tenant_id AND h.resource_ids[1] = r.resource_id
           AND h.counted[1]) f
 CROSS JOIN LATERAL (
        SELECT coalesce(sum(h.quantities[array_position(h.resource_ids, r.resource_id)]), 0) AS units
          FROM holds h
         WHERE h.state = 'held' AND cardinality(h.resource_ids) > 1 AND h.resource_ids @> ARRAY[r.resource_id]
           AND h.tenant_id = r.tenant_id AND h.resource_ids[1] <> r.resource_id
           AND h.counted[array_position(h.resource_ids, r.resource_id)]) m
  LEFT JOIN confirmed c ON c.tenant_id = r.tenant_id AND c.resource_id = r.resource_id
"""

NOT_OVERSOLD = """
SELECT CASE WHEN r.held + r.confirmed > r.capacity AND r.lowered_at IS NULL
            THEN r.resource_id || ' has ' || r.held || ' held and ' || r.confirmed || ' confirmed of '
                 || r.capacity END AS wrong
  FROM (SELECT * FROM resources LIMIT 20 * $3) r
"""

DEAD_LETTERS = """
SELECT CASE WHEN d.attempts < 1 OR '' IN (d.reason, d.first_error, d.last_error)
              OR d.last_failed_at < d.first_failed_at
            THEN 'dead letter ' || d.id || ' lacks attempts, a reason or an error'
            WHEN d.state IN ('retrying', 'open') AND h.state <> 'held'
            THEN 'dead letter ' || d.id || ' is ' || d.state || ', its hold is ' || h.state END AS wrong
  FROM (SELECT * FROM dead_letters ORDER BY id DESC LIMIT $3) d
  LEFT JOIN LATERAL (SELECT h.state FROM holds h WHERE h.id = d.hold_id LIMIT 1) h ON true
"""

CHECKS = (
    Check("not_early", "P1", NOT_EARLY, "no hold expired before its deadline", "holds, events"),
    Check("one_end", "P2", ONE_END, "every ended hold ended once, held ones not at all", "holds"),
    Check("whole_history", "P3", WHOLE_HISTORY, "each place and renewal wrote one event", "holds"),
    Check("keys", "P3", KEYS, "an event's key is verb:hold:generation", "events"),
    Check("current", "P4", CURRENT, "only the latest generation expired", "expiries"),
    Check("not_forgotten", "P5", NOT_FORGOTTEN, "nothing overdue is forgotten", "overdue holds"),
    Check("backed_off", "P5", BACKED_OFF, "what fails has a dead letter", "failing holds"),
    Check("in_time", "P6", IN_TIME, "no hold was confirmed past its deadline", "confirmed"),
    Check("counters", "P7", COUNTERS, "the counters equal the sum of the holds", "resources"),
    Check("not_oversold", "P7", NOT_OVERSOLD, "nothing is sold twice", "resources"),
    Check("dead_letters", "P8", DEAD_LETTERS, "failures keep attempts and errors", "dead letters"),
)
SCHEMA = Check("schema", "", "", "the schema is the one this program needs")
CLOCKS = Check("clocks", "", "SELECT clock_timestamp()", "clocks against this machine's")
DUE_SOON = """
SELECT count(*) FROM (SELECT FROM holds WHERE state = 'held' AND next_attempt_at IS NULL
    AND expires_at <= statement_timestamp() + $1::double precision * interval '1 second' LIMIT 1000000) h
"""
WAKEUPS = Check("wakeups", "", DUE_SOON, "wake-ups in Redis")


async def examine(
    conn: "asyncpg.Connection[asyncpg.Record]",
    *,
    since: datetime | None,
    settings: Settings,
    redis: "Redis[bytes] | None" = None,
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
    kept_since = now - timedelta(seconds=settings.retention_s) + PRUNE_MARGIN
    oldest = max(since or kept_since, kept_since)
    first_id = UUID(int=int(oldest.timestamp() * 1000) << 80)
    late_s = settings.sweep_interval_s + settings.grace_s + settings.lease_s
    for check in CHECKS:
        findings.append(await _run(conn, check, (first_id, oldest, rows_max, late_s), settings))
    findings.append(clocks)
    if redis is not None:
        findings.append(await _wakeups(conn, redis, settings, now))
    return findings


def healthy(findings: Iterable[Finding]) -> bool:
    """Whether no check failed."""
    return all(f.ok for f in findings)


# Every parameter is named once, or a statement that has no use for one would not be prepared.
VERDICT = """
SELECT count(*) AS seen, count(f.wrong) AS wrong, (array_agg(f.wrong) FILTER (WHERE f.wrong IS NOT NULL))[1:5]
       AS examples
  FROM ({}) f
 WHERE num_nonnulls($1::uuid, $2::timestamptz, $3::bigint, $4::double precision) = 4
"""


async def _run(
    conn: "asyncpg.Connection[asyncpg.Record]",
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
            row = await conn.fetchrow(VERDICT.format(check.statement), *given)
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
    if seen < rows_max:
        return f"{seen:,} {check.subject}"
    return f"{seen:,} {check.subject}, " + ("a sample" if check.statement == COUNTERS else "the newest")


async def _clocks(
    conn: "asyncpg.Connection[asyncpg.Record]", redis: "Redis[bytes] | None"
) -> tuple[Finding, datetime]:
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
        except (RedisError, OSError, TimeoutError) as error:
            note += f", Redis does not answer ({error!r})"
    return Finding(check=CLOCKS, ok=True, note=note), now


async def _wakeups(
    conn: "asyncpg.Connection[asyncpg.Record]", redis: "Redis[bytes]", settings: Settings, now: datetime
) -> Finding:
    """Count both sides; they differ by what is in flight, and by wake-ups that a renewal made stale."""
    held = await conn.fetchval(DUE_SOON, float(settings.horizon_s))
    try:
        until_ms = (now.timestamp() + settings.horizon_s) * 1000
        queued = await redis.zcount(settings.queue, "-inf", until_ms)
        aside = await redis.zcard(f"{settings.queue}:unknown")
    except (RedisError, OSError, TimeoutError) as error:
        return Finding(check=WAKEUPS, ok=True, note=f"Redis does not answer ({error!r})")
    note = f"{queued:,} for {held:,} holds due within {settings.horizon_s:.0f} s, {aside:,} moved aside"
    return Finding(check=WAKEUPS, ok=True, note=note)


def render(findings: Iterable[Finding]) -> Table:
    """Lay the findings out for a terminal of 80 columns; what is wrong comes with its examples."""
    table = Table(box=box.SIMPLE_HEAD, title="doctor", title_justify="left", pad_edge=False, expand=True)
    table.add_column("")
    table.add_column("")
    table.add_column("promise", ratio=1)
    table.add_column("looked at", justify="right")
    table.add_column("ms", justify="right")
    for finding in findings:
        check = finding.check
        mark = "[red]✗[/]" if not finding.ok else "[green]✓[/]" if check.promise else "[dim]·[/]"
        took = f"{finding.seconds * 1000:,.0f}" if finding.seconds else ""
        says = check.explains if finding.ok else f"[red]{check.explains}: {finding.count:,} do not[/]"
        table.add_row(mark, check.promise, says, escape(finding.note), f"[dim]{took}[/]")
        for example in finding.examples:
            table.add_row("", "", f"  [red]{escape(example)}[/]", "", "")
    return table
