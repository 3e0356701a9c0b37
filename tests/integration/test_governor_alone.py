"""The governor is of use without the service: it imports nothing of it, and its example runs."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[2] / "README.md"
SECTION = "## The governor, for any asyncio program"

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("expiry", "arq"):
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Blocked())
import importlib, pkgutil, governor
for module in pkgutil.walk_packages(governor.__path__, "governor."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert all(hasattr(governor, name) for name in governor.__all__)
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("expiry", "arq")))
"""


def test_the_governor_imports_nothing_of_the_service() -> None:
    """All of it, in an interpreter that has neither the service nor what only that needs."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], check=False, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def example() -> str:
    """Return the first example of the section."""
    section = GUIDE.read_text(encoding="utf-8").partition(SECTION)[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found
    return found[1]


def test_the_example_is_fifteen_lines() -> None:
    """As promised: what is longer is not read."""
    assert len([line for line in example().splitlines() if line.strip()]) <= 15


async def test_the_example_runs(database_url: str) -> None:
    """On PostgreSQL alone: it creates what it needs, leads, and lets work through."""
    names: dict[str, Any] = {}
    exec(compile(example(), str(GUIDE), "exec"), names)  # noqa: S102 - our own guide
    done = 0

    async def work() -> None:
        nonlocal done
        done += 1
        if done == 3:
            stop.set()

    stop = asyncio.Event()
    async with asyncio.timeout(20):
        await names["main"](database_url, work, stop)
    assert done == 3
