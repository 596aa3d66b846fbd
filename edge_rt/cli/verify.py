"""`edge-rt verify`: is a bundle whole, and does its engine compute what the reference computed?"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_rt.cli.output import Commands, add_command, finish, say


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(
        commands, "verify", "Check a bundle's files and its engine's golden logits.", run
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")


def run(options: argparse.Namespace) -> int:
    """Check; an error names the first mismatch."""
    result = verify(options.bundle)
    golden, tolerance = result["golden"], result["tolerance"]
    say(options, f"{options.bundle}: every file matches the manifest ({result['files']})")
    if golden is None:
        say(options, f"engine {result['engine']} computes nothing, so there are no golden logits")
    else:
        say(
            options,
            f"golden logits match at {golden['positions']} positions: largest difference "
            f"{golden['max_abs_logit_diff']:.2g} (limit {tolerance['max_abs_logit_diff']:g}), "
            f"mean KL {golden['mean_kl']:.2g} (limit {tolerance['mean_kl']:g}), "
            f"same token {100 * golden['top1_agreement']:.0f} %",
        )
    finish(options, {"bundle": str(options.bundle), **result})
    return 0


def verify(path: Path) -> dict[str, Any]:
    """The checks themselves; raises BundleError or EngineError at the first mismatch."""
    from edge_rt.bundle import Bundle
    from edge_rt.runtime import selfcheck
    from edge_rt.runtime.engines import open_engine
    from edge_rt.tokenizer import Tokenizer

    bundle = Bundle.load(path)
    bundle.check_files()
    Tokenizer.load(path)
    engine = open_engine(bundle)
    tolerance = bundle.manifest.tolerance
    try:
        golden = selfcheck.check(engine, bundle)
    finally:
        engine.close()
    return {
        "engine": bundle.manifest.recipe.engine,
        "files": len(bundle.manifest.files),
        "golden": None if golden is None else asdict(golden),
        "tolerance": None if tolerance is None else asdict(tolerance),
    }
