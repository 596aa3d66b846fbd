"""What the small measuring tools share: their command line, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from origin import cpu_facts, origin

from edge_rt.cli.output import STDOUT, check_json_target, finish
from edge_rt.errors import ConfigError, EdgeRTError


def run(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Any]) -> None:
    """Measure, and write one JSON object with where it comes from; exit 1 or 2 with a message."""
    parser.add_argument("--json", nargs="?", const=STDOUT, default=STDOUT, metavar="FILE")
    options = parser.parse_args()
    try:
        check_json_target(options)
        found = measure(options)
        finish(options, {**origin(cpu_facts(), ["onnxruntime"]), **found})
    except EdgeRTError as error:
        parser.exit(2 if isinstance(error, ConfigError) else 1, f"{parser.prog}: {error}\n")


def progress(line: str) -> None:
    """A line on stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
