"""`edge-rt quantize`: a Hugging Face checkpoint -> a quantized checkpoint."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from edge_rt.cli.output import Commands, add_command, finish, say

DEFAULT_RECIPE = "int4-salient"


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(
        commands, "quantize", "Quantize a Hugging Face GPT-J checkpoint to INT4.", run
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its directory")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--recipe",
        default=DEFAULT_RECIPE,
        metavar="NAME|FILE",
        help=f"a recipe of calib/ or a .toml file (default {DEFAULT_RECIPE})",
    )


def run(options: argparse.Namespace) -> int:
    """Quantize and report."""
    from edge_rt.quant.pipeline import quantize

    started = time.monotonic()
    info = quantize(options.checkpoint, options.out, options.recipe)
    seconds = time.monotonic() - started
    done = info.quantization
    size_bytes = sum(entry.size_bytes for entry in info.files.values())
    how = (
        "not quantized"
        if done.group_size is None
        else f"INT4 in groups of {done.group_size}, "
        f"{100 * done.fp16_fraction:.2f} % of the layers' weights in FP16"
    )
    say(options, f"{options.out}: {how}; {size_bytes / 1e6:.1f} MB, {seconds:.1f} s")
    finish(
        options,
        {
            "out": str(options.out),
            "recipe": done.recipe,
            "method": done.method,
            "bits": done.bits,
            "group_size": done.group_size,
            "fp16_fraction": done.fp16_fraction,
            "size_bytes": size_bytes,
            "calibration_sha256": done.calibration_sha256,
            "duration_s": seconds,
        },
    )
    return 0
