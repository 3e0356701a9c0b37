"""What a replay has done so far, and its view while it runs: on a terminal, or as a line now and then."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

import asyncpg
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from expiry import outbox
from expiry.deadletters import IN_REACH
from expiry.loops import rest

WIDTH = 80
DRAW_S = 0.5
LINE_S = 5.0  # between two lines where there is no terminal
RECENT_S = 5.0  # the lags of this long are shown
SPARK_S = 52  # seconds that a sparkline reaches back
LATENCIES_MAX = 1_000_000  # of requests that are kept, the latest
EVENTS_MAX = 20_000  # one look at the outbox takes at most
OVERDUE_MAX = 100_000


@dataclass(slots=True)
class Tally:
    """What a replay has done so far; only it writes here."""

    events: int = 0
    shop_at: datetime | None = None
    placed: int = 0
    sold_out: int = 0
    renewed: int = 0
    confirmed: int = 0
    released: int = 0
    too_late: int = 0  # bought, kept or removed after the deadline
    unmatched: int = 0  # bought or removed with nothing held: sold out before, or never in a cart
    refused: Counter[str] = field(default_factory=Counter)  # by code: none is expected
    requests: int = 0
    retries: int = 0
    behind_s: float = 0.0
    behind_s_max: float = 0.0
    closed_early: bool = False  # too far behind
    finished: bool = False
    hold_ids: set[UUID] = field(default_factory=set)
    latencies_ms: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES_MAX))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Answer the smallest value that this share of them does not exceed; 0 where there is none.

    >>> percentile([1, 2, 3, 4], 0.5)
    2
    """
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0


TENANT = "SELECT tenant_id FROM holds WHERE id = $1"
OVERDUE = f"""
SELECT count(*), extract(epoch FROM clock_timestamp())::double precision AS now_s
  FROM (SELECT FROM holds h WHERE {IN_REACH} AND h.expires_at <= statement_timestamp() LIMIT $1) o
"""


class Watch:
    """Follows in the database how the holds of a replay end, at a price that does not grow."""

    def __init__(self, conn: "asyncpg.Connection[asyncpg.Record]") -> None:
        """Use a connection that nobody else uses meanwhile."""
        self._conn = conn
        self._tenant_id: str | None = None
        self._after = outbox.OLDEST
        self.expired = 0
        self.overdue = 0
        self.now_s = 0.0
        self.expired_in_s: Counter[int] = Counter()
        self.recent: deque[tuple[float, float]] = deque()  # (database's clock in s, lag in ms)

    async def look(self, hold_ids: set[UUID]) -> None:
        """Take in what has happened since the last look."""
        for event in await self._events(hold_ids):
            if event.type == "hold.expired" and event.hold_id in hold_ids:
                at_s = event.occurred_at.timestamp()
                late = event.occurred_at - datetime.fromisoformat(event.data["expires_at"])
                self.expired += 1
                self.expired_in_s[int(at_s)] += 1
                self.recent.append((at_s, late.total_seconds() * 1000))
        status = await self._conn.fetchrow(OVERDUE, OVERDUE_MAX)
        assert status is not None  # noqa: S101 - an aggregate answers one row
        self.overdue, self.now_s = status["count"], status["now_s"]
        while self.recent and self.recent[0][0] < self.now_s - RECENT_S:
            self.recent.popleft()

    async def _events(self, hold_ids: set[UUID]) -> Sequence[outbox.Event]:
        """Follow the tenant's feed: from its end, once the first hold says which tenant it is."""
        if self._tenant_id is None:
            self._tenant_id = await self._conn.fetchval(TENANT, next(iter(hold_ids), None))
            if self._tenant_id is None:
                return ()
            self._after = await outbox.end(self._conn, tenant_id=self._tenant_id)
        page = await outbox.read(self._conn, tenant_id=self._tenant_id, after=self._after, limit=EVENTS_MAX)
        self._after = page.next
        return page.events

    def lag_ms(self, share: float) -> float | None:
        """Answer a percentile of the last RECENT_S; None when nothing expired."""
        return percentile(sorted(lag for _, lag in self.recent), share) if self.recent else None


