"""The one piece of work that everybody does, on the product's own schema.

A guarded UPDATE (held, due, this generation) and an outbox row of the product's shape, in one statement.
"""

# What expiry_end in schema.sql writes. The epoch is noted once, when the database is made.
_EVENT = """
INSERT INTO outbox (epoch, key, tenant_id, type, hold_id, generation, occurred_at, data)
SELECT (SELECT p.epoch FROM outbox_epochs p WHERE p.server_started_at = pg_postmaster_start_time()),
       'expire:' || e.id || ':' || e.generation, e.tenant_id, 'hold.expired', e.id, e.generation, e.ended_at,
       jsonb_build_object('resource_ids', e.resource_ids, 'quantities', e.quantities, 'holder', e.holder,
                          'external_ref', e.external_ref, 'expires_at', e.expires_at, 'by', 'worker', 'reason', NULL)
  FROM ended e
"""
_SET = "SET state = 'expired', ended_at = {at}, ended_by = 'worker', next_attempt_at = NULL"
_RETURNING = """RETURNING h.id, h.tenant_id, h.generation, h.resource_ids, h.quantities, h.counted, h.holder,
           h.external_ref, h.expires_at, h.ended_at"""

# For queues of jobs: one hold. It answers `INSERT 0 1`, or `INSERT 0 0` if there was nothing to end.
EXPIRE_ONE = f"""
WITH ended AS (
    UPDATE holds h {_SET.format(at="clock_timestamp()")}
     WHERE h.id = $1::uuid AND h.generation = $2::bigint AND h.state = 'held'
       AND h.expires_at <= statement_timestamp()
    {_RETURNING}
) {_EVENT}"""

_DUE = """
SELECT d.id FROM holds d
 WHERE d.state = 'held' AND d.next_attempt_at IS NULL AND d.expires_at <= statement_timestamp()
 ORDER BY d.expires_at, d.id LIMIT $1 FOR NO KEY UPDATE SKIP LOCKED
"""
# The end is the start of the statement here, which makes the measured time include the search.
_AT = _SET.format(at="statement_timestamp()")
_UNITS = """, units AS (
    SELECT e.tenant_id, i.resource_id, sum(i.quantity) AS quantity
      FROM ended e, unnest(e.resource_ids, e.quantities, e.counted) AS i (resource_id, quantity, counted)
     WHERE i.counted GROUP BY e.tenant_id, i.resource_id
), given_back AS (
    UPDATE resources r SET held = r.held - u.quantity
      FROM units u WHERE r.tenant_id = u.tenant_id AND r.resource_id = u.resource_id
)"""
_BY_ARRAY = f"UPDATE holds h {_AT} WHERE h.id = ANY (ARRAY({_DUE})) {_RETURNING}"
_BY_JOIN = f"UPDATE holds h {_AT} FROM due WHERE h.id = due.id {_RETURNING}"

# For bare reapers: $1 holds at once, oldest first.
REAP = {
    "array": f"WITH ended AS ({_BY_ARRAY}) {_EVENT}",
    "join": f"WITH due AS ({_DUE}), ended AS ({_BY_JOIN}) {_EVENT}",
    "counters": f"WITH ended AS ({_BY_ARRAY}) {_UNITS} {_EVENT}",
}

# --- holds to work on: $1 how many, $2 whether their resources are counted
RESOURCES = 1000
SEED_RESOURCES = f"""
INSERT INTO resources (tenant_id, resource_id, capacity, held)
SELECT 'shop', 'room-' || r, 1000000, (SELECT count(*) FROM generate_series(1, $1::int) i WHERE i % {RESOURCES} = r)
  FROM generate_series(0, {RESOURCES - 1}) r
"""
SEED = f"""
INSERT INTO holds (id, tenant_id, resource_ids, quantities, counted, placed_at, expires_at, holder)
SELECT uuidv7(), 'shop', ARRAY['room-' || i % {RESOURCES}], ARRAY[1], ARRAY[$2::boolean],
       $3::timestamptz - interval '15 min', $3::timestamptz + i * $4::interval, 'user-' || i
  FROM generate_series(1, $1::int) i
"""

# --- what came of it
ENDED = """
SELECT NOT EXISTS (SELECT FROM (SELECT FROM holds WHERE state = 'held' AND next_attempt_at IS NULL
                             ORDER BY expires_at DESC, id DESC LIMIT 1) h)
"""  # from the far end: nobody else works there, so it costs nothing
BEGUN = "SELECT EXISTS (SELECT FROM outbox)"
SPAN = """
SELECT count(*) AS done, min(h.ended_at) AS first,
       max(pg_xact_commit_timestamp(o.xid::text::xid)) AS last
  FROM holds h JOIN outbox o ON o.hold_id = h.id AND o.type = 'hold.expired' WHERE h.state = 'expired'
"""
LAGS = """
SELECT extract(epoch FROM h.ended_at - h.expires_at)::float8 * 1000 AS ended_ms,
       extract(epoch FROM pg_xact_commit_timestamp(o.xid::text::xid) - h.expires_at)::float8 * 1000 AS committed_ms,
       h.expires_at > (SELECT min(f.expires_at) FROM holds f) + $1::interval AS lone
  FROM holds h JOIN outbox o ON o.hold_id = h.id AND o.type = 'hold.expired' ORDER BY h.expires_at
"""
# Whatever is wrong with the books, one row each; the same for everybody.
WRONG = """
SELECT 'a hold has not one event of its own' AS what WHERE
    (SELECT count(*) FROM holds WHERE state = 'expired') <> (SELECT count(*) FROM outbox WHERE type = 'hold.expired')
UNION ALL SELECT 'an event lacks something' WHERE EXISTS (SELECT FROM outbox o WHERE
    o.key <> 'expire:' || o.hold_id || ':' || o.generation OR NOT o.data ?& ARRAY['resource_ids', 'quantities',
    'holder', 'external_ref', 'expires_at', 'by', 'reason'] OR o.occurred_at IS NULL)
UNION ALL SELECT 'a counter is wrong' WHERE EXISTS (SELECT FROM resources r WHERE r.held <>
    (SELECT count(*) FROM holds h WHERE h.state = 'held' AND h.counted[1] AND h.resource_ids[1] = r.resource_id))
"""
