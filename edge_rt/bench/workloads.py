"""Prompts to measure with: passages of the shipped held-out text."""

from __future__ import annotations

from edge_rt import recipes
from edge_rt.errors import ConfigError
from edge_rt.tokenizer import Tokenizer

HELD_OUT_TEXT = "heldout.txt"
_PASSAGE_CHARACTERS = 64  # more than any tokenizer makes of one token on average


def held_out_prompts(
    tokenizer: Tokenizer, samples: int, prompt_tokens: int
) -> list[tuple[int, ...]]:
    """`samples` prompts of `prompt_tokens` tokens, evenly spread over the held-out text."""
    text = (recipes.data_dir("calib") / HELD_OUT_TEXT).read_text(encoding="utf-8")
    stride = len(text) // samples
    prompts = []
    if stride == 0:
        raise ConfigError(f"the held-out text has no {samples} passages; ask for fewer samples")
    for start in range(0, samples * stride, stride):
        passage = text[start : start + prompt_tokens * _PASSAGE_CHARACTERS]
        tokens = tokenizer.encode(passage)[:prompt_tokens]
        if len(tokens) < prompt_tokens:
            raise ConfigError(
                f"the held-out text is too short for {samples} prompts of {prompt_tokens} tokens; "
                f"ask for fewer or shorter ones"
            )
        prompts.append(tuple(tokens))
    return prompts
