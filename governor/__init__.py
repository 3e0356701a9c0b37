"""The governor: how many transitions per second may start now, for a whole fleet.

It knows nothing of what is started. A `Bucket` (Redis, PostgreSQL or in process) holds the permits
that the fleet shares, `bucket_library()` is the same bucket for a Lua script to take them in, and a
`Limiter` is the door for any asyncio loop.
"""

from governor.bucket import Bucket, BucketState, BucketUnavailable, Cut, Grant, LocalBucket, Published
from governor.bucket_postgres import GOVERNOR_BUCKET_DDL, PostgresBucket
from governor.bucket_redis import RedisBucket, bucket_library
from governor.limiter import Limiter
from governor.settings import GovernorSettings

__all__ = [
    "GOVERNOR_BUCKET_DDL",
    "Bucket",
    "BucketState",
    "BucketUnavailable",
    "Cut",
    "GovernorSettings",
    "Grant",
    "Limiter",
    "LocalBucket",
    "PostgresBucket",
    "Published",
    "RedisBucket",
    "bucket_library",
]
