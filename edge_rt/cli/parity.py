"""`edge-rt parity`: do two bundles say the same?"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from edge_rt.cli.output import Commands, add_command, finish, positive, say

DEFAULT_PROMPTS = 16
DEFAULT_PROMPT_TOKENS = 48
DEFAULT_MAX_TOKENS = 32


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(
        commands, "parity", "Compare what two bundles of one checkpoint compute.", run
    )
    parser.add_argument("first", type=Path, metavar="BUNDLE_A")
    parser.add_argument("second", type=Path, metavar="BUNDLE_B")
    for option, default, what in (
        ("--prompts", DEFAULT_PROMPTS, "passages of the held-out text"),
        ("--prompt-tokens", DEFAULT_PROMPT_TOKENS, "tokens of each"),
        ("--max-tokens", DEFAULT_MAX_TOKENS, "new tokens of each"),
    ):
        parser.add_argument(
            option, type=positive, default=default, metavar="N", help=f"{what} (default {default})"
        )


def run(options: argparse.Namespace) -> int:
    """Compare and report; bundles that differ are no failure of the work."""
    from edge_rt.bench import parity, workloads
    from edge_rt.bundle import Bundle
    from edge_rt.runtime.engines import open_engine
    from edge_rt.tokenizer import Tokenizer

    bundles = [Bundle.load(path) for path in (options.first, options.second)]
    tokenizer = Tokenizer.load(options.first)
    prompts = workloads.held_out_prompts(tokenizer, options.prompts, options.prompt_tokens)
    with ExitStack() as stack:
        engines = []
        for bundle in bundles:
            engines.append(open_engine(bundle))
            stack.callback(engines[-1].close)
        found = parity.compare(engines[0], engines[1], prompts, options.max_tokens)
    say(
        options,
        f"{found.positions} positions: same likeliest token at "
        f"{100 * found.top1_agreement:.1f} %, {found.disagreements} differ beyond a near-tie; "
        f"mean KL {found.mean_kl:.2g}, largest logit difference {found.max_abs_logit_diff:.2g}",
    )
    say(
        options,
        f"left to themselves: {found.identical_prompts} of {found.prompts} prompts continued "
        f"alike, {found.same_tokens} of {found.tokens} tokens before the first difference",
    )
    finish(
        options,
        {"first": str(options.first), "second": str(options.second), **asdict(found)},
    )
    return 0
