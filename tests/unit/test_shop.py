"""The made-up shop repeats itself; files of other shops are read as they come or refused with a reason."""

import gzip
import itertools
import random
import tracemalloc
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expiry import shop
from expiry.errors import SetupError
from expiry.shop import Event, capacity, generate, read_csv, write_csv

HEADER = "event_time,event_type,product_id,user_id,user_session\n"
AT = datetime(2019, 10, 1, tzinfo=UTC)


def made(seed: int = 1, sessions: int = 400) -> list[Event]:
    """Answer a small shop's events."""
    return list(generate(seed, sessions=sessions, products=50, minutes=20))


def read(tmp_path: Path, text: str) -> list[Event]:
    """Write a file and read its events."""
    path = tmp_path / "events.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return list(read_csv(path))


# --- the made-up shop


def test_the_same_seed_makes_the_same_events() -> None:
    """A replay can be repeated; another seed is another day."""
    assert made(1) == made(1)
    assert made(1) != made(2)


@given(st.integers(), st.integers(1, 60), st.integers(1, 5), st.floats(0.01, 60))
def test_events_come_in_order_and_make_sense(seed: int, sessions: int, products: int, minutes: float) -> None:
    """Time never goes back or past the end, every session comes, and each product's first event is a cart."""
    events = list(generate(seed, sessions=sessions, products=products, minutes=minutes))
    assert all(a.at <= b.at for a, b in itertools.pairwise(events))
    assert len({e.session for e in events}) == sessions
    assert events[-1].at <= shop.START + timedelta(minutes=minutes)
    seen = set()
    for event in events:
        if event.kind == "cart":
            seen.add((event.session, event.product_id))
        assert (event.session, event.product_id) in seen


def test_a_promotion_is_abandoned_together() -> None:
    """Many carts come within the burst, and few of them are bought."""
    events = made(sessions=4000)
    promoted = [e for e in events if e.product_id.startswith(shop.PROMOTED)]
    first = {e.session: e.at for e in reversed(promoted) if e.kind == "cart"}
    assert len(first) == 800
    assert max(first.values()) - min(first.values()) <= timedelta(seconds=shop.BURST_S)
    assert sum(e.kind == "purchase" for e in promoted) < 200


def test_few_products_are_popular() -> None:
    """The first tenth of the products takes more than a third of the carts."""
    carts = Counter(e.product_id for e in made(sessions=4000) if e.kind == "cart")
    others = [n for product, n in carts.most_common() if not product.startswith(shop.PROMOTED)]
    assert sum(others[:5]) > sum(others) / 3


def test_an_impossible_shop_is_refused() -> None:
    """Without sessions, products or time there is nothing to make up."""
    for sessions, products, minutes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(SetupError, match="at least one session"):
            next(generate(1, sessions=sessions, products=products, minutes=minutes))


def test_capacities_are_repeated_and_a_few_are_scarce() -> None:
    """A capacity belongs to seed and product; the promoted ones do not sell out."""
    drawn = [capacity(f"product-{n}") for n in range(700)]
    assert drawn == [capacity(f"product-{n}") for n in range(700)]
    assert 35 < sum(units <= 12 for units in drawn) < 105
    assert capacity("promo-1") == 100_000


# --- files


@pytest.mark.parametrize("name", ["events.csv", "events.csv.gz"])
def test_what_was_written_is_read(tmp_path: Path, name: str) -> None:
    """A generated stream can be saved and replayed, compressed or not."""
    path = tmp_path / name
    assert write_csv(path, made()) == len(made())
    assert list(read_csv(path)) == made()
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")


def test_columns_come_in_any_order_among_others(tmp_path: Path) -> None:
    """What is not needed is not looked at; a byte order mark and empty lines do no harm."""
    text = "\ufeffprice,user_session,event_type,product_id,brand,event_time,user_id\n\n"
    text += "1.5,s1,cart,77,,2019-10-01 00:00:00 UTC,9\n"
    assert read(tmp_path, text) == [Event(AT, "cart", "77", "9", "s1")]


