"""Ask all probes once per interval: saturation = value / target, smoothed for each."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from governor.probes.sample import Probe, ProbeMissingError, ProbeOverloadedError, Source
from governor.probes.track import Track


class Probes:
    """The probes of a fleet's leader. Between `start` and `close`, `read` once per interval."""

    def __init__(
        self,
        probes: Sequence[Probe],
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Check the probes: names differ, targets are above 0, ranges are ranges.

        Raises: ValueError, naming the probe.
        """
        for probe in probes:
            _check(probe)
        self._tracks = {probe.name: Track(probe) for probe in probes}
        if len(self._tracks) < len(probes):
            raise ValueError(f"two probes have one name: {', '.join(sorted(each.name for each in probes))}")
        self.interval_s = interval_s
        self._clock = clock
        self._sources = list({id(source): source for source in _sources(probes)}.values())

    @property
    def probes(self) -> list[Probe]:
        """All probes, in order."""
        return [track.probe for track in self._tracks.values()]

    @property
    def alerts(self) -> Mapping[str, str]:
        """Why probes are missing, or above the target without a value, by name; empty = all is well."""
        return {name: track.alert for name, track in self._tracks.items() if track.alert is not None}

    @property
    def values(self) -> Mapping[str, float]:
        """The last values as measured, each in its unit, by name; none for what is missing."""
        return {name: track.value for name, track in self._tracks.items() if track.value is not None}

    async def start(self) -> None:
        """Open connections, check what the role may see, start the canary.

        A database that does not answer is no error: it is read as above the target until it does.
        Raises: GrantMissingError, with the GRANT; nothing stays open then.
        """
        try:
            for source in self._sources:
                await source.start()
        except BaseException:
            await self.close()
            raise

    async def read(self) -> Mapping[str, float | None]:
        """Return the saturation of each probe, within one interval and a close.

        1.0 = at its target. None = a required probe is missing, late, implausible or does not advance; an
        optional one is absent then, and `alerts` says why. What times out or refuses reads 2.0 or more.
        """
        async with asyncio.TaskGroup() as group:
            for track in self._tracks.values():
                group.create_task(self._observe(track))
        return {
            name: track.saturation
            for name, track in self._tracks.items()
            if track.probe.required or track.saturation is not None
        }

    async def close(self) -> None:
        """Close every connection; a second call does nothing."""
        for source in self._sources:
            await source.close()

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()

    async def _observe(self, track: Track) -> None:
        try:
            async with asyncio.timeout(self.interval_s):
                sample = await track.probe.sample()
        except ProbeOverloadedError as error:
            track.overload(str(error))
        except ProbeMissingError as error:
            track.miss(str(error))
        except (TimeoutError, OSError) as error:
            track.overload(f"no answer: {type(error).__name__}")
        except Exception as error:  # noqa: BLE001 - a probe may be anybody's; the others go on
            # Its type only: the message of an unknown error may carry a password.
            track.miss(f"failed: {type(error).__name__}")
        else:
            track.take(sample, now_s=self._clock())


def _check(probe: Probe) -> None:
    if not (math.isfinite(probe.target) and probe.target > 0):
        raise ValueError(f"{probe.name}: the target must be above 0, not {probe.target:g}")
    if not probe.low <= probe.high:
        raise ValueError(f"{probe.name}: {probe.low:g}..{probe.high:g} is no range")
    if not probe.ttl_s > 0:
        raise ValueError(f"{probe.name}: ttl_s must be above 0, not {probe.ttl_s:g}")


def _sources(probes: Sequence[Probe]) -> Iterator[Source]:
    for probe in probes:
        source: Source | None = getattr(probe, "source", None)
        if source is not None:
            yield source
