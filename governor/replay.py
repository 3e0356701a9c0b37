"""Run an incident again from its journal: with the same law to the last digit, or with a candidate.

The journal's readings are of the world as it was: a candidate's own allowance does not change them. So it
shows what a law would have decided there, not what would have come of it (that is `governor simulate`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from governor.journal import Entry
from governor.law import Decision, Law, LawSettings
from governor.reading import Reading
from governor.shadow import Candidate, changed, law_of, under


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A decision that came out differently; `line` counts from 1."""

    line: int
    entry: Entry
    decided: Decision

    def __str__(self) -> str:
        """Say both decisions and their reasons."""
        at = "" if self.entry.decided_at is None else f" {self.entry.decided_at:%H:%M:%S}"
        was, now = self.entry.decided, self.decided
        return (
            f"{self.line}{at}: {was.allowance_per_s:g}/s ({was.limited_by}: {was.reason}) -> "
            f"{now.allowance_per_s:g}/s ({now.limited_by}: {now.reason})"
        )


def read_lines(lines: Iterable[str]) -> Iterator[Entry]:
    """Read a journal. Raises ValueError with the line's number for what is none."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield Entry.of_line(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def settings_of(entry: Entry) -> LawSettings:
    """Return the law's settings at that time. Raises ValueError where the snapshot has none."""
    try:
        return LawSettings(**entry.snapshot["settings"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"the snapshot has no settings of a law: {error!r}") from error


def repeat(entries: Iterable[Entry]) -> Iterator[Difference]:
    """Step the law once for each entry, from the state that is kept with it: any difference is a fault.

    Raises: ValueError for a snapshot of another program.
    """
    for line, entry in enumerate(entries, start=1):
        decided = Law.restore(settings_of(entry), entry.snapshot).step(entry.read)
        if decided != entry.decided:
            yield Difference(line=line, entry=entry, decided=decided)


def rerun(
    entries: Iterable[Entry], *, law: str | None = None, changes: str | None = None, tolerance: float = 0.0
) -> Iterator[Difference]:
    """Run a candidate through all of it, from the state that the first entry begins with.

    law: `module:Class`; changes: settings as `name=value,name=value`. Allowances that differ by no more than
    `tolerance` (share of the journal's) are as good as equal.
    Raises: ValueError for what is no candidate, or no journal.
    """
    candidate: Candidate | None = None
    scale = 1.0  # of the candidate's last allowance to the journal's
    for line, entry in enumerate(entries, start=1):
        if candidate is None:
            candidate = _begin(entry, law, changes)
        decided = candidate.step(_its_own(entry.read, scale))
        was_per_s = entry.decided.allowance_per_s
        scale = decided.allowance_per_s / was_per_s if was_per_s else 1.0
        if not _agree(decided, entry.decided, tolerance):
            yield Difference(line=line, entry=entry, decided=decided)


def _begin(entry: Entry, law: str | None, changes: str | None) -> Candidate:
    settings = settings_of(entry)
    if changes is not None:
        settings = changed(settings, changes)
    kind: type[Candidate] = Law if law is None else law_of(law)
    try:
        return kind.restore(settings, under(settings, entry.snapshot))
    except (AttributeError, LookupError, TypeError, ValueError):
        if kind is Law:
            raise
        return kind(settings)  # it remembers other things: it begins without history


def _its_own(reading: Reading, scale: float) -> Reading:
    """Say what would have been in force: cuts by workers lower a candidate's allowance by as much."""
    in_force = reading.allowance_per_s
    return reading if in_force is None else replace(reading, allowance_per_s=in_force * scale)


def _agree(one: Decision, other: Decision, tolerance: float) -> bool:
    if not tolerance:
        return one == other
    return math.isclose(one.allowance_per_s, other.allowance_per_s, rel_tol=tolerance)
