"""`edge-rt quantize`: a Hugging Face checkpoint -> a quantized checkpoint."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from edge_rt.cli.output import Commands, add_command, finish, say

DEFAULT_RECIPE = "int4"


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(
        commands, "quantize", "Quantize a Hugging Face GPT-J checkpoint to INT4.", run
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its directory")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        help=f"a recipe of calib/ or a .toml file (default {DEFAULT_RECIPE})",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the arithmetic runs: cpu (NumPy) or cuda (torch) (default cpu)",
    )


def run(options: argparse.Namespace) -> int:
    """Quantize and report."""
    from edge_rt.quant.page import PAGE_FILE
    from edge_rt.quant.pipeline import LayerRun, quantize
    from edge_rt.quant.store import IMPORTED

    started = time.monotonic()
    runs: list[LayerRun] = []
    recipe = options.recipe or DEFAULT_RECIPE
    info = quantize(options.checkpoint, options.out, recipe, options.device, runs.append)
    seconds = time.monotonic() - started
    done = info.quantization
    size_bytes = sum(entry.size_bytes for entry in info.files.values())
    how = (
        "not quantized"
        if done.group_size is None
        else f"INT4 in groups of {done.group_size}, "
        f"{100 * done.fp16_fraction:.2f} % of the layers' weights in FP16"
    )
    if done.recipe == IMPORTED:
        how = f"taken over from {done.method.upper()} as it is: {how}"
        if options.recipe:
            say(options, f"recipe {options.recipe} was not used: the checkpoint is quantized")
    *layers, head = runs
    resumed = sum(layer.resumed for layer in layers)
    peak_bytes = max(run.peak_rss_bytes for run in runs)
    say(options, f"{options.out}: {how}; {size_bytes / 1e6:.1f} MB, {seconds:.1f} s")
    if resumed:
        say(options, f"{resumed} of {len(layers)} layers were there from a run that was cut short")
    say(options, f"at most {peak_bytes / 1e6:.0f} MB of memory at a time")
    if done.group_size is not None:
        say(options, f"how each layer fared: {options.out / PAGE_FILE}")
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
            "device": options.device,
            "peak_rss_bytes": peak_bytes,
            "layers": [asdict(layer) for layer in layers],
            "head": {"duration_s": head.duration_s, "peak_rss_bytes": head.peak_rss_bytes},
        },
    )
    return 0
