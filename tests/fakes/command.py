"""The command line in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_rt.cli import main


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    table: dict[str, Any] = json.loads(capsys.readouterr().out)
    return table
