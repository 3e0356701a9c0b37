"""A shop's checkout at a fixed rate: insert an order, take a unit from the stock, commit.

    python -m bench.governed.checkout PER_S START DOUBLES_AT

Orders come at fixed times whatever became of those before (an open loop: a slow database does not get fewer), and
latency runs from that time, so that waiting for a connection is in it. After TIMEOUT_S the customer is gone.
Prints a JSON line each second: when it began (Unix time, s), the latencies of what came within it (ms) and how many of
them failed.
"""

import asyncio
import json
import math
import os
import sys
import time
from collections import deque
from contextlib import suppress
from random import Random
from typing import Any

import asyncpg
import uvloop

from bench.figures import percentile

CONNECTIONS = 10
TIMEOUT_S = 2.0
ITEMS = 1000

TABLES = f"""
CREATE TABLE shop_stock (item int PRIMARY KEY, units bigint NOT NULL) WITH (fillfactor = 50);
CREATE TABLE shop_latency (p99_ms float8 NOT NULL);
INSERT INTO shop_latency VALUES (0);
CREATE TABLE shop_orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, item int NOT NULL,
    holder text NOT NULL, ordered_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO shop_stock SELECT i, 1000000000 FROM generate_series(0, {ITEMS - 1}) i;
"""
# What the shop's dashboard would show, where a probe may read it; else a Prometheus query would.
LATENCY = "UPDATE shop_latency SET p99_ms = $1"
WINDOW = 1500  # orders that p99 is of: 5 s of an ordinary day
ORDER = "INSERT INTO shop_orders (item, holder) VALUES ($1, $2)"
TAKE = "UPDATE shop_stock SET units = units - 1 WHERE item = $1"


class Shop:
    """Latencies, by the second in which an order was due."""

    def __init__(self, pool: "asyncpg.Pool[Any]") -> None:
        self._pool = pool
        self._random = Random(1)
        self._recent = deque[float](maxlen=WINDOW)
        self._seconds: dict[int, tuple[list[float], list[float]]] = {}  # those that succeeded, and failed

    async def order(self, due_s: float) -> None:
        """Place one order that was due at this time (Unix time, s)."""
        item, kept = self._random.randrange(ITEMS), True
        try:
            async with asyncio.timeout(TIMEOUT_S), self._pool.acquire() as conn, conn.transaction():
                await conn.execute(ORDER, item, "somebody")
                await conn.execute(TAKE, item)
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            kept = False
        latency_ms = round((time.time() - due_s) * 1000, 2)
        self._recent.append(latency_ms)
        self._seconds.setdefault(int(due_s), ([], []))[not kept].append(latency_ms)

    async def publish(self) -> None:
        """Write down the p99 of the last orders."""
        with suppress(TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            async with asyncio.timeout(TIMEOUT_S), self._pool.acquire() as conn:
                await conn.execute(LATENCY, percentile(self._recent, 99) if self._recent else 0.0)

    def tell(self, before_s: float) -> None:
        """Print the seconds that ended before this time, once each."""
        for second in sorted(s for s in self._seconds if s + 1 <= before_s):
            kept, failed = self._seconds.pop(second)
            print(json.dumps({"at": second, "ms": kept + failed, "failed": len(failed)}), flush=True)


async def main(per_s: float, start_s: float, doubles_at_s: float) -> None:
    """Order until ended."""
    pool = await asyncpg.create_pool(
        os.environ["DATABASE_URL"],
        min_size=CONNECTIONS,
        max_size=CONNECTIONS,
        server_settings={"application_name": "shop"},
    )
    shop, orders, due_s = Shop(pool), set[asyncio.Task[None]](), start_s
    while True:
        await asyncio.sleep(max(due_s - time.time(), 0))
        orders.add(asyncio.create_task(shop.order(due_s)))
        if math.floor(due_s) > math.floor(due_s - 1 / per_s):  # a second began
            orders = {
                order for order in orders if not order.done()
            }  # bounded: none outlives its timeout for long
            shop.tell(due_s - 2 * TIMEOUT_S)
            orders.add(asyncio.create_task(shop.publish()))
        due_s += 1 / (per_s if due_s < doubles_at_s else 2 * per_s)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        uvloop.run(main(*map(float, sys.argv[1:])))
