"""Propose targets for the probes from ordinary traffic: targets are the riskiest unknown of a governor."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from governor.probes import GrantMissingError, Probe, Probes
from governor.probes.build import TARGETS, build
from governor.probes.settings import ProbeSettings

_SAMPLES_LEAST = 100  # a p99 of fewer is their maximum
# What is in use of something fixed, whatever the rate: near a target from ordinary traffic, it would hold every climb.
_SHARES = frozenset({"connections"})
_MISSING_MOST = 0.05  # share of missing samples beyond which the rest may not be ordinary


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What a probe read, in its own unit, and the target that follows; `proposed` None = keep the present one."""

    probe: str
    setting: str | None  # as in the environment; None: a probe of the host program's
    target: float
    proposed: float | None
    samples: int
    missing: int
    p50: float
    p99: float
    most: float
    why: str


async def calibrate(
    probes: Probes,
    duration_s: float,
    *,
    margin: float = 1.5,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> list[Proposal]:
    """Read started probes once per interval for duration_s, and propose p99 x margin for each.

    margin > 1: the law aims at 0.85 of a target, so 1.5 leaves ordinary traffic at 0.78 of that. Nothing
    is proposed from fewer than 100 samples, nor for what only ever read 0, nor for a share of something fixed.
    """
    if margin <= 1:
        raise ValueError(
            f"margin must be above 1, not {margin:g}: ordinary traffic would be above the target"
        )
    seen: dict[str, list[float]] = {probe.name: [] for probe in probes.probes}
    reads = max(1, math.floor(duration_s / probes.interval_s))
    began_at_s = clock()
    for number in range(1, reads + 1):
        await sleep(max(0.0, began_at_s + number * probes.interval_s - clock()))
        await probes.read()
        for name, value in probes.values.items():
            seen[name].append(value)
    return [propose(probe, seen[probe.name], reads=reads, margin=margin) for probe in probes.probes]


def propose(probe: Probe, values: Sequence[float], *, reads: int, margin: float) -> Proposal:
    """Propose a target from what was read of `reads` attempts."""
    p50, p99, most = _percentiles(values)
    setting, highest = _setting(probe.name)
    proposed, why = None, _unfit(probe.name, p99, count=len(values), reads=reads)
    if not why:
        proposed = min(_rounded_up(p99 * margin), highest)
        above = sum(value > probe.target for value in values) / len(values)
        why = f"p99 x {margin:g}; {above:.1%} of samples were above the present target"
    return Proposal(
        probe=probe.name,
        setting=setting,
        target=probe.target,
        proposed=proposed,
        samples=len(values),
        missing=reads - len(values),
        p50=p50,
        p99=p99,
        most=most,
        why=why,
    )


def _unfit(name: str, p99: float, *, count: int, reads: int) -> str:
    """Say why nothing follows from the samples; "" if something does."""
    if count < _SAMPLES_LEAST:
        return f"{count} samples, {_SAMPLES_LEAST} are needed"
    if reads - count > _MISSING_MOST * reads:
        return f"{reads - count} of {reads} samples are missing"
    if name in _SHARES:
        return "a share of what there is; what ordinary traffic takes of it says nothing"
    if p99 <= 0:
        return "at least 99 % of samples were 0"
    return ""


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    if not values:
        return 0.0, 0.0, 0.0
    ordered = sorted(values)
    return statistics.median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1], ordered[-1]


def _rounded_up(value: float) -> float:
    """Round up to two digits.

    >>> _rounded_up(0.01234), _rounded_up(7.5)
    (0.013, 7.5)
    """
    digits = 1 - math.floor(math.log10(value))
    scale: float = 10.0**digits
    return round(math.ceil(round(value * scale, 6)) / scale, max(digits, 0))


def _setting(name: str) -> tuple[str | None, float]:
    """Return the variable of a probe's target and the greatest value it may have."""
    field_name = TARGETS.get(name)
    if field_name is None:
        return None, math.inf
    field = ProbeSettings.model_fields[field_name]
    highest: float = next(each.le for each in field.metadata if hasattr(each, "le"))
    return f"GOVERNOR_{field_name.upper()}", highest


def register(app: typer.Typer) -> None:
    """Add the command `calibrate` to an application."""
    app.command("calibrate")(command)


def command(
    database_url: Annotated[
        str,
        typer.Option(envvar="GOVERNOR_DATABASE_URL", help="The server, not a pooler.", show_default=False),
    ],
    duration_s: Annotated[float, typer.Option(min=1, help="How long to look, s.")] = 3600,
    interval_s: Annotated[float, typer.Option(min=0.2, max=60, help="Between samples, s.")] = 2,
    margin: Annotated[float, typer.Option(min=1.01, max=100, help="Target / p99 of ordinary traffic.")] = 1.5,
) -> None:
    """Watch ordinary traffic and propose a target for each probe. Changes nothing."""
    try:
        asyncio.run(_watch(database_url, duration_s, interval_s=interval_s, margin=margin))
    except (GrantMissingError, ValueError) as error:
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


async def _watch(database_url: str, duration_s: float, *, interval_s: float, margin: float) -> None:
    async with build(ProbeSettings(), database_url=database_url, interval_s=interval_s) as probes:
        proposals = await calibrate(probes, duration_s, margin=margin)
        show(proposals, probes.alerts, Console())


def show(proposals: Sequence[Proposal], alerts: Mapping[str, str], console: Console) -> None:
    """Print what was seen, why, and the lines for the environment."""
    table = Table("probe", "samples", "missing", "p50", "p99", "most", "target", "proposed", box=None)
    for each in proposals:
        numbers = (each.p50, each.p99, each.most, each.target, each.proposed)
        shown = ("keep" if number is None else f"{number:.3g}" for number in numbers)
        table.add_row(each.probe, str(each.samples), str(each.missing), *shown)
    console.print(table)
    lines = [f"{each.probe}: {each.why}" for each in proposals]
    lines += [f"{name}, at the end: {why}" for name, why in alerts.items()]
    lines += [f"{each.setting}={each.proposed:g}" for each in proposals if each.setting and each.proposed]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
