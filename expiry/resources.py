"""Resources with a capacity: declare one, look at one. Undeclared resources have no row and no limit."""

from dataclasses import dataclass

from expiry import errors
from expiry.holds import Conn
from expiry.wanted import INT_MAX, TEXT_MAX

OVERDUE_MAX = 10_000  # holds summed up for one answer; beyond, `available` is too low rather than too high
LIST_OVERDUE_MAX = 1000  # the same, for each resource of a list


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Counters of one resource. `held` still has overdue holds in it, `available` leaves them out."""

    resource_id: str
    capacity: int | None
    held: int
    confirmed: int
    available: int | None  # None: no limit


DECLARE = "SELECT expiry_declare($1, $2, $3)"


async def declare(conn: Conn, resource_id: str, *, tenant_id: str, capacity: int | None) -> None:
    """Set the capacity (None: counted without a limit); the first time, units held before count too.

    Lowering it below what is held keeps all holds; nothing is available until enough of them end. Raises
    OutOfRangeError, or what asyncpg raises when a place on this resource takes more than 2 s.
    """
    if not 1 <= len(resource_id) <= TEXT_MAX:
        raise errors.OutOfRangeError(f"resource_id: 1 to {TEXT_MAX} characters")
    if capacity is not None and not 0 <= capacity <= INT_MAX:
        raise errors.OutOfRangeError(f"capacity: 0 to {INT_MAX}, or null")
    await conn.execute(DECLARE, tenant_id, resource_id, capacity)


# One snapshot: an overdue hold that a worker is just ending is either in the counters' past or in the sum.
_COUNTERS = """
SELECT r.resource_id, r.capacity, r.held, r.confirmed,
       CASE WHEN r.capacity IS NOT NULL THEN greatest(0, r.capacity - r.held - r.confirmed + (
           SELECT coalesce(sum(o.quantity), 0)
             FROM expiry_overdue(r.tenant_id, r.resource_id, statement_timestamp(), $3) o)) END AS available
"""
RESOURCE = f"{_COUNTERS} FROM resources r WHERE r.tenant_id = $1 AND r.resource_id = $2"


async def get(conn: Conn, resource_id: str, *, tenant_id: str) -> Resource:
    """Answer the resource as of one instant. Raises ResourceNotFoundError for one never declared."""
    row = await conn.fetchrow(RESOURCE, tenant_id, resource_id, OVERDUE_MAX)
    if row is None:
        raise errors.ResourceNotFoundError
    return Resource(**row)


# Index: resources_by_prefix.
RESOURCES = f"""{_COUNTERS}
  FROM (SELECT * FROM resources r
         WHERE r.tenant_id || '' = $1 AND (r.resource_id || '') COLLATE "C" > $2
           AND (r.resource_id || '') COLLATE "C" BETWEEN $5 AND $5 || repeat(chr(1114111), 255)
           AND starts_with(r.resource_id, $5)
         ORDER BY (r.resource_id || '') COLLATE "C" LIMIT $4) r
 ORDER BY r.resource_id COLLATE "C"
"""


async def list_(
    conn: Conn, *, tenant_id: str, prefix: str = "", after: str = "", limit: int = 50
) -> list[Resource]:
    """Answer declared resources by id, those that begin with the prefix, after one of them."""
    rows = await conn.fetch(RESOURCES, tenant_id, after, LIST_OVERDUE_MAX, limit, prefix)
    return [Resource(**row) for row in rows]
