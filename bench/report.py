"""Results: kept as JSON with every raw run, shown as tables and pictures.

`python -m bench report DIR` writes the tables of DIR's JSON files into docs/benchmarks.md, and the pictures beside it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import show

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"


@dataclass(frozen=True, slots=True)
class Result:
    """What one part measured: every run, and under which circumstances."""

    part: str
    options: dict[str, Any]
    runs: list[dict[str, Any]]
    facts: dict[str, str]
    when: str


@dataclass(frozen=True, slots=True)
class View:
    """A result as a person sees it."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    picture: str  # SVG
    notes: list[str]


def succeeded(result: Result) -> list[dict[str, Any]]:
    """Answer the runs that have figures."""
    return [run for run in result.runs if "error" not in run]


def failures(result: Result) -> list[str]:
    """Say which runs have none, and why, in a line each."""
    return [
        f"{run['title']} failed: {run['error'].strip().splitlines()[-1]}"
        for run in result.runs
        if "error" in run
    ]


def save(result: Result, view: View, out: Path) -> None:
    """Write PART.json and PART.svg."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {
            "part": result.part,
            "when": result.when,
            "options": result.options,
            "facts": result.facts,
            "runs": result.runs,
        },
        indent=1,
    )
    (out / f"{result.part}.json").write_text(text + "\n")
    (out / f"{result.part}.svg").write_text(view.picture)


def load(path: Path) -> Result:
    """Read a PART.json."""
    return Result(**json.loads(path.read_text()))


def write_document(views: dict[str, tuple[Result, View]], document: Path = DOCUMENT) -> None:
    """Put each part's table between its marks in the document, and its picture in `pictures` beside it."""
    text = document.read_text()
    pictures = document.with_name("pictures")
    pictures.mkdir(exist_ok=True)
    for part, (result, view) in views.items():
        begin, end = f"<!-- {part} -->", f"<!-- /{part} -->"
        if begin not in text:
            continue
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        facts = "; ".join(f"{name} {value}" for name, value in result.facts.items())
        options = ", ".join(f"{name} {value}" for name, value in result.options.items())
        notes = "".join(f"\n{note}" for note in view.notes)
        body = f"{show.markdown(view.columns, view.rows)}\n{notes}\n\n{result.when}. {options}. {facts}.\n"
        text = f"{before}{begin}\n{body}{end}{after}"
        (pictures / f"{part}.svg").write_text(view.picture)
    document.write_text(text)
