"""What the comments above the indexes of schema.sql name is there."""

from __future__ import annotations

import importlib
import re

from expiry import schema


def test_every_index_names_what_is_there() -> None:
    """Each index names a statement of a module or a function of ours, and both exist."""
    text = schema.read()
    wrong = []
    for comment, index in re.findall(
        r"((?:^-- .*\n)+)CREATE (?:UNIQUE )?INDEX IF NOT EXISTS (\w+)", text, re.MULTILINE
    ):
        for names, module in re.findall(r"((?:[A-Z_]+, )*[A-Z_]+) \((\w+)\.py\)", comment):
            wrong += [
                f"{index}: {name} is not in {module}.py"
                for name in names.split(", ")
                if not hasattr(importlib.import_module(f"expiry.{module}"), name)
            ]
        functions = re.findall(r"expiry_\w+", comment)
        wrong += [f"{index}: there is no {f}" for f in functions if f"FUNCTION {f}(" not in text]
        if not functions and not re.search(r"[A-Z_]{3,} \(", comment):
            wrong.append(f"{index} names no statement")
    assert wrong == []
