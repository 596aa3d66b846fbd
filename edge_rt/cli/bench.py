"""`edge-rt bench`: latency and throughput of a bundle."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from edge_rt.cli.output import Commands, add_command, finish, positive, say

DEFAULT_SAMPLES = 64
DEFAULT_PROMPT_TOKENS = 64
DEFAULT_MAX_TOKENS = 32
SCENARIOS = ("single-stream", "offline")


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(commands, "bench", "Measure a bundle's latency or throughput.", run)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    for option, default, what in (
        ("--samples", DEFAULT_SAMPLES, "requests"),
        ("--prompt-tokens", DEFAULT_PROMPT_TOKENS, "tokens of each prompt"),
        ("--max-tokens", DEFAULT_MAX_TOKENS, "new tokens of each request"),
    ):
        parser.add_argument(
            option, type=positive, default=default, metavar="N", help=f"{what} (default {default})"
        )


def run(options: argparse.Namespace) -> int:
    """Measure and report."""
    result = measure(
        options.scenario,
        options.bundle,
        samples=options.samples,
        prompt_tokens=options.prompt_tokens,
        max_tokens=options.max_tokens,
    )
    for line in lines(result):
        say(options, line)
    finish(options, result)
    return 0


def measure(
    scenario: str, path: Path, *, samples: int, prompt_tokens: int, max_tokens: int
) -> dict[str, Any]:
    """Run one scenario over a bundle, after one request to warm up."""
    from tqdm import tqdm

    from edge_rt.bench import report, timer, workloads
    from edge_rt.bundle import Bundle
    from edge_rt.loop import Loop
    from edge_rt.runtime.engines import open_engine
    from edge_rt.tokenizer import Tokenizer

    bundle = Bundle.load(path)
    prompts = workloads.held_out_prompts(Tokenizer.load(path), samples, prompt_tokens)
    loop = Loop(open_engine(bundle))
    try:
        timer.single_stream(loop, prompts[:1], max_tokens)
        measured = timer.single_stream if scenario == "single-stream" else timer.offline
        with tqdm(
            total=samples, desc=scenario, unit=" request", leave=False, disable=None
        ) as progress:
            table = report.summarize(measured(loop, prompts, max_tokens, progress.update))
    finally:
        loop.close()
    return {
        "scenario": scenario,
        "engine": bundle.manifest.recipe.engine,
        "max_batch": bundle.manifest.recipe.max_batch,
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        **table,
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    text = [
        (
            f"{result['scenario']}, engine {result['engine']}: {result['samples']} requests of "
            f"{result['prompt_tokens']} + {result['max_tokens']} tokens"
        ),
        (
            f"  latency     p50 {result['latency_ms_p50']:.1f} ms   "
            f"p90 {result['latency_ms_p90']:.1f} ms   p99 {result['latency_ms_p99']:.1f} ms"
        ),
        f"  first token p50 {result['ttft_ms_p50']:.1f} ms   p99 {result['ttft_ms_p99']:.1f} ms",
        (
            f"  throughput  {result['throughput_tok_s']:.0f} tokens/s   "
            f"{result['samples_per_s']:.2f} samples/s"
        ),
    ]
    if "tpot_ms_p50" in result:
        text.insert(3, f"  next token  p50 {result['tpot_ms_p50']:.2f} ms")
    return text + [f"  warning: {warning}" for warning in result["warnings"]]
