"""`edge-rt generate`: continue prompts, several at once in one batch."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from edge_rt.cli.output import Commands, add_command, finish, positive, say
from edge_rt.core import FinishReason, Request, SamplingParams, TokenEvent
from edge_rt.errors import EngineError, RequestError
from edge_rt.text import TextStream
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
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )


def run(options: argparse.Namespace) -> int:
    """Generate; a single prompt's text is printed as it comes."""
    alone = len(options.prompt) == 1
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
    )
    completions = generate(options.bundle, options.prompt, sampling, options.stop, on_text)
    if alone:
        say(options)
    else:
        for number, completion in enumerate(completions, start=1):
            say(options, f"--- prompt {number} of {len(completions)}")
            say(options, completion.prompt + completion.text)
    finish(options, {"completions": [completion.table() for completion in completions]})
    return 0


@dataclass(slots=True)
class Completion:
    """One prompt's continuation as its events come in."""

    prompt: str
    stream: TextStream
    submitted_ns: int
    on_text: OnText
    on_stop: Callable[[], None]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    first_token_ns: int = 0
    ended_ns: int = 0
    finish: FinishReason | None = None
    message: str = ""
    unread: OSError | None = None

    def on_event(self, event: TokenEvent) -> None:
        """Take one event of the loop."""
        piece, stopped = "", self.stream.stopped
        if event.token is not None and not stopped:
            self.first_token_ns = self.first_token_ns or time.monotonic_ns()
            self.tokens.append(event.token.id)
            piece = self.stream.push(event.token.id)
        if event.is_last:
            self.finish, self.message = event.finish, event.message
            self.ended_ns = time.monotonic_ns()
            piece += self.stream.finish()
        if self.stream.stopped and not stopped:
            if event.is_last:
                self.finish = FinishReason.STOP
            else:
                self.on_stop()
        self.text += piece
        if self.unread is None:
            try:
                self.on_text(piece)
            except OSError as error:  # nobody reads any more: kept until the loop is left
                self.unread = error

    def table(self) -> dict[str, Any]:
        """As JSON."""
        assert self.finish is not None
        return {
            "prompt": self.prompt,
            "text": self.text,
            "tokens": len(self.tokens),
            "finish_reason": self.finish.value,
            "ttft_ms": (self.first_token_ns - self.submitted_ns) * 1e-6 if self.tokens else None,
            "latency_ms": (self.ended_ns - self.submitted_ns) * 1e-6,
        }


def generate(
    path: Path,
    prompts: list[str],
    sampling: SamplingParams,
    stop: Sequence[str] = (),
    on_text: OnText = lambda _piece: None,
) -> list[Completion]:
    """Continue all prompts at once; EngineError if the engine fails in one of them.

    The model's end-of-text token is added to the stop tokens. Each prompt draws from a seed of its
    own, `sampling.seed` and those that follow.
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
    completions = []
    try:
        for index, prompt in enumerate(prompts):
            tokens = tuple(tokenizer.encode(prompt))
            if not tokens:
                raise RequestError(f"prompt {index + 1} of {len(prompts)} is empty")
            name = f"prompt-{index}"
            completion = Completion(
                prompt,
                TextStream(tokenizer, stop),
                time.monotonic_ns(),
                on_text,
                partial(loop.cancel, name, finish=FinishReason.STOP),
            )
            own = replace(sampling, seed=sampling.seed + index)
            loop.submit(Request(name, tokens, own), completion.on_event)
            completions.append(completion)
        while loop.step() is not None:
            for completion in completions:
                if completion.unread is not None:
                    raise completion.unread
    finally:
        loop.close()
    for completion in completions:
        if completion.finish is FinishReason.ERROR:
            raise EngineError(completion.message)
    return completions
