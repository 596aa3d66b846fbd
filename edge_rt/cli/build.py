"""`edge-rt build`: a quantized checkpoint -> a bundle for one engine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from edge_rt.cli.output import Commands, add_command, finish, say


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(commands, "build", "Build a bundle from a quantized checkpoint.", run)
    parser.add_argument("quantized", type=Path, metavar="QUANTIZED", help="its directory")
    parser.add_argument(
        "--recipe",
        required=True,
        metavar="NAME|FILE",
        help="a recipe of engines/ or a .toml file",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLE")


def run(options: argparse.Namespace) -> int:
    """Build and report."""
    from edge_rt.build.bundle import build

    started = time.monotonic()
    manifest = build(options.quantized, options.recipe, options.out)
    seconds = time.monotonic() - started
    size_bytes = sum(entry.size_bytes for entry in manifest.files.values())
    recipe = manifest.recipe
    say(
        options,
        f"{options.out}: engine {recipe.engine}, {size_bytes / 1e6:.1f} MB, "
        f"{recipe.max_batch} requests of {recipe.max_context} tokens, {seconds:.1f} s",
    )
    finish(
        options,
        {
            "out": str(options.out),
            "engine": recipe.engine,
            "size_bytes": size_bytes,
            "max_batch": recipe.max_batch,
            "max_context_tokens": recipe.max_context,
            "duration_s": seconds,
        },
    )
    return 0
