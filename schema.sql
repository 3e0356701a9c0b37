-- The specification of the hold store: PostgreSQL 14 or newer, re-runnable, version 3.
--
-- Applied by `expiry migrate` (one transaction, one advisory lock, so that many processes may
-- try at once) or by `psql -1 -f schema.sql`. Names are unqualified: the objects live in the first
-- schema of the search_path, and callers must have it there.
--
-- Reading order: the tables are what a hold is; the functions are what may happen to it.
--   expiry_place    (nothing) -> held
--   expiry_renew    held -> held, generation + 1
--   expiry_finish   held -> confirmed | released; confirmed -> returned
--   expiry_expire   held -> expired, in batches: the one transition that ends a hold by time
-- They are functions, not statements of the client, for two reasons: `place` must call the same
-- transition as the workers when it reclaims overdue holds, inside its own savepoint and round trip;
-- and a bounded lock wait (SET lock_timeout on the function) holds behind any connection pooler and in
-- a caller's own transaction without leaking into it.

CREATE TABLE IF NOT EXISTS expiry_schema (
    version     int PRIMARY KEY,                    -- compared with the program's own at every start
    applied_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- A database of an older version becomes this one here; what follows then finds it as it would have made it.
DO $$ BEGIN
    IF (SELECT max(version) FROM expiry_schema) = 1 THEN
        ALTER TABLE outbox ADD COLUMN epoch bigint NOT NULL DEFAULT 1;
        ALTER TABLE outbox ALTER COLUMN epoch DROP DEFAULT,
            DROP CONSTRAINT outbox_pkey, ADD PRIMARY KEY (tenant_id, epoch, xid, id);
    END IF;
    IF (SELECT max(version) FROM expiry_schema) <= 2 THEN
        ALTER TABLE governor_bucket
            ADD COLUMN IF NOT EXISTS spent bigint NOT NULL DEFAULT 0,
            ADD COLUMN IF NOT EXISTS unmet bigint NOT NULL DEFAULT 0,
            ADD COLUMN IF NOT EXISTS unmet_until bigint NOT NULL DEFAULT 0,
            ADD COLUMN IF NOT EXISTS completed bigint NOT NULL DEFAULT 0,
            ADD COLUMN IF NOT EXISTS failed bigint NOT NULL DEFAULT 0,
            ADD COLUMN IF NOT EXISTS timed_out bigint NOT NULL DEFAULT 0;
    END IF;
END $$;
-- Functions whose form has changed since version 1.
DROP FUNCTION IF EXISTS expiry_end(uuid[], text, text, text, text, timestamptz);
DROP FUNCTION IF EXISTS expiry_expire(uuid[], bigint[], text);

-- ---------------------------------------------------------------------------------------- holds

-- One row per hold. Items are three parallel arrays: one row to write, one row to end.
CREATE TABLE IF NOT EXISTS holds (
    id               uuid PRIMARY KEY,              -- version 7: new rows share index pages
    tenant_id        text NOT NULL,
    state            text NOT NULL DEFAULT 'held',
    generation       bigint NOT NULL DEFAULT 1,     -- + 1 at each renewal; older wake-ups become no-ops
    resource_ids     text[] NOT NULL,               -- 1..50, no resource twice
    quantities       int[] NOT NULL,                -- units of each, same order
    counted          boolean[] NOT NULL,            -- was the resource declared when these units were taken?
    placed_at        timestamptz NOT NULL,          -- statement_timestamp() of the placing statement
    expires_at       timestamptz NOT NULL,          -- the deadline; held units are free again from here on
    ended_at         timestamptz,                   -- clock_timestamp() after the locks, so lag includes waiting
    ended_by         text,                          -- worker, sweep, reclaim, or who called the verb
    returned_at      timestamptz,                   -- when a confirmed hold's units came back
    holder           text,
    external_ref     text,
    metadata         jsonb,
    max_renewals     int,
    lifetime_ends_at timestamptz,                   -- no renewal goes past this
    attempts         smallint NOT NULL DEFAULT 0,   -- failed attempts to expire this row (its own fault only)
    next_attempt_at  timestamptz,                   -- back-off after such a failure; infinity once dead-lettered
    CONSTRAINT holds_state CHECK (state IN (
        'held',       -- -> confirmed, released, expired
        'confirmed',  -- -> returned
        'released',   -- end
        'expired',    -- end
        'returned'    -- end
    )),
    CONSTRAINT holds_ended CHECK ((state = 'held') = (ended_at IS NULL)),
    CONSTRAINT holds_ended_by CHECK ((ended_at IS NULL) = (ended_by IS NULL)),
    CONSTRAINT holds_returned CHECK ((state = 'returned') = (returned_at IS NOT NULL)),
    CONSTRAINT holds_not_early CHECK (state <> 'expired' OR ended_at >= expires_at),
    CONSTRAINT holds_items CHECK (
        cardinality(resource_ids) BETWEEN 1 AND 50
        AND cardinality(quantities) = cardinality(resource_ids)
        AND cardinality(counted) = cardinality(resource_ids))
) WITH (
    -- Every hold is updated once and that update is never HOT: one dead row per hold. Vacuum by absolute
    -- numbers, so that a large table is not visited only every few million expiries.
    autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 50000,
    autovacuum_analyze_scale_factor = 0.0, autovacuum_analyze_threshold = 50000
);

-- A change of state is never HOT, so each further index would cost every expiry: all are partial on
-- 'held' (an expiry adds nothing to them) or on a column that is mostly null.
-- DUE_PAGE (sweep.py), HELD_BETWEEN (promoter.py), the overdue probe of expiry_place, OVERVIEW (overview.py), BACKLOG (observe.py)
CREATE INDEX IF NOT EXISTS holds_due ON holds (expires_at, id)
    WHERE state = 'held' AND next_attempt_at IS NULL;
-- BACKED_OFF_PAGE (sweep.py), OVERVIEW (overview.py): poison rows, kept out of the head of holds_due
CREATE INDEX IF NOT EXISTS holds_backed_off ON holds (next_attempt_at, id)
    WHERE state = 'held' AND next_attempt_at IS NOT NULL;
-- overdue holds of one resource: expiry_overdue, expiry_retrying, expiry_declare; BY_RESOURCE (listing.py)
CREATE INDEX IF NOT EXISTS holds_by_resource ON holds (tenant_id, (resource_ids[1]), expires_at)
    WHERE state = 'held';
-- the same for the second and later items of a hold (expiry_overdue, expiry_retrying, expiry_declare);
-- single-item holds never pay for it, and no other index implies its condition
CREATE INDEX IF NOT EXISTS holds_by_further_resource ON holds USING gin (resource_ids)
    WITH (fastupdate = off) WHERE CASE WHEN state = 'held' THEN cardinality(resource_ids) END > 1;
-- the hold that this holder already has, named in the 409 of expiry_place; BY_HOLDER (listing.py)
CREATE INDEX IF NOT EXISTS holds_by_holder ON holds (holder, tenant_id, id)
    WHERE state = 'held' AND holder IS NOT NULL;
-- BY_DEADLINE (listing.py): what a tenant holds, and what of it is overdue. Its condition is written so that no
-- other statement implies it: for one resource it would be the wrong index.
CREATE INDEX IF NOT EXISTS holds_by_tenant ON holds (tenant_id, expires_at, id)
    WHERE CASE WHEN state = 'held' THEN true END;
-- BY_REFERENCE (listing.py): the holds of an order or a cart, in any state
CREATE INDEX IF NOT EXISTS holds_by_external_ref ON holds (tenant_id, external_ref, id)
    WHERE external_ref IS NOT NULL;

-- ------------------------------------------------------------------------------------ resources

-- A declared resource is counted; one never declared has no row, no limit and no hot lock.
CREATE TABLE IF NOT EXISTS resources (
    tenant_id       text NOT NULL,
    resource_id     text NOT NULL,
    capacity        int CHECK (capacity >= 0),      -- null: counted, but without a limit
    held            bigint NOT NULL DEFAULT 0 CHECK (held >= 0),
    confirmed       bigint NOT NULL DEFAULT 0 CHECK (confirmed >= 0),
    confirmed_base  bigint NOT NULL DEFAULT 0,      -- the part of `confirmed` whose rows were pruned
    lowered_at      timestamptz,                    -- when capacity was set below what is still held + confirmed
    declared_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant_id, resource_id)
) WITH (
    -- Counters change with every hold and are in no index: free space on the page keeps them HOT.
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000
);
-- RESOURCES (resources.py): in the order of bytes, in which what begins alike stands together. Written so
-- that no other statement can take it for the primary key.
CREATE INDEX IF NOT EXISTS resources_by_prefix ON resources ((tenant_id || ''), (resource_id || '') COLLATE "C");

-- --------------------------------------------------------------------------------------- outbox

