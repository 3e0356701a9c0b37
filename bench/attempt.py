"""One contender that fails must not cost the others their figures."""

import subprocess
from collections.abc import Awaitable
from typing import Any

from bench.contenders import Contender
from bench.figures import figure
from bench.options import Options


async def attempt(contender: Contender, run: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Answer what the run measured, with the contender's names; or why there is no figure."""
    names = {"contender": contender.name, "title": contender.title, "settings": contender.settings}
    try:
        return names | await run
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return names | {"error": str(error)}


def progress(
    part: str, number: int, options: Options, run: dict[str, Any], key: str, unit: str, beside: str = ""
) -> None:
    """Print a line for a run that has ended."""
    said = run["error"] if "error" in run else f"{figure(run[key])} {unit}  {beside}"
    print(f"{part} {number}/{options.runs}  {run['title']}: {said}", flush=True)
