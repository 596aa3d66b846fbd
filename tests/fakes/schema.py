"""The JSON schema of docs/telemetry.md, closed: a field that it does not describe is a fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

PAGE = Path(__file__).parents[2] / "docs" / "telemetry.md"
ENVELOPE = {"type": "object"}


def schemas() -> dict[str, dict[str, Any]]:
    """By the last part of a topic."""
    text = PAGE.read_text(encoding="utf-8").partition("```json\n")[2].partition("```")[0]
    found: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(found)
    return {name: one | {"additionalProperties": False} for name, one in found["$defs"].items()}


def check(topic: str, payload: dict[str, Any]) -> None:
    """ValidationError if a message is not as the page says."""
    jsonschema.validate(payload, schemas()[topic.rpartition("/")[2]])
