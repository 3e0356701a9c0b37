"""A shop's event stream: carts, removals and purchases, generated from a seed or read from a file.

The file is any CSV with the columns event_time, event_type, product_id, user_id and user_session, as shops
publish them; gzip if its name ends in .gz. Both are streams: nothing is held but what is needed for order.
"""

import bisect
import csv
import gzip
import heapq
import itertools
import random
import uuid
import zlib
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Literal, NamedTuple, cast

from expiry.errors import SetupError

KINDS = ("cart", "remove_from_cart", "purchase")
COLUMNS = ("event_time", "event_type", "product_id", "user_id", "user_session")
JITTER = timedelta(minutes=1)  # events this much out of order are put in order while reading
TEXT_MAX = 240  # the API takes 255; the replay puts its own name in front
PROMOTED = "promo-"

# --- generate: what makes the stream plausible; the shares are round figures of published shop logs
START = datetime(2025, 11, 28, 18, tzinfo=UTC)
ZIPF = 0.9  # the n-th most popular product sells 1 / n^ZIPF as often as the first
PROMOTED_PRODUCTS = 5
BURST_AT = 0.45  # of the time
BURST_S = 90.0  # shop time in which the promotion's carts come
BURST_SHARE = 0.2  # of the sessions
BOUGHT_SHARE = 0.35
BOUGHT_IN_BURST_SHARE = 0.1  # the rest is abandoned, and expires together
REMOVED_SHARE = 0.15
AGAIN_SHARE = 0.12  # look at the cart once more, which renews the hold
MORE_SHARE = 0.45  # of sessions that take a further product
THINKING_S = 150.0  # mean time between two events of a session


class Event(NamedTuple):
    """Somebody put a product into a cart, took it out, or paid for it."""

    at: datetime
    kind: str
    product_id: str
    user_id: str
    session: str


def generate(
    seed: int, *, sessions: int = 6500, products: int = 400, minutes: float = 20, start: datetime = START
) -> Iterator[Event]:
    """Make up a shop's events in the order of time, the same ones for the same arguments.

    A few products are popular, most are not. Before half-time a promotion brings many carts within
    BURST_S; most of them are abandoned. The shop closes after `minutes`: what is in carts then stays there.
    """
    if sessions < 1 or products < 1 or minutes <= 0:
        raise SetupError("A shop has at least one session and one product, and is open for some minutes.")
    rng = random.Random(seed)  # noqa: S311 - a stream to be repeated, nothing secret
    weights = list(itertools.accumulate(1 / rank**ZIPF for rank in range(1, products + 1)))
    open_s = minutes * 60
    arrivals = [(rng.uniform(0, open_s), False) for _ in range(round(sessions * (1 - BURST_SHARE)))]
    burst_s = open_s * BURST_AT
    arrivals += [
        (burst_s + rng.uniform(0, min(BURST_S, open_s - burst_s)), True)
        for _ in range(sessions - len(arrivals))
    ]
    arrivals.sort()
    pending: list[Event] = []
    for arrival_s, promoted in arrivals:
        arrives_at = start + timedelta(seconds=arrival_s)
        while pending and pending[0].at < arrives_at:
            yield heapq.heappop(pending)
        for event in _visit(rng, arrives_at, weights, promoted=promoted):
            heapq.heappush(pending, event)
    closes_at = start + timedelta(seconds=open_s)
    while pending and pending[0].at <= closes_at:
        yield heapq.heappop(pending)


def _visit(
    rng: random.Random, arrives_at: datetime, weights: list[float], *, promoted: bool
) -> Iterator[Event]:
    """Make up the events of one session."""
    session = str(uuid.UUID(int=rng.getrandbits(128), version=4))
    user = f"user-{rng.randrange(10**6):06}"
    for product in _basket(rng, weights, promoted=promoted):
        at = arrives_at
        yield Event(at, "cart", product, user, session)
        if rng.random() < AGAIN_SHARE:
            at += timedelta(seconds=rng.expovariate(1 / THINKING_S))
            yield Event(at, "cart", product, user, session)
        at += timedelta(seconds=rng.expovariate(1 / THINKING_S))
        draw = rng.random()
        bought = BOUGHT_IN_BURST_SHARE if promoted else BOUGHT_SHARE
        if draw < bought:
            yield Event(at, "purchase", product, user, session)
        elif draw < bought + REMOVED_SHARE * (not promoted):
            yield Event(at, "remove_from_cart", product, user, session)
        arrives_at += timedelta(seconds=rng.uniform(1, 60))


def _basket(rng: random.Random, weights: list[float], *, promoted: bool) -> list[str]:
    """Choose what goes into one cart, nothing twice."""
    if promoted:
        return [f"{PROMOTED}{rng.randint(1, PROMOTED_PRODUCTS)}"]
    count = 1
    while count < len(weights) and rng.random() < MORE_SHARE:
        count += 1
    draws = (bisect.bisect_left(weights, rng.uniform(0, weights[-1])) for _ in range(count))
    return [f"product-{rank + 1:05}" for rank in dict.fromkeys(draws)]


