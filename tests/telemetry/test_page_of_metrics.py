"""docs/telemetry.md, section "Prometheus": its table is the page, row by row."""

from __future__ import annotations

import re
from pathlib import Path

from fakes.pages import full
from prometheus_client.core import Metric

from edge_rt.telemetry.prometheus import Exposition

PAGE = Path(__file__).parents[2] / "docs/telemetry.md"
SUFFIX = {"counter": "_total", "info": "_info"}


def row(family: Metric) -> str:
    """The family's name as queries have it, its type, its labels and its HELP text."""
    name = family.name + SUFFIX.get(family.type, "")
    labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {family.type} | {shown} | {family.documentation} |"


def test_the_table_is_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(r"^## Prometheus\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, "docs/telemetry.md has no section Prometheus"
    shown = re.findall(r"^\| `.*$", section[1], re.MULTILINE)
    assert shown == [row(family) for family in Exposition(full()).collect()]