-- The event log: one row per verb and generation, written by the transaction of the verb. Append-only
-- until pruned. A reader's cursor is a place in (epoch, xid, id), never id alone: a lower id may commit later.
CREATE TABLE IF NOT EXISTS outbox (
    xid          xid8 NOT NULL DEFAULT pg_current_xact_id(),  -- a reader stays below the oldest running one
    id           bigint GENERATED ALWAYS AS IDENTITY,
    epoch        bigint NOT NULL,                   -- expiry_epoch(): xids are in order within one run of a server
    key          text NOT NULL,                     -- expire:{hold_id}:{generation}: the event's stable name
    tenant_id    text NOT NULL,
    type         text NOT NULL,                     -- hold.placed, hold.renewed, hold.expired, ...
    hold_id      uuid NOT NULL,
    generation   bigint NOT NULL,
    occurred_at  timestamptz NOT NULL,
    data         jsonb NOT NULL,
    -- expiry_feed, expiry_forget_events, TENANTS_WITH_OLD_EVENTS (prune.py)
    PRIMARY KEY (tenant_id, epoch, xid, id)
) WITH (autovacuum_vacuum_insert_scale_factor = 0.0, autovacuum_vacuum_insert_threshold = 100000);
-- P3 as a constraint: a second effect of one verb on one generation cannot be written; ONE_END (promises.py),
-- expiry_feed and HISTORY (history.py), for one hold
CREATE UNIQUE INDEX IF NOT EXISTS outbox_once ON outbox (hold_id, generation, type);
-- expiry_recent: what was lately; it costs next to nothing, for time and place agree in a log
CREATE INDEX IF NOT EXISTS outbox_by_time ON outbox USING brin (occurred_at) WITH (pages_per_range = 32, autosummarize = on);

-- Runs of database servers. A restored or promoted server may count transactions from anywhere; as it was started
-- at another time, its events belong to another epoch, which comes after all that was read before.
CREATE TABLE IF NOT EXISTS outbox_epochs (
    server_started_at  timestamptz PRIMARY KEY,     -- pg_postmaster_start_time()
    epoch              bigint NOT NULL
);

-- Up to where the events of a tenant have been pruned: a cursor before that has missed some.
CREATE TABLE IF NOT EXISTS outbox_pruned (
    tenant_id  text PRIMARY KEY,
    epoch      bigint NOT NULL,
    xid        xid8 NOT NULL,
    id         bigint NOT NULL
);

-- ------------------------------------------------------------------------------------- failures

-- Work that keeps failing through its own fault: kept until it succeeds, or an operator replays or
-- discards it.
CREATE TABLE IF NOT EXISTS dead_letters (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id        text NOT NULL,
    kind             text NOT NULL,                 -- expire
    hold_id          uuid NOT NULL,
    generation       bigint NOT NULL,
    reason           text NOT NULL,                 -- the SQLSTATE of the last error
    attempts         int NOT NULL,
    first_error      text NOT NULL,
    last_error       text NOT NULL,
    first_failed_at  timestamptz NOT NULL,
    last_failed_at   timestamptz NOT NULL,
    state            text NOT NULL CHECK (state IN (
        'retrying',   -- -> recovered, open: not a dead letter yet, attempts are left
        'recovered',  -- end; a later attempt succeeded
        'open',       -- -> replayed, discarded, recovered: the dead letter proper, waits for a person
        'replayed',   -- end; a failure after the replay opens a new row
        'discarded'   -- end
    )),
    resolved_at      timestamptz,
    resolved_by      text,
    CONSTRAINT dead_letters_resolved CHECK ((state IN ('retrying', 'open')) = (resolved_at IS NULL))
);
-- one unresolved row per piece of work: RECORD_FAILURE, REPLAY (deadletters.py), expiry_end
CREATE UNIQUE INDEX IF NOT EXISTS dead_letters_unresolved ON dead_letters (hold_id, kind)
    WHERE state IN ('retrying', 'open');
-- FAILURES (history.py)
CREATE INDEX IF NOT EXISTS dead_letters_by_hold ON dead_letters (hold_id, id);

-- ------------------------------------------------------------------------------------ operation

