"""The promises that leave a trace in rows, as queries for `expiry doctor`.

Each is one statement and so one snapshot: what a verb changes together is seen together, and a healthy
store passes under load too. Each looks at a bounded number of rows, the newest first, through an index or
a bounded scan, and answers one row per thing it looked at: what is wrong with it, or null.
"""

from dataclasses import dataclass

from expiry.deadletters import IN_REACH


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


# $1 oldest id, $2 its time, $3 rows at most, $4 seconds that a hold may be overdue. Ids are of version 7,
# so the primary key is in the order of placing; holds placed earlier but touched since are found by their
# events. LIMIT 1 keeps a lookup one probe of an index, whatever the statistics say.
SEEN = """
WITH touched AS MATERIALIZED (
    SELECT e.* FROM expiry_recent(expiry_reach($2, $3::int), $3::int) e
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
"""

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
"""

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
"""

KEYS = f"""{SEEN}
SELECT CASE WHEN t.key <> concat_ws(':', v.verb, t.hold_id, t.generation)
            THEN t.key || ' is the key of ' || concat_ws(':', v.verb, t.hold_id, t.generation) END AS wrong
  FROM touched t
  JOIN (VALUES ('hold.placed', 'place'), ('hold.renewed', 'renew'), ('hold.confirmed', 'confirm'),
               ('hold.released', 'release'), ('hold.expired', 'expire'), ('hold.returned', 'return'))
       AS v (type, verb) ON v.type = t.type
"""

CURRENT = f"""{SEEN}
SELECT CASE WHEN t.generation <> h.generation
            THEN t.key || ' ended a hold of generation ' || h.generation END AS wrong
  FROM touched t
 CROSS JOIN LATERAL (SELECT * FROM holds h WHERE h.id = t.hold_id LIMIT 1) h
 WHERE t.type = 'hold.expired'
"""

OVERDUE = f"""(
    SELECT h.* FROM holds h
     WHERE {IN_REACH} AND h.expires_at <= statement_timestamp()
     ORDER BY h.expires_at, h.id LIMIT $3) h"""
NOT_FORGOTTEN = f"""
SELECT CASE WHEN h.expires_at <= statement_timestamp() - $4::double precision * interval '1 second'
            THEN h.id || ' is overdue by ' || (statement_timestamp() - h.expires_at) END AS wrong
  FROM {OVERDUE}
"""

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
"""

IN_TIME = f"""{SEEN}
SELECT CASE WHEN h.ended_at > h.expires_at
            THEN h.id || ' was confirmed after its deadline, by ' || (h.ended_at - h.expires_at) END AS wrong
  FROM seen s {HOLD}
 WHERE h.state IN ('confirmed', 'returned')
"""

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
         WHERE CASE WHEN h.state = 'held' THEN cardinality(h.resource_ids) END > 1
           AND h.resource_ids @> ARRAY[r.resource_id]
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
    Check("not_early", "P1", NOT_EARLY, "no hold expired before its deadline", "holds"),
    Check("one_end", "P2", ONE_END, "each hold ended once, as its row says", "holds"),
    Check("whole_history", "P3", WHOLE_HISTORY, "each placing and renewal wrote one event", "holds"),
    Check("keys", "P3", KEYS, "an event's key is verb:hold:generation", "events"),
    Check("current", "P4", CURRENT, "only a hold's latest generation expired", "expiries"),
    Check("not_forgotten", "P5", NOT_FORGOTTEN, "nothing overdue is forgotten", "overdue holds"),
    Check("backed_off", "P5", BACKED_OFF, "every failing hold has a dead letter", "failing holds"),
    Check("in_time", "P6", IN_TIME, "no hold was confirmed past its deadline", "purchases"),
    Check("counters", "P7", COUNTERS, "the counters equal the sum of the holds", "resources"),
    Check("not_oversold", "P7", NOT_OVERSOLD, "nothing is sold twice", "resources"),
    Check("dead_letters", "P8", DEAD_LETTERS, "failures keep attempts and errors", "dead letters"),
)
