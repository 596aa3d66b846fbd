"""`edge-rt serve`: the daemon in the foreground."""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from pathlib import Path

from edge_rt.cli.output import Commands, add_command


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(commands, "serve", "Serve a bundle over HTTP, as OpenAI's API.", run)
    parser.add_argument("--bundle", type=Path, required=True, metavar="BUNDLE")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML")
    parser.add_argument("--host", metavar="H", help="instead of the settings' (127.0.0.1)")
    parser.add_argument("--port", type=int, metavar="P", help="instead of the settings' (8000)")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM."""
    from edge_rt.serve import settings
    from edge_rt.serve.daemon import Daemon

    read = partial(settings.load, options.config, host=options.host, port=options.port)
    return asyncio.run(Daemon(options.bundle, read).serve())