class View:
    """Shows a replay until told to stop. Without a terminal it is one line every LINE_S."""

    def __init__(self, console: Console, watch: Watch, *, title: str) -> None:
        """`title` says what is replayed."""
        self._console = console
        self._watch = watch
        self._title = title
        self._tally = Tally()
        self._started_s = time.monotonic()
        self._requests_in_s: Counter[int] = Counter()
        self._requests = 0

    def progress(self, tally: Tally) -> None:
        """Take note of where the replay stands."""
        self._tally = tally
        self._requests_in_s[int(self._elapsed_s())] += tally.requests - self._requests
        self._requests = tally.requests

    async def show(self, stop: asyncio.Event) -> None:
        """Draw until `stop` is set, and once more then."""
        if not self._console.is_terminal:
            await self._print_lines(stop)
            return
        with Live(console=self._console, auto_refresh=False) as live:
            while not stop.is_set():
                await rest(stop, DRAW_S)
                await self._watch.look(self._tally.hold_ids)
                live.update(self.panel(), refresh=True)

    async def _print_lines(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await rest(stop, LINE_S)
            await self._watch.look(self._tally.hold_ids)
            self._console.print(self.line(), highlight=False, soft_wrap=True)

    def line(self) -> str:
        """Answer where things stand, in a line."""
        tally, watch = self._tally, self._watch
        return (
            f"{self._elapsed_s():4.0f} s  placed {tally.placed:,}  held {self._held():,}  "
            f"expired {watch.expired:,}  sold out {tally.sold_out:,}  overdue {watch.overdue:,}  "
            f"lag p50 {_ms(watch.lag_ms(0.5))} p99 {_ms(watch.lag_ms(0.99))}  "
            f"{self._request_rates()[-1]:,} requests/s  behind {tally.behind_s:.1f} s"
        )

    def panel(self) -> Panel:
        """Answer where things stand, for a terminal."""
        tally, watch = self._tally, self._watch
        figures = Table.grid(padding=(0, 1), expand=True)
        for _ in range(3):
            figures.add_column(ratio=1, style="dim")
            figures.add_column(justify="right", style="bold", min_width=8)
            figures.add_column(min_width=1)
        for row in (
            ("placed", tally.placed, "held now", self._held(), "overdue now", f"{watch.overdue:,}"),
            ("renewed", tally.renewed, "expired", watch.expired, "lag p50", _ms(watch.lag_ms(0.5))),
            ("confirmed", tally.confirmed, "sold out", tally.sold_out, "lag p99", _ms(watch.lag_ms(0.99))),
            ("released", tally.released, "too late", tally.too_late, "behind", f"{tally.behind_s:.1f} s"),
        ):
            figures.add_row(
                *(
                    cell
                    for label, value in zip(row[::2], row[1::2], strict=True)
                    for cell in (str(label), value if isinstance(value, str) else f"{value:,}", "")
                )
            )
        rates = Table.grid(padding=(0, 1))
        rates.add_column(style="dim", min_width=10)
        rates.add_column(width=SPARK_S)
        rates.add_column(justify="right", style="bold", min_width=6)
        for label, style, per_s in (
            ("requests/s", "cyan", self._request_rates()),
            ("expired/s", "magenta", self._expiry_rates()),
        ):
            rates.add_row(label, Text(sparkline(per_s), style=style), f"{per_s[-1]:,}")
        return Panel(
            Group(figures, Text(), rates),
            title=f"[bold]{self._title}[/]",
            title_align="left",
            subtitle=f"[dim]{self._status()}[/]",
            subtitle_align="right",
            box=box.ROUNDED,
            border_style="dim",
            padding=(1, 2),
            width=min(WIDTH, self._console.width),
        )

    def _status(self) -> str:
        tally = self._tally
        if tally.finished:
            return (
                f"the shop has closed, {self._held():,} holds are left to expire · {self._elapsed_s():.0f} s"
            )
        clock = f"shop time {tally.shop_at:%H:%M:%S} · " if tally.shop_at else ""
        return f"{clock}{self._elapsed_s():.0f} s"

    def _held(self) -> int:
        tally = self._tally
        return max(tally.placed - tally.confirmed - tally.released - self._watch.expired, 0)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _request_rates(self) -> list[int]:
        now_s = int(self._elapsed_s())
        return [self._requests_in_s[s] for s in range(now_s - SPARK_S, now_s)]

    def _expiry_rates(self) -> list[int]:
        now_s = int(self._watch.now_s)
        return [self._watch.expired_in_s[s] for s in range(now_s - SPARK_S, now_s)]


def sparkline(values: Sequence[float]) -> str:
    """Draw values as bars, the highest in full; nothing for zero.

    >>> sparkline([0, 1, 4, 8])
    ' ▁▄█'
    """
    highest = max(values, default=0)
    return "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * v / highest) if highest else 0] for v in values)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"
