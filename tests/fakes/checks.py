"""Drivers that tests of several rooms share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import GPTJForCausalLM

from edge_rt.core import DecodeRow, Draw, PrefillChunk, Request, SamplingParams, TokenEvent
from edge_rt.loop import Loop
from edge_rt.runtime.base import Runner

F32 = npt.NDArray[np.float32]
GREEDY = Draw(SamplingParams(), 0, (), ())


def transformers_logits(checkpoint: Path, tokens: npt.NDArray[np.int64]) -> F32:
    """Logits [sequences, tokens, vocab] of transformers' own GPT-J in float32."""
    model = GPTJForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits: F32 = model(torch.from_numpy(tokens)).logits.numpy()
    return logits


def engine_logits(runner: Runner, tokens: npt.NDArray[np.int64], prefilled: int) -> F32:
    """Logits [sequences, tokens - prefilled + 1, vocab] of positions prefilled - 1 to the last.

    The sequences are prefilled one by one in uneven chunks, then decoded together, in slots that
    leave holes between them.
    """
    slots = [(2 * row + 1,) for row in range(len(tokens))]
    found = []
    cut = prefilled // 3
    for slot, row in zip(slots, tokens.tolist(), strict=True):
        runner.prefill([PrefillChunk("x", slot, 0, tuple(row[:cut]), ())])
        last = PrefillChunk("x", slot, cut, tuple(row[cut:prefilled]), (GREEDY,))
        found.append(_logits(runner.prefill([last], want_logits=True).logits))
    steps = [np.concatenate(found)]
    for position in range(prefilled, tokens.shape[1]):
        rows = [
            DecodeRow(f"{slot}", slot, position, int(token), GREEDY)
            for slot, token in zip(slots, tokens[:, position], strict=True)
        ]
        steps.append(_logits(runner.decode(rows, want_logits=True).logits))
    return np.stack(steps, axis=1)


def _logits(logits: F32 | None) -> F32:
    assert logits is not None
    return logits


class Collected:
    """What a request was answered: its tokens, and its one terminal event."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish: list[str] = []

    def __call__(self, event: TokenEvent) -> None:
        assert not self.finish, "an event after the terminal one"
        if event.token is not None:
            self.tokens.append(event.token.id)
        if event.finish is not None:
            self.finish.append(event.finish.value)


def greedy(loop: Loop, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """The tokens that all prompts together are continued with."""
    answers = [Collected() for _ in prompts]
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        loop.submit(Request(f"r{index}", tuple(prompt), SamplingParams(max_tokens)), answer)
    loop.run_until_idle()
    assert all(answer.finish == ["length"] for answer in answers)
    return [answer.tokens for answer in answers]
