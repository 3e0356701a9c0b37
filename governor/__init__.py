"""The governor: how many transitions per second may start now, for a whole fleet.

It knows nothing of what is started. A `Bucket` (Redis, PostgreSQL or in process) holds the permits
that the fleet shares, `bucket_library()` is the same bucket for a Lua script to take them in, and a
`Limiter` is the door for any asyncio loop. `Law` decides the allowance from one `Reading` an interval.
"""

from governor.bucket import (
    Attempts,
    Bucket,
    BucketState,
    BucketUnavailable,
    Cut,
    Grant,
    LocalBucket,
    Priority,
    Published,
)
from governor.bucket_postgres import GOVERNOR_BUCKET_DDL, PostgresBucket
from governor.bucket_redis import RedisBucket, bucket_library
from governor.controller import Controller
from governor.journal import GOVERNOR_JOURNAL_DDL
from governor.law import Decision, Law, LawSettings
from governor.lease import GOVERNOR_LEASE_DDL
from governor.limiter import Limiter
from governor.orders import GOVERNOR_ORDERS_DDL
from governor.outcomes import Outcomes
from governor.reading import Reading
from governor.readings import Backlog
from governor.settings import GovernorSettings

# All tables at once, for who uses the governor alone; safe to repeat.
GOVERNOR_DDL = GOVERNOR_BUCKET_DDL + GOVERNOR_LEASE_DDL + GOVERNOR_ORDERS_DDL + GOVERNOR_JOURNAL_DDL

__all__ = [
    "GOVERNOR_BUCKET_DDL",
    "GOVERNOR_DDL",
    "GOVERNOR_JOURNAL_DDL",
    "GOVERNOR_LEASE_DDL",
    "GOVERNOR_ORDERS_DDL",
    "Attempts",
    "Backlog",
    "Bucket",
    "BucketState",
    "BucketUnavailable",
    "Controller",
    "Cut",
    "Decision",
    "GovernorSettings",
    "Grant",
    "Law",
    "LawSettings",
    "Limiter",
    "LocalBucket",
    "Outcomes",
    "PostgresBucket",
    "Priority",
    "Published",
    "Reading",
    "RedisBucket",
    "bucket_library",
]
