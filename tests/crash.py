"""A worker that loses both stores at its n-th request, for every n: as good as a crash there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
from redis.asyncio import Redis

from expiry.settings import Settings
from expiry.wakeups import Claim, Wakeups
from expiry.worker import GovernedWorker
from tests.fleet import Pool, assert_kept, overdue, settings_for, states, wakeups_on, working
from tests.helpers import eventually
from tests.proxy import Cut, Proxy, proxy_to
from tests.wakes import emptied


class Fuse:
    """Cuts a process off from both stores for good at its n-th request, as a crash there would."""

    def __init__(self, n: int, when: Cut) -> None:
        """Burn after n requests."""
        self._left = n
        self._when = when
        self._proxies: list[Proxy] = []
        self.blown = False

    def guard(self, proxy: Proxy) -> str:
        """Count this proxy's requests too; return its URL."""
        proxy.judge, proxy.on_cut = self._judge, self._blow
        self._proxies.append(proxy)
        return proxy.url

    def _judge(self, _request: bytes) -> Cut | None:
        self._left -= 1
        return self._when if self._left == 0 else None

    def _blow(self) -> None:
        self.blown = True
        for proxy in self._proxies:
            proxy.refuse()


class Impatient(Wakeups):
    """Sees leases as expired at once, so that nobody has to wait for them."""

    async def claim(self, want: int, *, skew_ms: float) -> Claim:
        """Claim as if a minute had passed."""
        return await super().claim(want, skew_ms=skew_ms + 60_000)


@asynccontextmanager
async def fused(fuse: Fuse, settings: Settings, kind: type[GovernedWorker]) -> AsyncIterator[None]:
    """Run a worker whose every connection goes by the fuse."""
    async with AsyncExitStack() as stack:
        urls = []
        for url in (settings.database_url, settings.redis_url):
            proxy = await stack.enter_async_context(proxy_to(url.get_secret_value()))
            urls.append(fuse.guard(proxy))
        pool = await stack.enter_async_context(asyncpg.create_pool(urls[0], min_size=0, max_size=2))
        await stack.enter_async_context(working(pool, settings_for(*urls, stop_grace_s=0.5), kind=kind))
        yield


async def crash_everywhere(
    pool: Pool, redis: Redis, settings: Settings, when: Cut, kind: type[GovernedWorker] = GovernedWorker
) -> int:
    """Cut a worker off at its n-th request, let another finish, check; for n from 1 until none is left.

    Returns how many requests there were to be cut off at.
    """
    n, settled = 0, emptied(redis)
    while True:
        n += 1
        fuse = Fuse(n, when)
        holds = await overdue(pool, 3)
        async with wakeups_on(settings) as wakeups:
            await wakeups.enqueue(holds)

        async def crashed_or_done(fuse: Fuse = fuse) -> bool:
            return fuse.blown or await settled()

        async with fused(fuse, settings, kind):
            await eventually(crashed_or_done)
        async with working(pool, settings, wakeups=Impatient):
            await eventually(settled)
        assert await states(pool) == {"expired": 3 * n}
        assert await pool.fetchval("SELECT max(attempts) FROM holds") == 0
        await assert_kept(pool)
        if not fuse.blown:
            return n - 1
