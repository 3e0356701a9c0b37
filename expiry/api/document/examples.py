"""What each operation answers to its example: where that is more than its fields say one by one."""

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

_BY = "api:2a97516c354b6884"
_AT = "2026-12-24T17:50:00.000000Z"  # five minutes after the hold was placed


def _renewed(hold: Json) -> Json:
    deadline = "2026-12-24T18:05:00.000000Z"
    return hold | {"generation": 2, "renewals": 1, "expires_at": deadline, "server_time": _AT}


def _ended(state: str) -> Callable[[Json], Json]:
    end = {"state": state, "expires_in_s": 0.0, "ended_at": _AT, "ended_by": _BY, "server_time": _AT}
    return lambda hold: hold | end


def _batch_placed(batch: Json) -> Json:
    hold = batch["results"][0]["hold"] | {"external_ref": None}
    other = hold | {
        "id": "0193b0c5-8f4a-7c3f-8a11-5b0e9d3c7f20",
        "items": [{"resource_id": "breakfast/2026-12-24", "quantity": 2}],
    }
    return {"results": [{"status": 201, "hold": hold}, {"status": 201, "hold": other}]}


def _batch_released(batch: Json) -> Json:
    return {"results": [{"status": 200, "hold": _ended("released")(batch["results"][0]["hold"])}]}


def _paused(orders: Json) -> Json:
    pause = orders["pause"] | {"ceiling_per_s": None, "reason": "database maintenance", "ends_at": None}
    return orders | {"pause": pause, "override": None}


_ANSWERS: dict[str, Callable[[Json], Json]] = {
    "holds_renew": _renewed,
    "holds_confirm": _ended("confirmed"),
    "holds_release": _ended("released"),
    "holds_return": _ended("returned"),
    "batches_place": _batch_placed,
    "batches_release": _batch_released,
    "operations_pause_governor": _paused,
    "operations_resume_governor": lambda orders: orders | {"pause": None, "override": None},
    "operations_put_override": lambda orders: orders | {"pause": None},
    "operations_delete_override": lambda orders: orders | {"pause": None, "override": None},
    "operations_resume": lambda loop: loop | {"paused": False, "reason": "done"},
}


def answered(operation_id: str, plain: Json) -> Json:
    """Answer the example of an answer; `plain` is put together from the examples of its fields."""
    return _ANSWERS.get(operation_id, dict)(plain)
