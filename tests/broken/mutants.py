"""Ways to break a promise by a small change, and the tests that must notice.

Each replaces text of schema.sql, and of Python functions where the fault lies there. The text must be there
exactly once, so that no mutant can outlive what it breaks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from tests.flow import test_cases_b, test_cases_c
from tests.integration import (
    test_capacity,
    test_declare,
    test_expire,
    test_feed,
    test_group,
    test_place,
    test_verbs,
)

Scene: TypeAlias = Callable[..., Awaitable[None]]
Change: TypeAlias = tuple[str, str]  # find this, put that


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A broken variant; `functions` maps "module:function" to changes of its source."""

    name: str
    breaks: str
    schema: tuple[Change, ...] = ()
    functions: dict[str, tuple[Change, ...]] = field(default_factory=dict)
    caught_by: tuple[Scene, ...]


LOCK_DUE = """WHERE h.id = w.id AND h.state || '' = 'held' AND h.generation = w.generation
                            AND h.expires_at <= v_now
                            FOR NO KEY UPDATE SKIP LOCKED"""
NOT_EARLY = "    CONSTRAINT holds_not_early CHECK (state <> 'expired' OR ended_at >= expires_at),\n"
ONCE = "CREATE UNIQUE INDEX IF NOT EXISTS outbox_once"
EVENT = "      FROM ended e;\n    RETURN v_at;"
UNITS_BACK = "SET held = r.held - CASE WHEN p_state = 'returned' THEN 0 ELSE u.quantity END"
FULL = """
           AND (r.capacity IS NULL OR r.held + r.confirmed + v_want.quantity <= r.capacity)"""

LATE_FINISH = """WHEN v_hold.state = 'expired' OR v_hold.state = 'held' AND v_hold.expires_at <= v_now THEN 'expired'
        WHEN v_hold.state = c_from"""
BOUNDED_WAIT = "SET lock_timeout = '50ms' SET plan_cache_mode"
IN_ORDER = "GROUP BY d.resource_id ORDER BY d.resource_id\n    LOOP"
WAIT_FIRST = """    IF v_hold.state = c_from THEN
        PERFORM expiry_lock_resources(ARRAY[p_id], p_skip => false);
    END IF;
    v_now := clock_timestamp();"""

FEED_ORDER = """AND (o.epoch, o.xid, o.id) < (v_end.epoch, v_end.xid, 0::bigint)
             ORDER BY o.epoch, o.xid, o.id LIMIT p_scan;
    ELSE"""

# A second statement, after the first has committed.
EVENT_LATER = """row = await conn.fetchrow(EXPIRE, [w.hold_id for w in wakes], [w.generation for w in wakes], by)
    await conn.execute(
        "INSERT INTO outbox (epoch, key, tenant_id, type, hold_id, generation, occurred_at, data)"
        " SELECT expiry_epoch(), 'expire:' || h.id || ':' || h.generation, h.tenant_id, 'hold.expired', h.id,"
        " h.generation, h.ended_at, '{}' FROM holds h"
        " WHERE h.id = ANY ($1) AND h.state = 'expired' ON CONFLICT DO NOTHING",
        [w.hold_id for w in wakes],
    )"""
EXPIRE_CALL = (
    "row = await conn.fetchrow(EXPIRE, [w.hold_id for w in wakes], [w.generation for w in wakes], by)"
)

