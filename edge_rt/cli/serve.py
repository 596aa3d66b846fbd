"""`edge-rt serve`: the daemon in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from functools import partial
from pathlib import Path

from edge_rt.cli.output import Commands, add_command, finish


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(commands, "serve", "Serve a bundle over HTTP, as OpenAI's API.", run)
    parser.add_argument("--bundle", type=Path, required=True, metavar="BUNDLE")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML")
    parser.add_argument("--host", metavar="H", help="instead of the settings' (127.0.0.1)")
    parser.add_argument("--port", type=int, metavar="P", help="instead of the settings' (8000)")
    parser.add_argument(
        "--board",
        choices=("auto", "none"),
        help="whether the machine's sensors are read; instead of the settings' (auto)",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there are settings to be read again
    from edge_rt.serve import settings
    from edge_rt.serve.daemon import Daemon

    def say_ready(where: str, model: str) -> None:
        finish(options, {"url": where, "model": model})
        sys.stdout.flush()

    read = partial(
        settings.load, options.config, options.board, host=options.host, port=options.port
    )
    return asyncio.run(Daemon(options.bundle, read, say_ready).serve())