def capacity(product_id: str, *, seed: int = 0) -> int:
    """Say how many units of a product there are, the same for the same arguments.

    Promoted ones are plentiful. Of the others most have enough for a busy hour and one in ten is
    scarce, so that whichever of those is popular sells out.
    """
    if product_id.startswith(PROMOTED):
        return 100_000
    rng = random.Random(f"{seed}/{product_id}")  # noqa: S311 - drawn to be repeated, nothing secret
    return rng.randint(3, 12) if rng.random() < 1 / 10 else rng.randint(100, 1000)


class EventFile(Iterator[Event]):
    """The events of a CSV file in the order of time; `ignored` counts the lines that are none of ours.

    Raises SetupError, with file, line and remedy, for whatever cannot be read.
    """

    def __init__(self, path: Path) -> None:
        """Say which file; it is opened at the first event."""
        self.path = path
        self.ignored: Tally[str] = Tally()
        self._line = 0
        self._events = self._in_order(self._lines())

    def __next__(self) -> Event:
        """Answer the next event."""
        return next(self._events)

    def _in_order(self, events: Iterable[Event]) -> Iterator[Event]:
        waiting: list[Event] = []
        newest_at = passed_at = datetime.min.replace(tzinfo=UTC)
        for event in events:
            if event.at < passed_at:
                raise self._broken(
                    f"{event.at} is more than {JITTER} before an earlier line: sort the file by event_time"
                )
            heapq.heappush(waiting, event)
            newest_at = max(newest_at, event.at)
            while waiting[0].at < newest_at - JITTER:
                passed_at = waiting[0].at
                yield heapq.heappop(waiting)
        while waiting:
            yield heapq.heappop(waiting)

    def _lines(self) -> Iterator[Event]:
        with ExitStack() as stack:
            try:
                rows = csv.reader(stack.enter_context(_open(self.path, "rt")))
                columns = self._columns(next(rows, []))
                for row in rows:
                    self._line = rows.line_num
                    event = self._event(row, columns)
                    if event is not None:
                        yield event
            except (OSError, EOFError, zlib.error, csv.Error) as error:
                reason = str(error) or type(error).__name__
                self._line += 1  # the one that did not come
                raise self._broken(f"it cannot be read ({reason}): give a whole CSV file") from error

    def _columns(self, names: list[str]) -> tuple[int, ...]:
        self._line = 1
        missing = [c for c in COLUMNS if c not in names]
        if missing:
            raise self._broken(
                f"the column {missing[0]} is missing: name {', '.join(COLUMNS)} in the first line"
            )
        return tuple(names.index(c) for c in COLUMNS)

    def _event(self, row: list[str], columns: tuple[int, ...]) -> Event | None:
        if not row:
            return None
        if len(row) <= max(columns):
            raise self._broken(f"it has {len(row)} fields, too few: mend or remove the line")
        time, kind, product, user, session = (row[i].strip() for i in columns)
        if kind not in KINDS:
            self.ignored[kind] += 1
            return None
        if not session:  # published logs have a few; nobody's cart cannot be held
            self.ignored["without a session"] += 1
            return None
        for name, value in (("product_id", product), ("user_session", session)):
            if not value or len(value) > TEXT_MAX or not value.isprintable():
                raise self._broken(f"{name} is {value[:40]!r}: it needs 1 to {TEXT_MAX} printable characters")
        return Event(self._time(time), kind, product, user, session)

    def _time(self, text: str) -> datetime:
        try:
            at = datetime.fromisoformat(text.upper().removesuffix(" UTC"))
            return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
        except (ValueError, OverflowError):
            raise self._broken(
                f"event_time is {text[:40]!r}: write it like 2019-10-01 00:00:00 UTC or 2019-10-01T00:00:00Z"
            ) from None

    def _broken(self, what: str) -> SetupError:
        return SetupError(f"{self.path}, line {self._line}: {what}.")


def read_csv(path: Path) -> EventFile:
    """Read events from a file, as they are asked for."""
    return EventFile(path)


def write_csv(path: Path, events: Iterable[Event]) -> int:
    """Write events so that `read_csv` reads the same ones; answer how many."""
    count = 0
    with _open(path, "wt") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for event in events:
            rows.writerow((event.at.isoformat(), *event[1:]))
            count += 1
    return count


def _open(path: Path, mode: Literal["rt", "wt"]) -> IO[str]:
    """Open plain or compressed text. Bytes that are no UTF-8 come as surrogates, to be met in their line."""
    encoding = "utf-8-sig" if mode == "rt" else "utf-8"
    if path.suffix == ".gz":
        return cast("IO[str]", gzip.open(path, mode, encoding=encoding, errors="surrogateescape", newline=""))
    return path.open(mode, encoding=encoding, errors="surrogateescape", newline="")
