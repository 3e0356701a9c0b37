"""Enqueue the holds of the run's database as a contender's users do."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

from bench.contenders import Contender
from bench.stage import Stage

FILL_S_MAX = 300


async def fill(
    stage: Stage, contender: Contender, *, start_ms: int | None = None, holds: Path | None = None
) -> dict[str, Any]:
    """Run the contender's enqueueing program to its end; answer how many it enqueued in how many seconds.

    `start_ms`: when those are to begin that begin by score. `holds`: their file, if it is there already.
    """
    env = stage.env | contender.env | ({"START_MS": str(start_ms)} if start_ms else {})
    command = [*contender.filling(), str(holds or await stage.holds_file())]
    ended = await asyncio.to_thread(
        subprocess.run, command, env=env, capture_output=True, text=True, timeout=FILL_S_MAX, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{contender.name} could not enqueue: {ended.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return said
