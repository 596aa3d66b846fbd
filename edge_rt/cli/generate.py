"""`edge-rt generate`: continue prompts, several at once in one batch."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edge_rt.choice import Choice, Choices
from edge_rt.cli.output import Commands, add_command, finish, positive, say
from edge_rt.core import FinishReason, Request, SamplingParams, TokenEvent
from edge_rt.errors import ConfigError, RequestError
from edge_rt.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = SamplingParams().max_tokens

OnText = Callable[[str], None]


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(
        commands, "generate", "Continue prompts, greedily or at a temperature.", run
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT",
        help="give it several times to continue several prompts in one batch",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"new tokens for each prompt at most (default {DEFAULT_MAX_TOKENS})",
    )
    default = SamplingParams()
    for option, kind, value, what in (
        ("--temperature", float, default.temperature, "0 takes the likeliest token"),
        ("--top-k", int, default.top_k, "draw from so many of the likeliest; 0: from all"),
        ("--top-p", float, default.top_p, "draw from the likeliest of that much probability"),
        ("--min-p", float, default.min_p, "leave out what is that much less likely than the first"),
        ("--repetition-penalty", float, default.repetition_penalty, "1 penalizes nothing"),
        ("--seed", int, default.seed, "of what is drawn"),
    ):
        parser.add_argument(
            option, type=kind, default=value, metavar="X", help=f"{what} (default {value:g})"
        )
    parser.add_argument(
        "--n",
        type=positive,
        default=1,
        metavar="N",
        help="continuations of each prompt to show (default 1); the recipe's max_rows is the most",
    )
    parser.add_argument(
        "--best-of",
        type=positive,
        metavar="N",
        help="continue each prompt so often, and show the --n of the highest log-probability per "
        "token, best first (default: as --n)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )


def run(options: argparse.Namespace) -> int:
    """Generate; a single continuation's text is printed as it comes."""
    best_of = options.best_of or options.n
    if best_of < options.n:
        raise ConfigError(
            f"--best-of {best_of} is less than --n {options.n}; continue at least as often as you "
            f"want to see"
        )
    if best_of > 1 and options.temperature == 0:
        raise ConfigError("at temperature 0 all continuations are alike; give --temperature")
    alone = len(options.prompt) == best_of == 1
    unsaid = options.prompt[0]

    def on_text(piece: str) -> None:
        nonlocal unsaid
        if alone:
            say(options, unsaid + piece, end="")
            unsaid = ""

    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        logprobs=0 if best_of > options.n else None,
    )
    requests = generate(
        options.bundle, options.prompt, sampling, options.stop, best_of, on_text=on_text
    )
    if alone:
        say(options)
    completions = []
    for number, request in enumerate(requests, start=1):
        for choice in request.choices.best(options.n):
            completions.append(request.table(choice))
            if not alone:
                of_it = f", continuation {choice.row + 1} of {best_of}" if best_of > 1 else ""
                say(options, f"--- prompt {number} of {len(requests)}{of_it}")
                say(options, request.prompt + choice.text)
    finish(options, {"completions": completions})
    return 0


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt and what it was continued with."""

    prompt: str
    submitted_ns: int
    choices: Choices

    def table(self, choice: Choice) -> dict[str, Any]:
        """One of its continuations as JSON."""
        assert choice.finish is not None
        assert choice.ended_ns is not None
        first_ns = choice.first_token_ns
        found: dict[str, Any] = {
            "prompt": self.prompt,
            "text": choice.text,
            "tokens": len(choice.tokens),
            "finish_reason": choice.finish.value,
            "ttft_ms": None if first_ns is None else (first_ns - self.submitted_ns) * 1e-6,
            "latency_ms": (choice.ended_ns - self.submitted_ns) * 1e-6,
        }
        if len(self.choices.rows) > 1:
            found["continuation"] = choice.row + 1
        if math.isfinite(choice.mean_logprob):
            found["logprob_per_token"] = choice.mean_logprob
        return found


def generate(
    path: Path,
    prompts: list[str],
    sampling: SamplingParams,
    stop: Sequence[str] = (),
    rows: int = 1,
    *,
    on_text: OnText = lambda _piece: None,
) -> list[Prompted]:
    """Continue all prompts at once, each `rows` times; EngineError if the engine fails in one.

    The model's end-of-text token is added to the stop tokens.
    """
    from edge_rt.bundle import Bundle
    from edge_rt.loop import Loop
    from edge_rt.runtime.engines import open_engine

    bundle = Bundle.load(path)
    tokenizer = Tokenizer.load(path)
    eos = bundle.manifest.model.eos_token_id
    if eos is not None:
        sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids | {eos})
    loop = Loop(open_engine(bundle))
    unread: list[OSError] = []

    def show(choices: Choices, event: TokenEvent) -> None:
        text = "".join(piece for _, piece in choices.take(event))
        try:
            on_text("" if unread else text)
        except OSError as error:  # nobody reads any more: kept until the loop is left
            unread.append(error)

    found = []
    try:
        for index, prompt in enumerate(prompts):
            tokens = tuple(tokenizer.encode(prompt))
            if not tokens:
                raise RequestError(f"prompt {index + 1} of {len(prompts)} is empty")
            name = f"prompt-{index}"
            on_stop = partial(loop.cancel, name, finish=FinishReason.STOP)
            choices = Choices(tokenizer, stop, rows, on_stop)
            found.append(Prompted(prompt, time.monotonic_ns(), choices))
            loop.submit(Request(name, tokens, sampling, rows), partial(show, choices))
        while loop.step() is not None and not unread:
            pass
    finally:
        loop.close()
    if unread:
        raise unread[0]
    for prompted in found:
        prompted.choices.check()
    return found
