"""README's tables are made from the code: `python tests/unit/test_readme.py` writes them anew."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from pydantic import SecretStr
from pydantic_settings import BaseSettings

import expiry.service  # noqa: F401 - imports every module that declares a metric
from expiry.settings import Settings
from governor import GovernorSettings

README = Path(__file__).parents[2] / "README.md"
BOUNDS = {"ge": "≥ ", "gt": "> ", "le": "≤ "}


def settings_rows() -> Iterator[str]:
    """Say each setting as a row of the table."""
    yield "| variable | default | range | meaning |"
    yield "|---|---|---|---|"
    classes: list[type[BaseSettings]] = [Settings, GovernorSettings]
    for cls in classes:
        prefix = cls.model_config.get("env_prefix", "")
        for name, field in cls.model_fields.items():
            default = field.default
            if isinstance(default, SecretStr):
                default = default.get_secret_value()
            shown = (
                "unset" if default is None else str(default).lower() if default in (True, False) else default
            )
            bounds = [
                f"{sign}{getattr(m, key):,}"
                for m in field.metadata
                for key, sign in BOUNDS.items()
                if hasattr(m, key)
            ]
            yield f"| `{prefix}{name.upper()}` | `{shown}` | {', '.join(bounds)} | {field.description} |"


def metric_rows() -> Iterator[str]:
    """Say each metric as a row of the table."""
    yield "| metric | labels | meaning |"
    yield "|---|---|---|"
    collectors = {id(c): c for c in REGISTRY._collector_to_names}  # noqa: SLF001 - no public list
    rows = []
    for collector in collectors.values():
        for family in collector.collect():
            if family.name.startswith(("expiry_", "governor_")):
                suffix = "_total" if family.type == "counter" else ""
                labels = ", ".join(getattr(collector, "_labelnames", ()))
                rows.append(f"| `{family.name}{suffix}` | {labels} | {family.documentation} |")
    yield from sorted(rows)


TABLES = {"settings": settings_rows, "metrics": metric_rows}


def section(text: str, name: str) -> str:
    """Answer what README has between the marks of this table."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", text, re.DOTALL)
    assert found, f"README lost the marks of the {name} table"
    return found[1]


@pytest.mark.parametrize("name", TABLES)
def test_readme_says_what_the_code_says(name: str) -> None:
    """README lists exactly the settings and metrics that there are."""
    assert section(README.read_text(encoding="utf-8"), name).splitlines() == list(TABLES[name]())


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    for name, rows in TABLES.items():
        old = section(text, name)
        text = text.replace(f"<!-- {name} -->\n{old}\n", f"<!-- {name} -->\n" + "\n".join(rows()) + "\n")
    README.write_text(text, encoding="utf-8")
