"""A buyer who meets an overdue hold that cannot be ended is told so in the store's own words."""

from __future__ import annotations

from expiry.holds import Conn
from expiry.settings import Settings
from tests import scene

SETTINGS = Settings(attempts_max=2)


async def test_p6_an_overdue_hold_that_fails_is_busy_until_it_is_given_up(conn: Conn) -> None:
    """While attempts are left the buyer is to come again; a dead letter's units are not on sale."""
    await scene.declare(conn, "room", 1)
    late = await scene.overdue(conn, "room", holder="bad")
    await scene.break_bad_holds(conn, "P0001")
    for _ in range(2):
        assert await scene.outcome(scene.place(conn, "room")) == "busy"
        await scene.transition.expire_batch(conn, [scene.wake(late)], by="sweep", settings=SETTINGS)
    assert await scene.outcome(scene.place(conn, "room")) == "insufficient_capacity"
    await scene.mend(conn)
    assert await scene.expire_now(conn, late) == ["expired"]
    assert await scene.outcome(scene.place(conn, "room")) == "done"


async def test_p6_a_row_that_refuses_every_update_is_set_apart_too(conn: Conn) -> None:
    """Its dead letter stands for the back-off that it cannot keep."""
    await scene.declare(conn, "room", 1)
    late = await scene.overdue(conn, "room", holder="bad")
    await conn.execute("ALTER TABLE holds ADD CONSTRAINT never CHECK (holder <> 'bad') NOT VALID")
    assert await scene.outcome(scene.place(conn, "room")) == "busy"
    for _ in range(2):
        await scene.transition.expire_batch(conn, [scene.wake(late)], by="sweep", settings=SETTINGS)
    assert await scene.outcome(scene.place(conn, "room")) == "insufficient_capacity"