P1 = (
    Mutant(
        name="no-clock-check",
        breaks="P1: a wake-up ends the hold whenever it comes",
        schema=(
            (LOCK_DUE, LOCK_DUE.replace("AND h.expires_at <= v_now", "")),
            (NOT_EARLY, ""),
        ),
        caught_by=(
            test_expire.test_p1_no_hold_ends_before_its_deadline,
            test_expire.test_p1_the_row_decides_to_the_microsecond,
            test_expire.test_each_wake_up_has_its_outcome_in_order,
        ),
    ),
    Mutant(
        name="no-clock-check-but-the-constraint",
        breaks="P1: the same, with the table's own constraint in place",
        schema=((LOCK_DUE, LOCK_DUE.replace("AND h.expires_at <= v_now", "")),),
        caught_by=(test_expire.test_p1_no_hold_ends_before_its_deadline,),
    ),
    Mutant(
        name="judged-before-the-wait",
        breaks="P1: a confirmation is judged by the time it was asked for, not by when it got its locks",
        schema=((WAIT_FIRST, "    v_now := clock_timestamp();\n" + WAIT_FIRST.rsplit("\n", 1)[0]),),
        caught_by=(test_verbs.test_p1_a_verb_that_waited_past_the_deadline_is_too_late,),
    ),
)
P2 = (
    Mutant(
        name="ended-holds-expire-again",
        breaks="P2: the transition does not look at the state",
        schema=((LOCK_DUE, LOCK_DUE.replace("AND h.state || '' = 'held'", "")), (ONCE, "CREATE INDEX once")),
        caught_by=(
            test_expire.test_p2_delivered_twice_it_ends_once,
            test_expire.test_p2_many_workers_end_it_once,
            test_cases_c.test_c2_released_and_expired_in_the_same_instant,
        ),
    ),
    Mutant(
        name="confirm-after-the-deadline",
        breaks="P2: a confirmation does not look at the clock",
        schema=(
            (LATE_FINISH, "WHEN v_hold.state = 'expired' THEN 'expired'\n        WHEN v_hold.state = c_from"),
        ),
        caught_by=(test_verbs.test_a_refusal_says_how_the_hold_is,),
    ),
)
P3 = (
    Mutant(
        name="no-event",
        breaks="P3: the event of an expiry is lost",
        schema=((EVENT, EVENT.replace("ended e", "ended e WHERE p_state <> 'expired'")),),
        caught_by=(
            test_expire.test_p3_no_end_without_its_event,
            test_expire.test_p2_many_workers_end_it_once,
            test_cases_b.test_b5_past_the_deadline_nobody_needs_to_run,
        ),
    ),
    Mutant(
        name="event-after-the-commit",
        breaks="P3: the event is written by a transaction of its own, after that of the end",
        schema=((EVENT, EVENT.replace("ended e", "ended e WHERE p_state <> 'expired'")),),
        functions={"expiry.expire:expire": ((EXPIRE_CALL, EVENT_LATER),)},
        caught_by=(test_expire.test_p3_no_end_without_its_event,),
    ),
    Mutant(
        name="two-events",
        breaks="P3: nothing keeps a second effect of the same verb out",
        schema=((ONCE, "CREATE INDEX once"),),
        caught_by=(test_expire.test_p3_a_second_end_cannot_be_written,),
    ),
)
P4 = (
    Mutant(
        name="no-generation-check",
        breaks="P4: an old wake-up ends a renewed hold",
        schema=((LOCK_DUE, LOCK_DUE.replace("AND h.generation = w.generation", "")),),
        caught_by=(test_expire.test_p4_a_renewal_outlives_every_older_wake_up,),
    ),
    Mutant(
        name="renewal-keeps-the-generation",
        breaks="P4: a renewal does not make older wake-ups stale",
        schema=(("SET generation = h.generation + 1,", "SET generation = h.generation,"),),
        caught_by=(
            test_expire.test_p4_a_renewal_outlives_every_older_wake_up,
            test_cases_b.test_b2_renewed_a_second_before_the_deadline,
        ),
    ),
)
P6 = (
    Mutant(
        name="reclaim-skips-locked-holds",
        breaks="P6: a buyer does not wait for the worker that ends the overdue hold",
        schema=(("ORDER BY h.id FOR NO KEY UPDATE) l;", "ORDER BY h.id FOR NO KEY UPDATE SKIP LOCKED) l;"),),
        caught_by=(test_capacity.test_p6_a_buyer_waits_for_whoever_has_the_overdue_hold,),
    ),
    Mutant(
        name="no-reclaim",
        breaks="P6: overdue holds stand in the way until a worker comes",
        schema=(
            ("ARRAY(SELECT DISTINCT u.id FROM unnest(v_reclaim || v_full.overdue) AS u (id))", "v_reclaim"),
        ),
        caught_by=(
            test_capacity.test_p6_a_buyer_gets_the_units_of_overdue_holds,
            test_cases_b.test_b5_past_the_deadline_nobody_needs_to_run,
            test_cases_b.test_b7_past_the_deadline_the_old_hold_says_expired,
        ),
    ),
    Mutant(
        name="first-items-only",
        breaks="P6: an overdue hold is found by its first resource only",
        schema=(
            (
                "AND h.resource_ids @> ARRAY[p_resource] AND h.resource_ids[1] <> p_resource\n        AND",
                "AND false AND",
            ),
        ),
        caught_by=(test_capacity.test_p6_every_item_of_an_overdue_hold_is_found,),
    ),
    Mutant(
        name="expiry-waits-for-every-resource",
        breaks="one slow checkout holds up every expiry",
        schema=((BOUNDED_WAIT, BOUNDED_WAIT.replace("50ms", "0")),),
        caught_by=(test_expire.test_a_slow_checkout_delays_only_what_it_holds,),
    ),
    Mutant(
        name="expiry-waits-for-holds",
        breaks="one locked hold holds up its whole batch",
        schema=((LOCK_DUE, LOCK_DUE.replace(" SKIP LOCKED", "")),),
        caught_by=(test_expire.test_a_locked_hold_is_contended_at_once,),
    ),
)
P7 = (
    Mutant(
        name="units-never-come-back",
        breaks="P7: an ended hold keeps its units",
        schema=((UNITS_BACK, "SET held = r.held"),),
        caught_by=(
            test_expire.test_an_expired_hold_gives_its_units_back,
            test_capacity.test_p7_returned_units_are_sold_again,
            test_cases_c.test_c1_released_twice_at_once_and_expired,
            test_cases_c.test_c2_released_and_expired_in_the_same_instant,
        ),
    ),
    Mutant(
        name="oversell",
        breaks="P7: what was free at the first look is taken without a second",
        schema=((FULL, ""),),
        caught_by=(
            test_cases_c.test_c5_two_buyers_between_check_and_insert,
            test_capacity.test_p7_forty_buyers_for_ten_units,
        ),
    ),
    Mutant(
        name="declaration-waits-for-nobody",
        breaks="P7: a place in flight is not counted by the declaration",
        schema=(
            ("PERFORM pg_advisory_xact_lock(1163415129, hashtext(p_tenant || '/' || p_resource) & 63);", ""),
        ),
        caught_by=(test_declare.test_p7_a_place_in_flight_is_waited_for,),
    ),
    Mutant(
        name="locks-in-any-order",
        breaks="two buyers lock the same counters in opposite order, and deadlock",
        schema=((IN_ORDER, IN_ORDER.replace("ORDER BY d.resource_id", "ORDER BY random()")),),
        caught_by=(
            test_cases_c.test_c7_opposite_order_never_deadlocks,
            test_cases_c.test_c7_place_many_in_opposite_order_never_deadlocks,
        ),
    ),
    Mutant(
        name="locks-in-another-order",
        breaks="places lock counters in one order, the other verbs in another",
        schema=((IN_ORDER, IN_ORDER.replace("ORDER BY d.resource_id", "ORDER BY d.resource_id DESC")),),
        caught_by=(test_cases_c.test_c7_resources_are_locked_by_name,),
    ),
    Mutant(
        name="some-of-the-items",
        breaks="a full resource is left out instead of refusing the hold",
        schema=(
            (
                "RAISE EXCEPTION USING ERRCODE = 'EX001', MESSAGE = 'full', DETAIL = v_want.resource_id;",
                "NULL;",
            ),
        ),
        caught_by=(test_cases_c.test_c5_two_buyers_between_check_and_insert,),
    ),
    Mutant(
        name="key-forgotten",
        breaks="a repeated request places a second hold",
        schema=(
            (
                "            IF p_key IS NOT NULL THEN\n                INSERT INTO",
                "            IF false THEN\n                INSERT INTO",
            ),
        ),
        caught_by=(
            test_place.test_a_key_places_once,
            test_place.test_a_duplicate_in_flight_never_waits,
        ),
    ),
)
P8 = (
    Mutant(
        name="an-outage-is-the-rows-fault",
        breaks="P8: a full disk uses up the attempts of innocent rows",
        functions={"expiry.expire:_bisect": (("if not lies_in_row(error):", "if False:"),)},
        caught_by=(test_expire.test_p8_an_outage_counts_against_nobody,),
    ),
    Mutant(
        name="one-bad-row-spoils-the-batch",
        breaks="P8: an error of one row is taken for an outage",
        functions={"expiry.expire:_bisect": (("if not lies_in_row(error):", "if True:"),)},
        caught_by=(test_expire.test_one_bad_row_cannot_keep_the_others,),
    ),
)
FEED = (
    Mutant(
        name="feed-to-the-end",
        breaks="the feed reads past transactions that still run",
        schema=(("SELECT coalesce(min(r.xid), next) INTO xid", "SELECT coalesce(max(next), next) INTO xid"),),
        caught_by=(
            test_feed.test_a_transaction_that_began_earlier_and_commits_later_is_not_skipped,
            test_feed.test_a_transaction_has_its_number_before_its_events,
            test_feed.test_any_order_of_commits_is_read_once_and_whole,
        ),
    ),
    Mutant(
        name="feed-by-number",
        breaks="the feed is in the order of numbers, whichever transaction commits when",
        schema=((FEED_ORDER, "ORDER BY o.id LIMIT p_scan;\n    ELSE"),),
        caught_by=(test_feed.test_any_order_of_commits_is_read_once_and_whole,),
    ),
    Mutant(
        name="feed-waits-for-strangers",
        breaks="a transaction in another database holds the feed back",
        schema=(("AND a.datid <> (SELECT d.oid", "AND false AND a.datid <> (SELECT d.oid"),),
        caught_by=(test_feed.test_a_long_writer_in_another_database_delays_nothing,),
    ),
    Mutant(
        name="cursor-beyond-what-was-read",
        breaks="the cursor of an empty page is where the next transaction would be, if the server did not crash",
        schema=(("(p_end_epoch, '0'::xid8, 0::bigint)", "(p_end_epoch, p_end_xid, 0::bigint)"),),
        caught_by=(test_feed.test_a_cursor_is_never_beyond_what_was_committed,),
    ),
    Mutant(
        name="pruned-passed",
        breaks="who begins passes what was pruned, although an older transaction still writes",
        schema=(
            (
                "WHERE p.tenant_id = p_tenant AND (p.epoch, p.xid, p.id) < (p_end",
                "WHERE p.tenant_id = p_tenant AND (0, p.xid, p.id) < (p_end",
            ),
        ),
        caught_by=(test_feed.test_what_was_pruned_is_not_passed_while_older_ones_may_come,),
    ),
    Mutant(
        name="pruned-in-silence",
        breaks="a reader whose events were pruned is not told",
        schema=(
            (
                "SELECT p_tenant, g.epoch, g.xid, g.id FROM gone g ORDER",
                "SELECT p_tenant, 0, g.xid, g.id FROM gone g ORDER",
            ),
        ),
        caught_by=(test_feed.test_a_cursor_before_what_was_pruned_has_expired,),
    ),
)