-- Loops an operator paused; data stays as it is. No row: running.
CREATE TABLE IF NOT EXISTS loops (
    name        text PRIMARY KEY,                   -- worker, promoter, sweep, prune
    paused      boolean NOT NULL,
    reason      text,
    changed_by  text NOT NULL,
    changed_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The token bucket as a row, for a fleet without Redis. One row is rewritten for every batch of permits: no
-- index but the key, and a page kept nearly empty, so that every update is HOT and prunes what the last left.
CREATE TABLE IF NOT EXISTS governor_bucket (
    name      text   PRIMARY KEY,
    tokens    bigint NOT NULL DEFAULT 0 CHECK (tokens >= 0),  -- nano-permits
    debt      bigint NOT NULL DEFAULT 0 CHECK (debt >= 0),    -- nano-permits
    micros    bigint,                                         -- last refill, us since 1970; null = never
    rate      bigint NOT NULL DEFAULT 0 CHECK (rate >= 0),    -- published allowance, milli-permits/s
    floor     bigint NOT NULL DEFAULT 0 CHECK (floor >= 0),   -- of whoever called last, milli-permits/s
    epoch     bigint NOT NULL DEFAULT 0,                      -- highest that published
    until     bigint NOT NULL DEFAULT 0,                      -- us; the published allowance lapses
    cut_until bigint NOT NULL DEFAULT 0,                      -- us; the last cut holds
    outcome   bigint NOT NULL DEFAULT 0,                      -- of the last statement, for its RETURNING
    spent       bigint NOT NULL DEFAULT 0,                    -- permits granted and charged, less those refunded
    unmet       bigint NOT NULL DEFAULT 0,                    -- us with an unmet request of the first priority
    unmet_until bigint NOT NULL DEFAULT 0,                    -- us; the last unmet request could be met
    completed   bigint NOT NULL DEFAULT 0,                    -- how the fleet's attempts ended
    failed      bigint NOT NULL DEFAULT 0,
    timed_out   bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);

-- Who decides the allowance, one row per fleet; rewritten every interval.
CREATE TABLE IF NOT EXISTS governor_lease (
    name       text        PRIMARY KEY,
    -- who leads, or led last
    holder     text        NOT NULL,
    -- grows with every change of leader: buckets refuse a lower one
    epoch      bigint      NOT NULL,
    -- others may lead after this
    until      timestamptz NOT NULL,
    -- bucket that has the allowance: redis or postgres
    home       text        NOT NULL,
    -- what was published there counts no longer than this
    home_until timestamptz NOT NULL,
    -- of the leader's settings: whoever has others says so
    settings_hash text     NOT NULL DEFAULT ''
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);

-- What operators ordered and is in force, by fleet and kind (pause, override).
CREATE TABLE IF NOT EXISTS governor_orders (
    name          text             NOT NULL,
    kind          text             NOT NULL CHECK (kind IN ('pause', 'override')),
    -- of an override, permits/s; lowers the ceiling, never raises it
    ceiling_per_s double precision CHECK ((ceiling_per_s IS NULL) = (kind = 'pause') AND ceiling_per_s > 0),
    reason        text             NOT NULL,
    ordered_by    text             NOT NULL,
    ordered_at    timestamptz      NOT NULL DEFAULT clock_timestamp(),
    -- it ends by itself; null: when somebody ends it
    ends_at       timestamptz,
    PRIMARY KEY (name, kind)
);

-- Decisions of the controller, a row each interval, oldest ones deleted.
CREATE TABLE IF NOT EXISTS governor_journal (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name          text        NOT NULL,
    decided_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    holder        text        NOT NULL,
    epoch         bigint      NOT NULL,
    -- enforce or observe
    mode          text        NOT NULL,
    -- of the law's settings: other settings have another history
    settings_hash text        NOT NULL,
    -- what the law was told, what it remembered before, what it decided: as text, to keep every digit
    reading       json        NOT NULL,
    snapshot      json        NOT NULL,
    decision      json        NOT NULL,
    -- a candidate's decision on the same reading, never enforced; null without one
    shadow        json,
    -- orders of operators in force
    orders        json        NOT NULL,
    -- probe -> value as measured, where it tells, and what is the matter with probes
    notes         json        NOT NULL
);

-- Callers of the HTTP API. The key itself is shown once and never stored.
CREATE TABLE IF NOT EXISTS api_keys (
    id            text PRIMARY KEY,                 -- the public part of the key
    hash          bytea NOT NULL,                   -- SHA-256 of the whole key (256 random bits need no salt)
    tenant_id     text,                             -- null: platform key
    scopes        text[] NOT NULL,                  -- holds, read, operate, platform
    name          text,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_used_at  timestamptz,
    revoked_at    timestamptz
);

-- First answers to requests that carried an Idempotency-Key; written in the verb's own transaction.
CREATE TABLE IF NOT EXISTS idempotency_keys (
    tenant_id   text NOT NULL,
    route       text NOT NULL,
    key         text NOT NULL,
    body_hash   bytea NOT NULL,
    response    jsonb NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT statement_timestamp(),
    PRIMARY KEY (tenant_id, route, key)
);
-- PRUNE_IDEMPOTENCY_KEYS (prune.py)
CREATE INDEX IF NOT EXISTS idempotency_keys_by_age ON idempotency_keys (created_at);

-- ------------------------------------------------------------------------------------ functions

-- Planner settings below belong to the function, not to the connection: these joins are a handful of rows
-- against a large table, and without fresh statistics the planner would rather hash the large one.
-- For the same reason some conditions are written so that no index but the named one can serve them
-- (state || '' = 'held' proves no partial index): a plan cached while the table was small must be the right
-- one when it is large.

-- The epoch of this run of the server: the time of its start in us since 1970, but after all earlier epochs (a
-- standby that is promoted may have been started before its primary). Whoever asks before it is noted gets the same.
CREATE OR REPLACE FUNCTION expiry_current_epoch() RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT coalesce(
        (SELECT e.epoch FROM outbox_epochs e WHERE e.server_started_at = pg_postmaster_start_time()),
        (SELECT CASE WHEN pg_is_in_recovery() THEN max(e.epoch)  -- what is read on a standby was written elsewhere
                     ELSE greatest(max(e.epoch) + 1,
                                   (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint) END
           FROM outbox_epochs e), 0)
$$;

-- The epoch for an event that is written now. The first transactions of a run note it; none waits for another.
CREATE OR REPLACE FUNCTION expiry_epoch() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_epoch bigint;
BEGIN
    SELECT e.epoch INTO v_epoch FROM outbox_epochs e WHERE e.server_started_at = pg_postmaster_start_time();
    IF NOT FOUND THEN
        v_epoch := expiry_current_epoch();
        IF pg_try_advisory_xact_lock(1163415130) THEN
            INSERT INTO outbox_epochs (server_started_at, epoch) VALUES (pg_postmaster_start_time(), v_epoch)
                ON CONFLICT DO NOTHING;
        END IF;
    END IF;
    RETURN v_epoch;
END $$;

-- Where the event feed ends now: every event below (epoch, xid) is there to be read, and none can come any more.
-- That is below the oldest transaction that still runs and may write here; those of other databases may not.
-- Their xids are left out only while they are seen to be such: who ended meanwhile counts until the next look.
-- `newest` and `next`: the current epoch and the next xid, beyond which nothing was ever written.
CREATE OR REPLACE FUNCTION expiry_feed_end(OUT epoch bigint, OUT xid xid8, OUT newest bigint, OUT next xid8)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    newest := expiry_current_epoch();
    next := pg_snapshot_xmax(pg_current_snapshot());
    IF pg_is_in_recovery() THEN  -- a standby does not list what runs on its primary
        xid := pg_snapshot_xmin(pg_current_snapshot());
    ELSE
        SELECT coalesce(min(r.xid), next) INTO xid
          FROM pg_snapshot_xip(pg_current_snapshot()) AS r (xid)
         WHERE NOT EXISTS (SELECT FROM pg_stat_get_activity(NULL) a
                            WHERE a.backend_xid = r.xid::xid
                              AND a.datid <> (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()))
           AND NOT EXISTS (SELECT FROM pg_prepared_xacts p
                            WHERE p.transaction = r.xid::xid AND p.database <> current_database());
    END IF;
    -- A transaction that was prepared before the server was started belongs to an earlier epoch, and is not over.
    SELECT CASE WHEN min(p.prepared) IS NULL THEN newest
                ELSE (SELECT coalesce(max(e.epoch), 0) FROM outbox_epochs e WHERE e.server_started_at <= min(p.prepared))
           END INTO epoch
      FROM pg_prepared_xacts p
     WHERE p.database = current_database() AND p.prepared < pg_postmaster_start_time();
END $$;

-- Where a reader stands who has read all of a tenant's events below (p_end_epoch, p_end_xid) and everything up to a
-- cursor: at the last event, at the last pruned one, or at the start of the epoch. Never further than what was
-- committed: a server that recovers from a crash gives transaction numbers that left no trace out again.
CREATE OR REPLACE FUNCTION expiry_feed_place(
    p_tenant text, p_end_epoch bigint, p_end_xid xid8, p_epoch bigint, p_xid xid8, p_id bigint,
    OUT epoch bigint, OUT xid xid8, OUT id bigint
) LANGUAGE sql STABLE SET enable_seqscan = off AS $$
    SELECT r.epoch, r.xid, r.id
      FROM (VALUES (p_epoch, p_xid, p_id), (p_end_epoch, '0'::xid8, 0::bigint)
            UNION ALL
            (SELECT o.epoch, o.xid, o.id FROM outbox o
              WHERE o.tenant_id = p_tenant AND (o.epoch, o.xid, o.id) < (p_end_epoch, p_end_xid, 0::bigint)
              ORDER BY o.epoch DESC, o.xid DESC, o.id DESC LIMIT 1)
            UNION ALL
            SELECT p.epoch, p.xid, p.id FROM outbox_pruned p
             WHERE p.tenant_id = p_tenant AND (p.epoch, p.xid, p.id) < (p_end_epoch, p_end_xid, 0::bigint)
           ) AS r (epoch, xid, id)
     ORDER BY r.epoch DESC, r.xid DESC, r.id DESC LIMIT 1
$$;

-- Events of a tenant after a cursor, in the order in which they are to be read, and where to go on.
--
-- The last row is no event (its key is null): its type says `more` (there may be more at once), `end` or `expired`
-- (events after the cursor were pruned, or it comes from a future that a restore undid); its place is the next
-- cursor. Epoch 0 begins with the oldest event that is kept. At most p_scan rows are looked at.
CREATE OR REPLACE FUNCTION expiry_feed(
    p_tenant text, p_epoch bigint, p_xid xid8, p_id bigint, p_type text, p_hold uuid, p_limit int, p_scan int
) RETURNS TABLE (epoch bigint, xid xid8, id bigint, key text, type text, hold_id uuid, generation bigint,
                 occurred_at timestamptz, data jsonb)
LANGUAGE plpgsql STABLE SET enable_seqscan = off AS $$
DECLARE
    v_end record;
    v_events refcursor;
    v_event outbox;
    v_last outbox;
    v_seen int := 0;
    v_found int := 0;
BEGIN
    SELECT * INTO v_end FROM expiry_feed_end();
    occurred_at := clock_timestamp();
    IF p_epoch > v_end.newest OR p_epoch = v_end.newest AND p_xid > v_end.next
       OR p_epoch > 0 AND EXISTS (SELECT FROM outbox_pruned p
                                   WHERE p.tenant_id = p_tenant AND (p.epoch, p.xid, p.id) > (p_epoch, p_xid, p_id)) THEN
        type := 'expired'; RETURN NEXT; RETURN;
    END IF;
    IF p_hold IS NULL THEN
        OPEN v_events FOR
            SELECT * FROM outbox o
             WHERE o.tenant_id = p_tenant AND (o.epoch, o.xid, o.id) > (p_epoch, p_xid, p_id)
               AND (o.epoch, o.xid, o.id) < (v_end.epoch, v_end.xid, 0::bigint)
             ORDER BY o.epoch, o.xid, o.id LIMIT p_scan;
    ELSE
        OPEN v_events FOR
            SELECT * FROM outbox o
             WHERE o.hold_id = p_hold AND o.tenant_id || '' = p_tenant
               AND (o.epoch, o.xid, o.id) > (p_epoch, p_xid, p_id)
               AND (o.epoch, o.xid, o.id) < (v_end.epoch, v_end.xid, 0::bigint)
             ORDER BY o.epoch, o.xid, o.id LIMIT p_scan;
    END IF;
    WHILE v_found < p_limit LOOP
        FETCH v_events INTO v_event;
        EXIT WHEN NOT FOUND;
        v_seen := v_seen + 1;
        v_last := v_event;
        IF p_type IS NULL OR v_event.type = p_type THEN
            v_found := v_found + 1;
            epoch := v_event.epoch; xid := v_event.xid; id := v_event.id; key := v_event.key; type := v_event.type;
            hold_id := v_event.hold_id; generation := v_event.generation; occurred_at := v_event.occurred_at;
            data := v_event.data;
            RETURN NEXT;
        END IF;
    END LOOP;
    CLOSE v_events;
    key := NULL; hold_id := NULL; generation := NULL; data := NULL; occurred_at := clock_timestamp();
    IF v_found = p_limit OR v_seen = p_scan THEN
        type := 'more'; epoch := v_last.epoch; xid := v_last.xid; id := v_last.id;
    ELSE
        type := 'end';
        SELECT * INTO epoch, xid, id
          FROM expiry_feed_place(p_tenant, v_end.epoch, v_end.xid, p_epoch, p_xid, p_id);
    END IF;
    RETURN NEXT;
END $$;

-- What happened lately, in no order, at most p_limit events: for operators, who look at all tenants.
CREATE OR REPLACE FUNCTION expiry_recent(p_since timestamptz, p_limit int) RETURNS SETOF outbox
LANGUAGE plpgsql STABLE SET enable_seqscan = off SET enable_indexscan = off SET enable_indexonlyscan = off AS $$
BEGIN
    RETURN QUERY SELECT * FROM outbox o WHERE o.occurred_at >= p_since LIMIT p_limit;
END $$;

-- Since when at most p_limit events happened, roughly, but not before p_since: how far back one can look cheaply.
CREATE OR REPLACE FUNCTION expiry_reach(p_since timestamptz, p_limit int) RETURNS timestamptz
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_since timestamptz := p_since;
    v_seconds int;
BEGIN
    FOREACH v_seconds IN ARRAY '{2592000,86400,14400,3600,900,300,60,15,5,1}'::int[] LOOP
        EXIT WHEN (SELECT count(*) FROM expiry_recent(v_since, p_limit + 1)) <= p_limit;
        v_since := greatest(p_since, clock_timestamp() - v_seconds * interval '1 s');
    END LOOP;
    RETURN v_since;
END $$;

-- End holds that the caller has locked and checked: counters, state and event. The only place where a hold leaves a
-- state and where units come back. Answers when they ended: p_at, or without one the clock after the last counter.
--
-- Counters of these holds are locked already, or are locked here, in order of the resources, as everybody does.
-- p_counted: whether any item of theirs is counted.
CREATE OR REPLACE FUNCTION expiry_end(
    p_ids uuid[], p_state text, p_verb text, p_by text, p_reason text, p_at timestamptz, p_counted boolean
) RETURNS timestamptz LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_at timestamptz;
BEGIN
    IF p_counted THEN
        UPDATE resources r
           SET held = r.held - CASE WHEN p_state = 'returned' THEN 0 ELSE u.quantity END,
               confirmed = r.confirmed + CASE p_state WHEN 'confirmed' THEN u.quantity
                                                      WHEN 'returned' THEN -u.quantity ELSE 0 END,
               -- what was held over a lowered capacity has gone: from now on the limit holds again
               lowered_at = CASE WHEN r.held + r.confirmed - u.quantity * (p_state <> 'confirmed')::int > r.capacity
                                 THEN r.lowered_at END
          FROM (SELECT h.tenant_id, i.resource_id, sum(i.quantity) AS quantity
                  FROM holds h, unnest(h.resource_ids, h.quantities, h.counted) AS i (resource_id, quantity, counted)
                 WHERE h.id = ANY (p_ids) AND i.counted
                 GROUP BY h.tenant_id, i.resource_id ORDER BY h.tenant_id, i.resource_id) u
         WHERE r.tenant_id = u.tenant_id AND r.resource_id = u.resource_id;
    END IF;
    v_at := coalesce(p_at, greatest(clock_timestamp(), statement_timestamp()));  -- a clock may have been set back
    WITH ended AS (
        UPDATE holds h
           SET state = p_state,
               ended_at = CASE WHEN p_state = 'returned' THEN h.ended_at ELSE v_at END,
               returned_at = CASE WHEN p_state = 'returned' THEN v_at END,
               ended_by = CASE WHEN p_state = 'returned' THEN h.ended_by ELSE p_by END,
               next_attempt_at = NULL
         WHERE h.id = ANY (p_ids)
        RETURNING h.id, h.tenant_id, h.generation, h.resource_ids, h.quantities,
                  h.holder, h.external_ref, h.expires_at, h.attempts
    ), recovered AS (
        UPDATE dead_letters d
           SET state = 'recovered', resolved_at = v_at, resolved_by = p_by
          FROM ended e
         WHERE e.attempts > 0 AND d.hold_id = e.id AND d.kind = 'expire' AND d.state IN ('retrying', 'open')
    )
    INSERT INTO outbox (epoch, key, tenant_id, type, hold_id, generation, occurred_at, data)
    SELECT (SELECT expiry_epoch()), p_verb || ':' || e.id || ':' || e.generation, e.tenant_id,
           'hold.' || p_state, e.id, e.generation, v_at,
           jsonb_build_object('resource_ids', e.resource_ids, 'quantities', e.quantities,
                              'holder', e.holder, 'external_ref', e.external_ref,
                              'expires_at', e.expires_at, 'by', p_by, 'reason', p_reason)
      FROM ended e;
    RETURN v_at;
END $$;

-- Lock the counted resources of these holds, in the order every transaction of ours uses.
-- With p_skip, take only what is free and answer the holds of which every resource was taken.
CREATE OR REPLACE FUNCTION expiry_lock_resources(p_ids uuid[], p_skip boolean)
RETURNS uuid[] LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_tenants text[];
    v_resources text[];
    v_locked uuid[];
BEGIN
    SELECT array_agg(w.tenant_id), array_agg(w.resource_id) INTO v_tenants, v_resources
      FROM (SELECT DISTINCT h.tenant_id, i.resource_id
              FROM holds h, unnest(h.resource_ids, h.counted) AS i (resource_id, counted)
             WHERE h.id = ANY (p_ids) AND i.counted
             ORDER BY 1, 2) w;
    IF v_resources IS NULL THEN
        RETURN p_ids;
    ELSIF NOT p_skip THEN
        PERFORM FROM unnest(v_tenants, v_resources) AS w (tenant_id, resource_id)
           CROSS JOIN LATERAL (SELECT FROM resources r
                                WHERE r.tenant_id = w.tenant_id AND r.resource_id = w.resource_id
                                  FOR NO KEY UPDATE) r;
        RETURN p_ids;
    END IF;
    WITH taken AS MATERIALIZED (
        SELECT w.tenant_id, w.resource_id
          FROM unnest(v_tenants, v_resources) AS w (tenant_id, resource_id)
         CROSS JOIN LATERAL (SELECT FROM resources r
                              WHERE r.tenant_id = w.tenant_id AND r.resource_id = w.resource_id
                                FOR NO KEY UPDATE SKIP LOCKED) r
    )
    SELECT array_agg(h.id) INTO v_locked
      FROM holds h
     WHERE h.id = ANY (p_ids)
       AND NOT EXISTS (SELECT FROM unnest(h.resource_ids, h.counted) AS i (resource_id, counted)
                        WHERE i.counted
                          AND (h.tenant_id, i.resource_id) NOT IN (SELECT t.tenant_id, t.resource_id FROM taken t));
    RETURN coalesce(v_locked, '{}');
END $$;

-- The one transition that ends holds by time: held -> expired, for distinct (id, generation) pairs.
--
-- One outcome per pair, in order: expired (ms: lag), early (ms: what is left of it), stale (an older
-- generation), ended, contended (somebody has it locked; come again), missing; at_ms is this database's
-- clock. Rows of holds are never waited for; a resource at most 50 ms, then only what is free is taken, so
-- that a slow checkout transaction delays only the holds that need what it holds.
CREATE OR REPLACE FUNCTION expiry_expire(
    p_ids uuid[], p_generations bigint[], p_by text,
    OUT outcomes text[], OUT ms double precision[], OUT at_ms double precision
) LANGUAGE plpgsql SET lock_timeout = '50ms' SET plan_cache_mode = force_generic_plan
SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_now constant timestamptz := statement_timestamp();
    v_at timestamptz;
    v_locked uuid[];
    v_deadlines timestamptz[];
    v_counted boolean;
BEGIN
    SELECT array_agg(h.id), array_agg(h.expires_at), bool_or(true = ANY (h.counted))
      INTO v_locked, v_deadlines, v_counted
      FROM unnest(p_ids, p_generations) AS w (id, generation)
     CROSS JOIN LATERAL (SELECT h.id, h.expires_at, h.counted FROM holds h
                          WHERE h.id = w.id AND h.state || '' = 'held' AND h.generation = w.generation
                            AND h.expires_at <= v_now
                            FOR NO KEY UPDATE SKIP LOCKED) h;
    IF v_locked IS NOT NULL THEN
        BEGIN
            v_at := expiry_end(v_locked, 'expired', 'expire', p_by, NULL, NULL, v_counted);
        EXCEPTION WHEN lock_not_available THEN
            v_locked := expiry_lock_resources(v_locked, p_skip => true);
            v_at := expiry_end(v_locked, 'expired', 'expire', p_by, NULL, NULL, v_counted);
        END;
    END IF;
    v_at := coalesce(v_at, clock_timestamp());
    at_ms := date_part('epoch', v_at) * 1000;
    IF cardinality(v_locked) = cardinality(p_ids) THEN  -- mostly: nothing more has to be looked up
        outcomes := array_fill('expired'::text, ARRAY[cardinality(p_ids)]);
        ms := ARRAY(SELECT date_part('epoch', v_at - d.expires_at) * 1000 FROM unnest(v_deadlines) AS d (expires_at));
        RETURN;
    END IF;
    SELECT array_agg(o.outcome ORDER BY o.ord), array_agg(o.ms ORDER BY o.ord) INTO outcomes, ms
      FROM (SELECT w.ord,
                   CASE WHEN h.id IS NULL THEN 'missing'
                        WHEN h.state = 'expired' AND h.ended_at = v_at AND h.generation = w.generation THEN 'expired'
                        WHEN h.state <> 'held' THEN 'ended'
                        WHEN h.generation > w.generation THEN 'stale'
                        WHEN h.expires_at > v_now THEN 'early'
                        ELSE 'contended' END AS outcome,
                   date_part('epoch', CASE WHEN h.state = 'held' THEN h.expires_at - v_now
                                           ELSE v_at - h.expires_at END) * 1000 AS ms
              FROM unnest(p_ids, p_generations) WITH ORDINALITY AS w (id, generation, ord)
              LEFT JOIN LATERAL (SELECT h.id, h.state, h.generation, h.expires_at, h.ended_at
                                   FROM holds h WHERE h.id = w.id) h ON true) o;
END $$;

-- What a placing request asks for, one row per item.
CREATE OR REPLACE FUNCTION expiry_demand(p_requests jsonb)
RETURNS TABLE (resource_id text, quantity int) LANGUAGE sql IMMUTABLE AS $$
    SELECT i.resource_id, i.quantity
      FROM jsonb_to_recordset(p_requests) AS r (resource_ids text[], quantities int[]),
           unnest(r.resource_ids, r.quantities) AS i (resource_id, quantity)
$$;

-- The undeclared ones of these resources. Declaring takes the lock exclusively, so whoever holds it shared
-- knows that none of them becomes declared before its own commit. Locks are shared out over 64 slots, so that
-- a batch of thousands of resources cannot exhaust the lock table.
CREATE OR REPLACE FUNCTION expiry_undeclared(p_tenant text, p_resources text[])
RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    v_missing text[];
BEGIN
    SELECT array_agg(m.id) INTO v_missing
      FROM (SELECT unnest(p_resources) AS id
            EXCEPT SELECT r.resource_id FROM resources r
                    WHERE r.tenant_id = p_tenant AND r.resource_id = ANY (p_resources)) m;
    IF v_missing IS NULL THEN
        RETURN '{}';
    END IF;
    PERFORM pg_advisory_xact_lock_shared(1163415129, s.slot)
       FROM (SELECT DISTINCT hashtext(p_tenant || '/' || w.id) & 63 AS slot
               FROM unnest(v_missing) AS w (id) ORDER BY 1) s;
    -- A new statement sees what was declared while the lock was awaited.
    SELECT array_agg(m.id) INTO v_missing
      FROM (SELECT unnest(v_missing) AS id
            EXCEPT SELECT r.resource_id FROM resources r
                    WHERE r.tenant_id = p_tenant AND r.resource_id = ANY (v_missing)) m;
    IF v_missing IS NOT NULL AND current_setting('transaction_isolation') <> 'read committed' THEN
        -- That new statement has the snapshot of its transaction: what was declared since is invisible, but
        -- collides, which is a serialization failure (40001).
        BEGIN
            INSERT INTO resources (tenant_id, resource_id) SELECT p_tenant, w.id FROM unnest(v_missing) AS w (id)
                ON CONFLICT DO NOTHING;
            RAISE EXCEPTION USING ERRCODE = 'EX003';
        EXCEPTION WHEN SQLSTATE 'EX003' THEN NULL;
        END;
    END IF;
    RETURN coalesce(v_missing, '{}');
END $$;

-- Units of one resource that are past their deadline and still held, oldest first. Both branches are index
-- probes. Rows in back-off or with an open dead letter are left out: they cannot be ended now, so their units
-- cannot be sold now.
CREATE OR REPLACE FUNCTION expiry_overdue(p_tenant text, p_resource text, p_now timestamptz, p_limit int)
RETURNS TABLE (id uuid, quantity int, expires_at timestamptz) LANGUAGE sql STABLE AS $$
    (SELECT h.id, h.quantities[1], h.expires_at FROM holds h
      WHERE h.state = 'held' AND h.tenant_id = p_tenant AND h.resource_ids[1] = p_resource
        AND h.expires_at <= p_now AND h.next_attempt_at + interval '0 s' IS NULL
        AND NOT EXISTS (SELECT FROM dead_letters d
                         WHERE d.hold_id = h.id AND d.kind = 'expire' AND d.state = 'open')
      ORDER BY h.expires_at LIMIT p_limit)
    UNION ALL
    (SELECT h.id, h.quantities[array_position(h.resource_ids, p_resource)], h.expires_at FROM holds h
      WHERE CASE WHEN h.state = 'held' THEN cardinality(h.resource_ids) END > 1
        AND h.resource_ids @> ARRAY[p_resource] AND h.resource_ids[1] <> p_resource
        AND h.tenant_id || '' = p_tenant AND h.expires_at + interval '0 s' <= p_now
        AND h.next_attempt_at + interval '0 s' IS NULL
        AND NOT EXISTS (SELECT FROM dead_letters d
                         WHERE d.hold_id = h.id AND d.kind = 'expire' AND d.state = 'open')
      ORDER BY h.expires_at LIMIT p_limit)
    ORDER BY 3, 1 LIMIT p_limit
$$;

-- Whether units of this resource are past their deadline and their expiry, which failed, is being tried again.
CREATE OR REPLACE FUNCTION expiry_retrying(p_tenant text, p_resource text, p_now timestamptz)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM holds h
         WHERE h.state = 'held' AND h.tenant_id = p_tenant AND h.resource_ids[1] = p_resource
           AND h.expires_at <= p_now AND h.next_attempt_at + interval '0 s' < 'infinity'
    ) OR EXISTS (
        SELECT FROM holds h
         WHERE CASE WHEN h.state = 'held' THEN cardinality(h.resource_ids) END > 1
           AND h.resource_ids @> ARRAY[p_resource] AND h.resource_ids[1] <> p_resource
           AND h.tenant_id || '' = p_tenant AND h.expires_at + interval '0 s' <= p_now
           AND h.next_attempt_at + interval '0 s' < 'infinity')
$$;

-- One attempt to place, inside the savepoint of expiry_place: end what is to be ended, take the units,
-- write the holds. Raises EX001 (detail: the resource) when a resource is full.
CREATE OR REPLACE FUNCTION expiry_place_attempt(
    p_tenant text, p_requests jsonb, p_reclaim uuid[], p_replace uuid[], p_by text
) RETURNS int LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_now constant timestamptz := statement_timestamp();
    v_undeclared text[];
    v_expired uuid[] := '{}';
    v_replaced uuid[] := '{}';
    v_want record;
BEGIN
    -- Before any row is locked, as declaring does it: it has the lock, then waits for the holds that it counts.
    SELECT expiry_undeclared(p_tenant, array_agg(DISTINCT d.resource_id ORDER BY d.resource_id))
      INTO v_undeclared FROM expiry_demand(p_requests) d;
    IF cardinality(p_reclaim) + cardinality(p_replace) > 0 THEN
        -- Holds by id, then resources by id; waiting for rows that a worker has locked.
        SELECT array_agg(l.id) FILTER (WHERE l.expires_at <= v_now),
               array_agg(l.id) FILTER (WHERE l.id = ANY (p_replace) AND l.expires_at > clock_timestamp())
          INTO v_expired, v_replaced
          FROM (SELECT h.id, h.expires_at FROM holds h
                 WHERE h.id = ANY (p_reclaim || p_replace) AND h.tenant_id = p_tenant AND h.state || '' = 'held'
                   AND (h.expires_at <= v_now OR h.id = ANY (p_replace))
                 ORDER BY h.id FOR NO KEY UPDATE) l;
        PERFORM FROM (
            SELECT d.resource_id FROM expiry_demand(p_requests) d
            UNION
            SELECT i.resource_id FROM holds h, unnest(h.resource_ids, h.counted) AS i (resource_id, counted)
             WHERE h.id = ANY (coalesce(v_expired, '{}') || coalesce(v_replaced, '{}')) AND i.counted
            ORDER BY 1
        ) w CROSS JOIN LATERAL (
            SELECT FROM resources r WHERE r.tenant_id = p_tenant AND r.resource_id = w.resource_id
               FOR NO KEY UPDATE) r;
        IF v_expired IS NOT NULL THEN
            PERFORM expiry_end(v_expired, 'expired', 'expire', 'reclaim', NULL, NULL, true);
        END IF;
        IF v_replaced IS NOT NULL THEN
            PERFORM expiry_end(v_replaced, 'released', 'release', p_by, 'replaced', NULL, true);
        END IF;
        IF cardinality(p_replace) > coalesce(cardinality(v_replaced), 0) THEN
            RAISE EXCEPTION USING ERRCODE = 'EX002', MESSAGE = 'a replaced hold is not held any more';
        END IF;
    END IF;

    FOR v_want IN
        SELECT d.resource_id, sum(d.quantity) AS quantity FROM expiry_demand(p_requests) d
         WHERE d.resource_id <> ALL (v_undeclared) GROUP BY d.resource_id ORDER BY d.resource_id
    LOOP
        UPDATE resources r SET held = r.held + v_want.quantity
         WHERE r.tenant_id = p_tenant AND r.resource_id = v_want.resource_id
           AND (r.capacity IS NULL OR r.held + r.confirmed + v_want.quantity <= r.capacity);
        IF NOT FOUND THEN
            RAISE EXCEPTION USING ERRCODE = 'EX001', MESSAGE = 'full', DETAIL = v_want.resource_id;
        END IF;
    END LOOP;

    WITH placed AS (
        INSERT INTO holds (id, tenant_id, resource_ids, quantities, counted, placed_at, expires_at, holder,
                           external_ref, metadata, max_renewals, lifetime_ends_at)
        SELECT q.id, p_tenant, q.resource_ids, q.quantities,
               ARRAY(SELECT i.id <> ALL (v_undeclared)
                       FROM unnest(q.resource_ids) WITH ORDINALITY AS i (id, n) ORDER BY i.n),
               v_now, coalesce(q.expires_at, v_now + q.ttl_us * interval '1 microsecond'), q.holder,
               q.external_ref, q.metadata, q.max_renewals,
               v_now + q.max_lifetime_us * interval '1 microsecond'
          FROM jsonb_to_recordset(p_requests) AS q (
                   id uuid, ttl_us bigint, expires_at timestamptz, resource_ids text[], quantities int[],
                   holder text, external_ref text, metadata jsonb, max_renewals int, max_lifetime_us bigint)
        RETURNING id, resource_ids, quantities, holder, external_ref, expires_at
    )
    INSERT INTO outbox (epoch, key, tenant_id, type, hold_id, generation, occurred_at, data)
    SELECT (SELECT expiry_epoch()), 'place:' || p.id || ':1', p_tenant, 'hold.placed', p.id, 1, v_now,
           jsonb_build_object('resource_ids', p.resource_ids, 'quantities', p.quantities, 'holder', p.holder,
                              'external_ref', p.external_ref, 'expires_at', p.expires_at, 'by', p_by)
      FROM placed p;
    RETURN coalesce(cardinality(v_expired), 0);
END $$;

-- The resource that has too few units for this demand by the counters of this instant, how many it has,
-- and the overdue holds (at most p_limit, oldest first) that would free enough. One snapshot: an overdue
-- hold that a worker is just ending is either in the counters' past or in the list.
CREATE OR REPLACE FUNCTION expiry_shortage(p_tenant text, p_requests jsonb, p_replace uuid[], p_limit int)
RETURNS TABLE (resource_id text, available bigint, enough boolean, overdue uuid[])
LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_want record;
    v_units bigint;
BEGIN
    FOR v_want IN
        SELECT w.resource_id, w.quantity, r.capacity::bigint - r.held - r.confirmed AS available
          FROM (SELECT d.resource_id, sum(d.quantity) AS quantity FROM expiry_demand(p_requests) d
                 GROUP BY d.resource_id) w
         CROSS JOIN LATERAL (SELECT x.capacity, x.held, x.confirmed FROM resources x
                              WHERE x.tenant_id = p_tenant AND x.resource_id = w.resource_id
                              LIMIT 1) r  -- so that it is looked up, whatever the planner thinks of the tenant
         ORDER BY w.resource_id
    LOOP
        resource_id := v_want.resource_id;
        available := v_want.available;
        IF cardinality(p_replace) > 0 THEN
            SELECT available + coalesce(sum(i.quantity), 0) INTO available
              FROM holds h, unnest(h.resource_ids, h.quantities, h.counted) AS i (resource_id, quantity, counted)
             WHERE h.id = ANY (p_replace) AND h.tenant_id = p_tenant AND h.state || '' = 'held'
               AND h.expires_at > statement_timestamp() AND i.resource_id = v_want.resource_id AND i.counted;
        END IF;
        CONTINUE WHEN available IS NULL OR available >= v_want.quantity;  -- no limit, or enough
        SELECT coalesce(sum(s.quantity), 0),
               coalesce(array_agg(s.id) FILTER (WHERE s.before < v_want.quantity - available), '{}')
          INTO v_units, overdue
          FROM (SELECT v.id, v.quantity,
                       coalesce(sum(v.quantity) OVER (ORDER BY v.expires_at, v.id
                                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
                  FROM expiry_overdue(p_tenant, v_want.resource_id, statement_timestamp(), p_limit) v) s;
        available := available + v_units;
        enough := available >= v_want.quantity;
        RETURN NEXT;
    END LOOP;
END $$;

-- Place holds, all or none, in one round trip and behind a savepoint of its own.
--
-- p_requests: [{id, ttl_us | expires_at, resource_ids, quantities, holder, external_ref, metadata,
-- max_renewals, max_lifetime_us, replaces}]. Outcomes: placed | replayed | key_in_progress | key_reused |
-- out_of_range (expires_at) | insufficient_capacity | busy (overdue holds are still being ended) |
-- replaced_missing | replaced_ended. Anything but `placed` leaves nothing behind. `detail` holds now,
-- placed_at and the number of reclaimed holds, or what the refusal names (id: of the request that is refused).
CREATE OR REPLACE FUNCTION expiry_place(
    p_tenant text, p_requests jsonb, p_by text, p_route text, p_key text, p_body_hash bytea
) RETURNS TABLE (outcome text, detail jsonb) LANGUAGE plpgsql SET lock_timeout = '2s'
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    c_reclaim_max constant int := 100;   -- holds expired on behalf of one request
    c_rounds_max constant int := 4;      -- lost races before "busy"
    v_now constant timestamptz := statement_timestamp();
    v_replace uuid[];
    v_reclaim uuid[];
    v_full record;
    v_reclaimed int;
    v_known record;
    v_refused uuid;
BEGIN
    IF p_key IS NOT NULL THEN
        -- A duplicate must not park a connection: answer at once, the client comes again.
        IF NOT pg_try_advisory_xact_lock(hashtextextended(p_tenant || '/' || p_route || '/' || p_key, 0)) THEN
            RETURN QUERY SELECT 'key_in_progress', '{}'::jsonb; RETURN;
        END IF;
        SELECT k.body_hash, k.response INTO v_known FROM idempotency_keys k
         WHERE k.tenant_id = p_tenant AND k.route = p_route AND k.key = p_key;
        IF FOUND THEN
            RETURN QUERY SELECT CASE WHEN v_known.body_hash = p_body_hash THEN 'replayed' ELSE 'key_reused' END,
                                CASE WHEN v_known.body_hash = p_body_hash
                                     THEN v_known.response || jsonb_build_object('now', v_now) ELSE '{}' END;
            RETURN;
        END IF;
    END IF;

    SELECT (array_agg(q.id) FILTER (
               WHERE q.expires_at < v_now + interval '1 second' OR q.expires_at > v_now + interval '31536000 s'
                  OR coalesce(q.expires_at, v_now + q.ttl_us * interval '1 microsecond')
                     > v_now + q.max_lifetime_us * interval '1 microsecond'))[1],
           coalesce(array_agg(DISTINCT q.replaces) FILTER (WHERE q.replaces IS NOT NULL), '{}')
      INTO v_refused, v_replace
      FROM jsonb_to_recordset(p_requests) AS q (
               id uuid, expires_at timestamptz, ttl_us bigint, max_lifetime_us bigint, replaces uuid);
    IF v_refused IS NOT NULL THEN
        RETURN QUERY SELECT 'out_of_range', jsonb_build_object('id', v_refused); RETURN;
    END IF;
    IF cardinality(v_replace) > 0 THEN
        -- Said before any shortage is; whether it is still true under the lock, the attempt sees.
        SELECT q.id, h.id AS known INTO v_known
          FROM jsonb_to_recordset(p_requests) AS q (id uuid, replaces uuid)
          LEFT JOIN LATERAL (SELECT x.id, x.state, x.expires_at FROM holds x
                              WHERE x.id = q.replaces AND x.tenant_id = p_tenant LIMIT 1) h ON true
         WHERE q.replaces IS NOT NULL AND (h.id IS NULL OR h.state <> 'held' OR h.expires_at <= v_now)
         ORDER BY h.id IS NOT NULL LIMIT 1;
        IF FOUND THEN
            RETURN QUERY SELECT CASE WHEN v_known.known IS NULL THEN 'replaced_missing' ELSE 'replaced_ended' END,
                                jsonb_build_object('id', v_known.id);
            RETURN;
        END IF;
    END IF;

    FOR v_round IN 1..c_rounds_max LOOP
        v_reclaim := '{}';
        FOR v_full IN SELECT * FROM expiry_shortage(p_tenant, p_requests, v_replace, c_reclaim_max) LOOP
            IF NOT v_full.enough AND cardinality(v_full.overdue) >= c_reclaim_max THEN
                RETURN QUERY SELECT 'busy', '{}'::jsonb; RETURN;
            ELSIF NOT v_full.enough THEN
                IF current_setting('transaction_isolation') <> 'read committed' THEN
                    -- By an old snapshot: what changed since is a serialization failure, no wrong answer.
                    PERFORM FROM resources r WHERE r.tenant_id = p_tenant AND r.resource_id = v_full.resource_id
                        FOR NO KEY UPDATE;
                END IF;
                IF expiry_retrying(p_tenant, v_full.resource_id, v_now) THEN
                    RETURN QUERY SELECT 'busy', '{}'::jsonb; RETURN;
                END IF;
                RETURN QUERY SELECT 'insufficient_capacity', jsonb_build_object(
                    'resource_id', v_full.resource_id, 'available', greatest(v_full.available, 0),
                    'hold_id', (SELECT h.id FROM jsonb_to_recordset(p_requests) AS q (holder text)
                                CROSS JOIN LATERAL (
                                      SELECT h.id FROM holds h
                                       WHERE h.state = 'held' AND h.holder = q.holder AND h.tenant_id = p_tenant
                                         AND h.expires_at + interval '0 s' > v_now
                                         AND h.resource_ids @> ARRAY[v_full.resource_id]
                                       ORDER BY h.id LIMIT 1) h
                                LIMIT 1));
                RETURN;
            END IF;
            v_reclaim := ARRAY(SELECT DISTINCT u.id FROM unnest(v_reclaim || v_full.overdue) AS u (id));
        END LOOP;
        EXIT WHEN cardinality(v_reclaim) > c_reclaim_max;
        BEGIN
            v_reclaimed := expiry_place_attempt(p_tenant, p_requests, v_reclaim, v_replace, p_by);
            IF clock_timestamp() > v_now + interval '900 ms'
               AND EXISTS (SELECT FROM jsonb_to_recordset(p_requests) AS q (id uuid), holds h
                            WHERE h.id = q.id AND h.expires_at <= clock_timestamp()) THEN
                -- It waited for locks past its own deadline: nobody is served by a hold that is over.
                RAISE lock_not_available;
            END IF;
            IF p_key IS NOT NULL THEN
                INSERT INTO idempotency_keys (tenant_id, route, key, body_hash, response)
                SELECT p_tenant, p_route, p_key, p_body_hash,
                       jsonb_build_object('ids', jsonb_path_query_array(p_requests, '$[*].id'), 'placed_at', v_now)
                ON CONFLICT DO NOTHING;  -- the lock excludes one, but for older snapshots: 40001
            END IF;
            RETURN QUERY SELECT 'placed', jsonb_build_object('placed_at', v_now, 'now', v_now,
                                                             'reclaimed', v_reclaimed);
            RETURN;
        EXCEPTION
            WHEN SQLSTATE 'EX001' THEN NULL;  -- somebody was faster: look again
            WHEN data_exception OR integrity_constraint_violation OR plpgsql_error THEN
                -- An overdue hold that cannot be ended, by its own fault: the sweep sets it apart (then it no
                -- longer counts as free); until then nobody knows.
                IF cardinality(v_reclaim) = 0 THEN
                    RAISE;
                END IF;
                EXIT;
            WHEN SQLSTATE 'EX002' THEN
                RETURN QUERY SELECT 'replaced_ended', jsonb_build_object('id', (
                    SELECT q.id FROM jsonb_to_recordset(p_requests) AS q (id uuid, replaces uuid)
                     CROSS JOIN LATERAL (SELECT x.state, x.expires_at FROM holds x WHERE x.id = q.replaces LIMIT 1) h
                     WHERE h.state <> 'held' OR h.expires_at <= clock_timestamp() LIMIT 1));
                RETURN;
        END;
    END LOOP;
    RETURN QUERY SELECT 'busy', '{}'::jsonb;
END $$;

-- Place many holds of one resource each, of any tenants, in one transaction: those that are simple. Whoever is not
-- (its key was used or is in use, units are short, the deadline is out of range) is left out, untouched, for
-- expiry_place. Whose resource somebody has locked is left out as well (`locked`), or with p_wait is waited for, but
-- not for long: whatever waits here keeps all the others waiting.
--
-- p_requests: as of expiry_place, each with n, tenant, by, route, key and body_hash (hexadecimal). `placed` and
-- `locked` name them by their n.
CREATE OR REPLACE FUNCTION expiry_place_group(
    p_requests jsonb, p_wait boolean, OUT placed int[], OUT locked int[], OUT placed_at timestamptz
) LANGUAGE plpgsql SET lock_timeout = '100ms' SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_now constant timestamptz := statement_timestamp();
    v_locked int[];
BEGIN
    placed := '{}';
    locked := '{}';
    placed_at := v_now;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN;  -- an old snapshot does not see what a lock has waited for
    END IF;
    -- First what is no row: the keys, and the slots of undeclared resources (see expiry_undeclared).
    SELECT array_agg(l.n) INTO v_locked
      FROM (SELECT q.n, q.tenant, q.route, q.key, q.resource_ids[1] AS resource_id, r.declared,
                   row_number() OVER (PARTITION BY q.tenant, q.route, q.key ORDER BY q.n) AS nth
              FROM jsonb_to_recordset(p_requests) AS q (n int, tenant text, route text, key text, resource_ids text[])
              LEFT JOIN LATERAL (SELECT true AS declared FROM resources x
                                  WHERE x.tenant_id = q.tenant AND x.resource_id = q.resource_ids[1] LIMIT 1) r ON true) l
     WHERE l.nth = 1
       AND pg_try_advisory_xact_lock(hashtextextended(l.tenant || '/' || l.route || '/' || l.key, 0))
       AND (l.declared OR pg_try_advisory_xact_lock_shared(1163415129, hashtext(l.tenant || '/' || l.resource_id) & 63));
    IF p_wait THEN  -- in order of the resources, as everybody does
        PERFORM FROM (SELECT DISTINCT q.tenant, q.resource_ids[1] AS resource_id
                        FROM jsonb_to_recordset(p_requests) AS q (n int, tenant text, resource_ids text[])
                       WHERE q.n = ANY (v_locked) ORDER BY 1, 2) w
           CROSS JOIN LATERAL (SELECT FROM resources x
                                WHERE x.tenant_id = w.tenant AND x.resource_id = w.resource_id
                                  FOR NO KEY UPDATE) r;
    END IF;
    -- Then the counters. This statement sees what was committed before those locks were taken.
    SELECT coalesce(array_agg(f.n) FILTER (WHERE CASE WHEN f.held IS NULL THEN f.declared IS NULL
                                                      ELSE f.short IS NOT TRUE END), '{}'),
           coalesce(array_agg(f.n) FILTER (WHERE f.held IS NULL AND f.declared), '{}')
      INTO placed, locked
      FROM (SELECT q.n, r.held, d.declared, k.known,
                   r.held + r.confirmed + sum(q.quantities[1]) OVER (
                       PARTITION BY q.tenant, q.resource_ids[1] ORDER BY q.n) > r.capacity AS short
              FROM jsonb_to_recordset(p_requests) AS q (
                       n int, tenant text, route text, key text, resource_ids text[], quantities int[],
                       ttl_us bigint, expires_at timestamptz, max_lifetime_us bigint)
              LEFT JOIN LATERAL (SELECT true AS known FROM idempotency_keys x
                                  WHERE x.tenant_id = q.tenant AND x.route = q.route AND x.key = q.key LIMIT 1) k ON true
              LEFT JOIN LATERAL (SELECT true AS declared FROM resources x
                                  WHERE x.tenant_id = q.tenant AND x.resource_id = q.resource_ids[1] LIMIT 1) d ON true
              LEFT JOIN LATERAL (SELECT x.capacity, x.held, x.confirmed FROM resources x
                                  WHERE k.known IS NULL AND x.tenant_id = q.tenant AND x.resource_id = q.resource_ids[1]
                                    FOR NO KEY UPDATE SKIP LOCKED) r ON true
             WHERE q.n = ANY (v_locked)
               AND coalesce(q.expires_at, v_now + q.ttl_us * interval '1 microsecond')
                   BETWEEN v_now + interval '1 second'
                       AND v_now + least(q.max_lifetime_us * interval '1 microsecond', interval '31536000 s')) f
     WHERE f.known IS NULL;
    IF cardinality(placed) = 0 THEN
        RETURN;
    END IF;
    WITH wanted AS MATERIALIZED (
        SELECT q.* FROM jsonb_to_recordset(p_requests) AS q (
                   n int, tenant text, by text, route text, key text, body_hash text, id uuid, ttl_us bigint,
                   expires_at timestamptz, resource_ids text[], quantities int[], holder text, external_ref text,
                   metadata jsonb, max_renewals int, max_lifetime_us bigint)
         WHERE q.n = ANY (placed)
    ), counted AS (
        UPDATE resources r SET held = r.held + u.quantity
          FROM (SELECT w.tenant, w.resource_ids[1] AS resource_id, sum(w.quantities[1]) AS quantity
                  FROM wanted w GROUP BY 1, 2) u
         WHERE r.tenant_id = u.tenant AND r.resource_id = u.resource_id
        RETURNING r.tenant_id, r.resource_id
    ), placed_now AS (
        INSERT INTO holds (id, tenant_id, resource_ids, quantities, counted, placed_at, expires_at, holder,
                           external_ref, metadata, max_renewals, lifetime_ends_at)
        SELECT w.id, w.tenant, w.resource_ids, w.quantities,
               ARRAY[(w.tenant, w.resource_ids[1]) IN (SELECT c.tenant_id, c.resource_id FROM counted c)],
               v_now, coalesce(w.expires_at, v_now + w.ttl_us * interval '1 microsecond'), w.holder,
               w.external_ref, w.metadata, w.max_renewals, v_now + w.max_lifetime_us * interval '1 microsecond'
          FROM wanted w
        RETURNING id, tenant_id, resource_ids, quantities, holder, external_ref, expires_at
    ), kept AS (
        INSERT INTO idempotency_keys (tenant_id, route, key, body_hash, response)
        SELECT w.tenant, w.route, w.key, decode(w.body_hash, 'hex'),
               jsonb_build_object('ids', jsonb_build_array(w.id), 'placed_at', v_now)
          FROM wanted w
    )
    INSERT INTO outbox (epoch, key, tenant_id, type, hold_id, generation, occurred_at, data)
    SELECT (SELECT expiry_epoch()), 'place:' || p.id || ':1', p.tenant_id, 'hold.placed', p.id, 1, v_now,
           jsonb_build_object('resource_ids', p.resource_ids, 'quantities', p.quantities, 'holder', p.holder,
                              'external_ref', p.external_ref, 'expires_at', p.expires_at, 'by',
                              (SELECT w.by FROM wanted w WHERE w.id = p.id))
      FROM placed_now p;
END $$;

-- Renew: held -> held with a new deadline and the next generation, which makes every older wake-up stale.
-- Outcomes: renewed | missing | generation | expired | ended | limit | out_of_range, and the hold as it is now.
CREATE OR REPLACE FUNCTION expiry_renew(
    p_tenant text, p_id uuid, p_generation bigint, p_ttl_us bigint, p_expires_at timestamptz, p_by text
) RETURNS TABLE (outcome text, hold holds) LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    v_hold holds;
    v_now timestamptz;
    v_until timestamptz;
    v_outcome text;
BEGIN
    SELECT h.* INTO v_hold FROM holds h WHERE h.id = p_id AND h.tenant_id = p_tenant FOR NO KEY UPDATE;
    v_now := clock_timestamp();
    v_until := coalesce(p_expires_at, v_now + p_ttl_us * interval '1 microsecond');
    v_outcome := CASE
        WHEN v_hold.id IS NULL THEN 'missing'
        WHEN v_hold.state = 'expired' OR v_hold.state = 'held' AND v_hold.expires_at <= v_now THEN 'expired'
        WHEN v_hold.state <> 'held' THEN 'ended'
        WHEN v_hold.generation <> p_generation THEN 'generation'
        WHEN v_hold.generation > v_hold.max_renewals OR v_until > v_hold.lifetime_ends_at THEN 'limit'
        WHEN v_until < v_now + interval '1 second' OR v_until > v_now + interval '31536000 s' THEN 'out_of_range'
        ELSE 'renewed' END;
    IF v_outcome = 'renewed' THEN
        UPDATE holds h SET generation = h.generation + 1, expires_at = v_until, attempts = 0, next_attempt_at = NULL
         WHERE h.id = p_id RETURNING h.* INTO v_hold;
        INSERT INTO outbox (epoch, key, tenant_id, type, hold_id, generation, occurred_at, data)
        VALUES (expiry_epoch(), 'renew:' || p_id || ':' || v_hold.generation, p_tenant, 'hold.renewed', p_id, v_hold.generation,
                v_now, jsonb_build_object('expires_at', v_until, 'by', p_by));
    END IF;
    RETURN QUERY SELECT v_outcome, v_hold;
END $$;

-- Confirm, release (held -> confirmed | released) or return (confirmed -> returned).
-- Outcomes: done | repeated (it had ended so already: no new effect) | missing | generation | expired (past
-- the deadline, whether or not the expiry ran) | ended (in another way) | not_confirmed; and the hold.
CREATE OR REPLACE FUNCTION expiry_finish(
    p_tenant text, p_id uuid, p_verb text, p_generation bigint, p_by text, p_reason text
) RETURNS TABLE (outcome text, hold holds) LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    c_state constant text := CASE p_verb WHEN 'confirm' THEN 'confirmed' WHEN 'release' THEN 'released'
                                         WHEN 'return' THEN 'returned' END;
    c_from constant text := CASE p_verb WHEN 'return' THEN 'confirmed' ELSE 'held' END;
    v_hold holds;
    v_now timestamptz;
    v_outcome text;
BEGIN
    SELECT h.* INTO v_hold FROM holds h WHERE h.id = p_id AND h.tenant_id = p_tenant FOR NO KEY UPDATE;
    IF v_hold.state = c_from THEN
        PERFORM expiry_lock_resources(ARRAY[p_id], p_skip => false);
    END IF;
    v_now := clock_timestamp();  -- after every wait: the deadline may have passed meanwhile
    v_outcome := CASE
        WHEN v_hold.id IS NULL THEN 'missing'
        WHEN p_generation IS NOT NULL AND v_hold.generation <> p_generation THEN 'generation'
        WHEN v_hold.state = c_state THEN 'repeated'
        WHEN v_hold.state = 'expired' OR v_hold.state = 'held' AND v_hold.expires_at <= v_now THEN 'expired'
        WHEN v_hold.state = c_from THEN 'done'
        WHEN v_hold.state = 'held' THEN 'not_confirmed'
        ELSE 'ended' END;
    IF v_outcome = 'done' THEN
        PERFORM expiry_end(ARRAY[p_id], c_state, p_verb, p_by, p_reason, v_now, true);
        SELECT h.* INTO v_hold FROM holds h WHERE h.id = p_id;
    END IF;
    RETURN QUERY SELECT v_outcome, v_hold;
END $$;

-- Declare a resource, or change its capacity. Places in flight on it finish first (they hold the lock
-- shared), and units held since before are counted from now on. Confirmed units of before stay outside: the
-- capacity says what is on sale from now on.
CREATE OR REPLACE FUNCTION expiry_declare(p_tenant text, p_resource text, p_capacity int)
RETURNS void LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    v_units bigint;
BEGIN
    UPDATE resources r
       SET capacity = p_capacity,
           lowered_at = CASE WHEN p_capacity < r.held + r.confirmed THEN clock_timestamp() END
     WHERE r.tenant_id = p_tenant AND r.resource_id = p_resource;
    IF FOUND THEN
        RETURN;
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION USING ERRCODE = 'feature_not_supported',
            MESSAGE = 'declaring a resource counts what others place meanwhile: do it in a READ COMMITTED transaction';
    END IF;
    PERFORM pg_advisory_xact_lock(1163415129, hashtext(p_tenant || '/' || p_resource) & 63);
    WITH mine AS MATERIALIZED (
        SELECT h.id FROM holds h
         WHERE h.state = 'held' AND h.tenant_id = p_tenant AND h.resource_ids[1] = p_resource
        UNION ALL
        SELECT h.id FROM holds h
         WHERE CASE WHEN h.state = 'held' THEN cardinality(h.resource_ids) END > 1 AND h.tenant_id || '' = p_tenant
           AND h.resource_ids @> ARRAY[p_resource] AND h.resource_ids[1] <> p_resource
    ), counted AS (
        UPDATE holds h SET counted[array_position(h.resource_ids, p_resource)] = true
         WHERE h.id = ANY (ARRAY(SELECT m.id FROM mine m ORDER BY m.id)) AND h.state || '' = 'held'
           AND NOT h.counted[array_position(h.resource_ids, p_resource)]
        RETURNING h.quantities[array_position(h.resource_ids, p_resource)] AS quantity
    )
    SELECT coalesce(sum(c.quantity), 0) INTO v_units FROM counted c;
    INSERT INTO resources (tenant_id, resource_id, capacity, held, lowered_at)
    VALUES (p_tenant, p_resource, p_capacity, v_units,
            CASE WHEN p_capacity < v_units THEN clock_timestamp() END)
    ON CONFLICT (tenant_id, resource_id) DO UPDATE
        SET capacity = EXCLUDED.capacity,
            held = resources.held + EXCLUDED.held,
            lowered_at = CASE WHEN p_capacity < resources.held + resources.confirmed + EXCLUDED.held
                              THEN clock_timestamp() END;
END $$;

-- Forget ended holds. Confirmed units stay counted: they move into confirmed_base.
CREATE OR REPLACE FUNCTION expiry_forget(p_ids uuid[]) RETURNS bigint
LANGUAGE plpgsql SET lock_timeout = '50ms' SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_ids uuid[];
    v_gone bigint;
BEGIN
    SELECT array_agg(h.id) INTO v_ids
      FROM (SELECT h.id FROM holds h WHERE h.id = ANY (p_ids) AND h.state <> 'held'
               FOR UPDATE SKIP LOCKED) h;
    PERFORM expiry_lock_resources(
        ARRAY(SELECT h.id FROM holds h WHERE h.id = ANY (v_ids) AND h.state = 'confirmed'), p_skip => false);
    WITH gone AS (
        DELETE FROM holds h WHERE h.id = ANY (v_ids)
        RETURNING h.tenant_id, h.state, h.resource_ids, h.quantities, h.counted
    ), units AS (
        SELECT g.tenant_id, i.resource_id, sum(i.quantity) AS quantity
          FROM gone g, unnest(g.resource_ids, g.quantities, g.counted) AS i (resource_id, quantity, counted)
         WHERE g.state = 'confirmed' AND i.counted
         GROUP BY g.tenant_id, i.resource_id
    ), folded AS (
        UPDATE resources r SET confirmed_base = r.confirmed_base + u.quantity
          FROM units u WHERE r.tenant_id = u.tenant_id AND r.resource_id = u.resource_id
    )
    SELECT count(*) INTO v_gone FROM gone;
    RETURN v_gone;
END $$;

-- Forget a tenant's oldest events, those from before p_before; in the order of the feed, so that a cursor has either
-- missed none of them or is before the place that is noted.
CREATE OR REPLACE FUNCTION expiry_forget_events(p_tenant text, p_before timestamptz, p_limit int) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_gone bigint;
BEGIN
    WITH gone AS (
        DELETE FROM outbox o
         WHERE o.ctid = ANY (ARRAY(  -- events are never updated, so it stays theirs
                SELECT p.ctid FROM (SELECT e.ctid, e.occurred_at FROM outbox e
                                     WHERE e.tenant_id = p_tenant ORDER BY e.epoch, e.xid, e.id LIMIT p_limit) p
                 WHERE p.occurred_at < p_before))
        RETURNING o.epoch, o.xid, o.id
    ), noted AS (
        INSERT INTO outbox_pruned AS p (tenant_id, epoch, xid, id)
        SELECT p_tenant, g.epoch, g.xid, g.id FROM gone g ORDER BY g.epoch DESC, g.xid DESC, g.id DESC LIMIT 1
        ON CONFLICT (tenant_id) DO UPDATE SET epoch = EXCLUDED.epoch, xid = EXCLUDED.xid, id = EXCLUDED.id
          WHERE (EXCLUDED.epoch, EXCLUDED.xid, EXCLUDED.id) > (p.epoch, p.xid, p.id)
    )
    SELECT count(*) INTO v_gone FROM gone;
    RETURN v_gone;
END $$;

INSERT INTO expiry_schema (version) VALUES (3) ON CONFLICT DO NOTHING;
