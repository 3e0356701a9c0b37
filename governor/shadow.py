"""A candidate law beside the one that counts: stepped on the same readings, journalled, never enforced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from importlib import import_module
from typing import Any, Protocol, Self

from governor.journal import as_decision
from governor.law import Decision, Law, LawSettings
from governor.reading import Reading


class Candidate(Protocol):
    """What a candidate law can do: what `Law` does."""

    def __init__(self, settings: LawSettings) -> None: ...

    def step(self, reading: Reading) -> Decision:
        """Decide."""

    @classmethod
    def restore(cls, settings: LawSettings, snapshot: Mapping[str, Any]) -> Self:
        """Return the law that gave the snapshot."""


def changed(settings: LawSettings, changes: str) -> LawSettings:
    """Return the settings with `name=value,name=value` changed. Raises ValueError, naming what is wrong."""
    known = {each.name for each in fields(settings)}
    found = {}
    for change in changes.split(","):
        name, _, value = change.strip().partition("=")
        if name not in known:
            raise ValueError(f"the law has no setting {name!r}; there are {', '.join(sorted(known))}")
        try:
            found[name] = float(value)
        except ValueError:
            raise ValueError(f"{name} must be a number, not {value!r}") from None
    return replace(settings, **found)


def law_of(spec: str) -> type[Candidate]:
    """Import `module:Class`. Raises ValueError where there is none such."""
    module, _, name = spec.partition(":")
    try:
        found: type[Candidate] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"there is no law {spec!r}: {error}") from error
    return found


def candidate_of(spec: str, settings: LawSettings) -> Candidate:
    """Return a new candidate: `module:Class`, or the law under `name=value,...`. Raises ValueError."""
    if "=" in spec:
        return Law(changed(settings, spec))
    return law_of(spec)(settings)


def under(settings: LawSettings, snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot as if it had been taken under these settings, so that a candidate may go on from it."""
    return {**snapshot, "settings": asdict(settings)}


class Shadow:
    """A candidate and its name."""

    def __init__(self, spec: str, settings: LawSettings) -> None:
        """Begin without history. Raises ValueError for what is no candidate."""
        self._spec = spec
        self._law = candidate_of(spec, settings)

    def step(self, reading: Reading) -> dict[str, Any]:
        """Decide, for the journal. Raises what the candidate raises."""
        return {"law": self._spec, **as_decision(self._law.step(reading))}