@pytest.mark.parametrize(
    "time",
    [
        "2019-10-01 00:00:00 UTC",
        "2019-10-01 00:00:00",
        "2019-10-01T00:00:00Z",
        "2019-10-01t00:00:00.000z",
        "2019-10-01T02:00:00+02:00",
    ],
)
def test_times_are_read_in_both_forms(tmp_path: Path, time: str) -> None:
    """As shops publish them (UTC), and RFC 3339 in any zone."""
    assert read(tmp_path, f"{HEADER}{time},cart,77,9,s1\n")[0].at == AT


def test_other_events_are_ignored_and_counted(tmp_path: Path) -> None:
    """Views are not ours, nor are the carts of nobody."""
    path = tmp_path / "events.csv"
    path.write_text(HEADER + "x,view,77,9,s1\nx,view,77,9,s2\nx,cart,77,9,\n")
    events = read_csv(path)
    assert list(events) == []
    assert events.ignored == {"view": 2, "without a session": 1}


def test_small_disorder_is_put_in_order(tmp_path: Path) -> None:
    """Events up to a minute late find their place."""
    shuffled = made()
    rng = random.Random(7)  # noqa: S311 - a shuffle to be repeated
    shuffled.sort(key=lambda e: e.at + timedelta(seconds=rng.uniform(0, 59)))
    path = tmp_path / "events.csv"
    write_csv(path, shuffled)
    assert list(read_csv(path)) == made()


GOOD = "2019-10-01 00:00:00 UTC,cart,77,9,s1\n"
BROKEN = [
    ("", "line 1: the column event_time is missing: name event_time"),
    ("event_time,event_type,product_id,user_id\n", "line 1: the column user_session is missing"),
    (HEADER + GOOD + "yesterday,cart,77,9,s1\n", "line 3: event_time is 'yesterday': write it like 2019"),
    (HEADER + GOOD + "2019-10-01 00:00:00 UTC,cart,77\n", "line 3: it has 3 fields, too few: mend or remove"),
    (HEADER + "2019-10-01 00:00:00 UTC,cart,,9,s1\n", "line 2: product_id is '': it needs 1 to 240"),
    (HEADER + f"2019-10-01 00:00:00 UTC,cart,{'7' * 256},9,s1\n", "line 2: product_id is '7777"),
    (HEADER + GOOD + "2019-10-01 00:00:00 UTC,cart,7\udcff7,9,s1\n", r"line 3: product_id is '7\\udcff7'"),
    (HEADER + GOOD + "2019-10-01 00:00:00 UTC,cart,7\x007,9,s1\n", r"line 3: product_id is '7\\x007'"),
    (HEADER + GOOD + f"{'9' * 200_000},cart,77,9,s1\n", r"line 3: it cannot be read \(field larger"),
    (
        HEADER
        + "2019-10-01 01:00:00 UTC,cart,77,9,s1\n"
        + "2019-10-01 01:05:00 UTC,cart,77,9,s1\n"
        + "2019-10-01 00:00:00 UTC,cart,77,9,s1\n",
        r"line 4: 2019-10-01 00:00:00\+00:00 is more than 0:01:00 before an earlier line: sort the file",
    ),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    """The refusal names the file, the line, what is wrong and what to do."""
    with pytest.raises(SetupError, match=f"events.csv, {message}"):
        read(tmp_path, text)


def test_a_file_that_is_not_there_or_cut_off_is_named(tmp_path: Path) -> None:
    """So are a missing file, a directory, a torn download, and text under a name that promises gzip."""
    whole = gzip.compress((HEADER + GOOD * 1000).encode())
    (tmp_path / "torn.csv.gz").write_bytes(whole[:-30])
    (tmp_path / "text.csv.gz").write_text(HEADER + GOOD)
    for name in ("nowhere.csv", ".", "torn.csv.gz", "text.csv.gz"):
        with pytest.raises(SetupError, match=r"it cannot be read .*: give a whole CSV file"):
            list(read_csv(tmp_path / name))


def test_a_file_is_not_held_in_memory(tmp_path: Path) -> None:
    """A long file is read as it is used: only the last minute of it waits for late lines."""
    path = tmp_path / "events.csv"
    write_csv(path, (Event(AT + timedelta(seconds=n), "cart", "77", "9", "s1") for n in range(50_000)))
    tracemalloc.start()
    count = sum(1 for _ in read_csv(path))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 50_000
    assert peak_bytes < 1_000_000
