"""`edge-rt demo`: the whole chain on the shipped checkpoint, from FP16 weights to tokens."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from edge_rt import recipes
from edge_rt.cli import bench, generate, verify
from edge_rt.cli.cache import cache_dir
from edge_rt.cli.output import Commands, add_command, finish, say
from edge_rt.core import SamplingParams

QUANT_RECIPE = "demo"
ENGINE_RECIPE = "demo.cpu"
PROMPTS = (
    "The following example shows how to",
    "def read_file(path",
    "The SELECT statement",
    "Return the number of",
)
MAX_TOKENS = 32
SAMPLES = 64  # of each scenario


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(
        commands,
        "demo",
        "Quantize, build, verify, generate and measure with the shipped demo checkpoint.",
        run,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=cache_dir(),
        metavar="DIR",
        help="where the quantized checkpoint and the bundle go (default %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Run the chain and report each stage."""
    from edge_rt.bench import conditions
    from edge_rt.build.bundle import build
    from edge_rt.quant.pipeline import quantize

    started = time.monotonic()
    warnings = conditions.warnings()  # later the demo itself is the load
    checkpoint = recipes.data_dir("engines") / "demo"
    quantized, bundle = options.out / "demo.quantized", options.out / "demo.bundle"

    say(options, "1. quantize the shipped demo checkpoint to INT4")
    info = quantize(checkpoint, quantized, QUANT_RECIPE)
    fraction = info.quantization.fp16_fraction
    say(options, f"   {100 * fraction:.2f} % of the layers' weights stay in FP16")
    say(options, f"2. build   {bundle}")
    build(quantized, ENGINE_RECIPE, bundle)
    say(options, "3. verify  against the float32 reference's golden logits")
    verified = verify.verify(bundle)
    golden = verified["golden"]
    limit = verified["tolerance"]["mean_kl"]
    say(
        options,
        f"   passed: mean KL {golden['mean_kl']:.2g} (limit {limit:g}) "
        f"at {golden['positions']} positions",
    )
    say(options, f"4. generate for {len(PROMPTS)} prompts in one batch")
    found = generate.generate(bundle, list(PROMPTS), SamplingParams(MAX_TOKENS))
    completions = [(prompted, prompted.choices.rows[0]) for prompted in found]
    for number, (prompted, choice) in enumerate(completions, start=1):
        say(options, f"   prompt {number}: {prompted.prompt}")
        for line in (prompted.prompt + choice.text).splitlines():
            say(options, f"   | {line}".rstrip())
    say(options, "5. measure")
    measured = _measure(bundle, warnings)
    for result in measured.values():
        for line in bench.lines(result):
            say(options, f"   {line}")
    seconds = time.monotonic() - started
    command = f"{sys.executable} -m edge_rt" if Path(sys.argv[0]).name != "edge-rt" else sys.argv[0]
    say(options, f"The demo took {seconds:.1f} s. Next, for instance:")
    say(options, f"{command} generate {bundle} --prompt 'import os'")
    finish(
        options,
        {
            "bundle": str(bundle),
            "fp16_fraction": info.quantization.fp16_fraction,
            "golden": golden,
            "completions": [prompted.table(choice) for prompted, choice in completions],
            "bench": measured,
            "duration_s": seconds,
        },
    )
    return 0


def _measure(bundle: Path, warnings: list[str]) -> dict[str, Any]:
    return {
        scenario: bench.measure(
            scenario,
            bundle,
            samples=SAMPLES,
            prompt_tokens=bench.DEFAULT_PROMPT_TOKENS,
            max_tokens=bench.DEFAULT_MAX_TOKENS,
            warnings=warnings,
        )
        for scenario in bench.SCENARIOS
    }
