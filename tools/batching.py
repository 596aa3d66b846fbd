"""In-flight batching against static batching, under the same random arrivals, on one engine.

    python tools/batching.py BUNDLE --json batching.json

First the engine's throughput with all requests at once, then rounds of Poisson arrivals at a share
of it, answered in flight and in static batches of the bundle's max_batch. A round takes twice as
long as the requests take to arrive: half a minute for the demo and 200 samples.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import command
import numpy as np
from command import progress

from edge_rt.bench import arrivals, conditions, report, workloads
from edge_rt.bundle import Bundle
from edge_rt.cli.output import positive
from edge_rt.loop import Loop
from edge_rt.runtime.engines import open_engine
from edge_rt.tokenizer import Tokenizer

FEWEST_TOKENS = 8
AT_ONCE = 1e9  # requests a second


def share(text: str) -> float:
    """An argparse type: more than 0, at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 and at most 1")
    return value


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of both ways, each first in every other round; medians over the rounds."""
    bundle = Bundle.load(options.bundle)
    max_batch = bundle.manifest.recipe.max_batch
    prompts = workloads.held_out_prompts(
        Tokenizer.load(options.bundle), options.samples, options.prompt_tokens
    )
    most = FEWEST_TOKENS + options.more_tokens
    rng = np.random.default_rng(options.seed)
    lengths = rng.integers(FEWEST_TOKENS, most + 1, options.samples).tolist()
    warnings = conditions.warnings()
    loop = Loop(open_engine(bundle))

    def served(rate_per_s: float, static_batch: int | None) -> dict[str, Any]:
        plan = arrivals.poisson(prompts, lengths, rate_per_s, options.seed)
        return report.summarize(arrivals.serve(loop, plan, static_batch))

    ways: dict[str, int | None] = {"in_flight": None, "static": max_batch}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    try:
        served(AT_ONCE, None)  # to warm up
        offline = served(AT_ONCE, None)
        rate_per_s = options.load * offline["samples_per_s"]
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
                rounds[name].append(served(rate_per_s, ways[name]))
    finally:
        loop.close()
    return {
        "engine": bundle.manifest.recipe.engine,
        "max_batch": max_batch,
        "samples": options.samples,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": [FEWEST_TOKENS, most],
        "warnings": warnings,
        "offline": offline,
        "load": options.load,
        "rate_per_s": rate_per_s,
        "rounds": rounds,
        **{name: _medians(found) for name, found in rounds.items()},
    }


def _medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    numbers = [key for key, value in rounds[0].items() if isinstance(value, int | float)]
    return {key: statistics.median(found[key] for found in rounds) for key in numbers}


def main() -> None:
    """Measure, and write one JSON object to stdout or to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--samples", type=positive, default=200, help="of a round (default 200)")
    parser.add_argument("--rounds", type=positive, default=4, help="(default 4)")
    parser.add_argument("--prompt-tokens", type=positive, default=32, help="(default 32)")
    parser.add_argument(
        "--more-tokens",
        type=positive,
        default=88,
        help=f"new tokens are {FEWEST_TOKENS} and up to so many more, evenly (default 88)",
    )
    parser.add_argument("--load", type=share, default=0.7, help="of the throughput (default 0.7)")
    parser.add_argument("--seed", type=int, default=0)
    command.run(parser, measure)


if __name__ == "__main__":
    main()
