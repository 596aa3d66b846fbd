"""In-flight batching against static batching, under the same random arrivals, on one engine.

    python tools/batching.py BUNDLE --json batching.json

First the engine's throughput with all requests at once, then Poisson arrivals at a share of it,
first answered in flight, then in static batches of the bundle's max_batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from origin import cpu_facts, origin

from edge_rt.bench import arrivals, conditions, report, workloads
from edge_rt.bundle import Bundle
from edge_rt.cli.output import STDOUT, finish
from edge_rt.loop import Loop
from edge_rt.runtime.engines import open_engine
from edge_rt.tokenizer import Tokenizer


def main() -> None:
    """Measure, and write one JSON object to stdout or to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--most-tokens", type=int, default=96, help="new tokens: 8 to this, evenly")
    parser.add_argument("--load", type=float, default=0.7, help="share of the throughput")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", nargs="?", const=STDOUT, default=STDOUT, metavar="FILE")
    options = parser.parse_args()
    bundle = Bundle.load(options.bundle)
    max_batch = bundle.manifest.recipe.max_batch
    prompts = workloads.held_out_prompts(
        Tokenizer.load(options.bundle), options.samples, options.prompt_tokens
    )
    rng = np.random.default_rng(options.seed)
    lengths = rng.integers(8, options.most_tokens + 1, options.samples).tolist()
    loop = Loop(open_engine(bundle))

    def measure(rate_per_s: float, static_batch: int | None) -> dict[str, Any]:
        plan = arrivals.poisson(prompts, lengths, rate_per_s, options.seed)
        return report.summarize(arrivals.serve(loop, plan, static_batch))

    warnings = conditions.warnings()
    try:
        measure(1e9, None)  # to warm up
        most = measure(1e9, None)
        rate_per_s = options.load * most["samples_per_s"]
        found = {
            "engine": bundle.manifest.recipe.engine,
            "max_batch": max_batch,
            "samples": options.samples,
            "prompt_tokens": options.prompt_tokens,
            "new_tokens": [8, options.most_tokens],
            "warnings": warnings,
            "offline": most,
            "load": options.load,
            "rate_per_s": rate_per_s,
            "in_flight": measure(rate_per_s, None),
            "static": measure(rate_per_s, max_batch),
        }
    finally:
        loop.close()
    finish(options, {**origin(cpu_facts(), ["onnxruntime"]), **found})


if __name__ == "__main__":
    main()
