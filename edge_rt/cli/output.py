"""What commands print: text for people, or one JSON object with `--json`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from edge_rt.errors import ConfigError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001
Run = Callable[[argparse.Namespace], int]

STDOUT = "-"


def add_command(commands: Commands, name: str, summary: str, run: Run) -> argparse.ArgumentParser:
    """A command's parser, with the option that all commands share."""
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write one JSON object to FILE, or to stdout instead of text if there is no FILE; "
        "give it last, or as --json=FILE",
    )
    parser.set_defaults(run=run)
    return parser


def positive(text: str) -> int:
    """An argparse type: a whole number of 1 or more."""
    if text.isascii() and text.isdigit() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")


def say(options: argparse.Namespace, line: str = "", end: str = "\n") -> None:
    """A line for people; nothing when stdout carries JSON."""
    if options.json != STDOUT:
        sys.stdout.write(line + end)
        sys.stdout.flush()


def can_write(file: Path) -> bool:
    """Whether a file can be written there: a new one, or over one that is there."""
    return not file.is_dir() and os.access(file if file.exists() else file.parent, os.W_OK)


def check_json_target(options: argparse.Namespace) -> None:
    """ConfigError for a --json FILE that cannot be written: before the work, not after it."""
    if options.json in {None, STDOUT}:
        return
    file = Path(options.json)
    if not can_write(file):
        raise ConfigError(
            f"--json: '{file}' cannot be written; name a file in a directory of yours"
        )


def finish(options: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Write the command's JSON object, where it was asked for."""
    if options.json is None:
        return
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if options.json == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(options.json).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{options.json} cannot be written: {error.strerror}") from error