GROUP = (
    Mutant(
        name="group-oversells",
        breaks="P7: a group takes what is not there",
        schema=(("ELSE f.short IS NOT TRUE END", "ELSE true END"),),
        caught_by=(
            test_group.test_what_is_short_is_left_alone,
            test_group.test_p7_groups_and_others_sell_what_there_is,
        ),
    ),
    Mutant(
        name="group-takes-each-for-itself",
        breaks="P7: each place of a group is compared with what there was before all of them",
        schema=(("PARTITION BY q.tenant, q.resource_ids[1] ORDER BY q.n", "PARTITION BY q.n"),),
        caught_by=(test_group.test_what_is_short_is_left_alone,),
    ),
    Mutant(
        name="group-does-not-lock-undeclared",
        breaks="P7: a declaration does not count the places of a group in flight",
        schema=(
            (
                "hashtext(l.tenant || '/' || l.resource_id) & 63));",
                "hashtext(l.tenant || '/' || l.resource_id) & 63) OR true);",
            ),
        ),
        caught_by=(
            test_group.test_p7_a_group_in_flight_is_counted_by_the_declaration,
            test_group.test_p7_a_declaration_under_way_is_not_waited_for,
        ),
    ),
    Mutant(
        name="group-ignores-keys",
        breaks="a key that was used places again",
        schema=(("     WHERE f.known IS NULL;", "     ;"),),
        caught_by=(
            test_group.test_a_key_that_was_used_is_left_alone,
            test_group.test_two_groups_with_one_key_place_once,
        ),
    ),
    Mutant(
        name="group-places-a-key-twice",
        breaks="one key twice in a group is placed twice",
        schema=(("WHERE l.nth = 1", "WHERE true"),),
        caught_by=(test_group.test_one_key_is_placed_once_in_a_group,),
    ),
)

MUTANTS = (*P1, *P2, *P3, *P4, *P6, *P7, *P8, *FEED, *GROUP)
