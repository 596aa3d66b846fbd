"""`edge-rt serve`: the daemon in the foreground."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from edge_rt.cli.output import Commands, add_command, positive


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(commands, "serve", "Serve a bundle over HTTP, as OpenAI's API.", run)
    parser.add_argument("--bundle", type=Path, required=True, metavar="BUNDLE")
    parser.add_argument("--host", default="127.0.0.1", metavar="H")
    parser.add_argument("--port", type=positive, default=8000, metavar="P")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM."""
    from edge_rt.serve.daemon import ServeOptions, serve

    return asyncio.run(serve(ServeOptions(options.bundle, options.host, options.port)))
