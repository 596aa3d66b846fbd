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
    prompts = []
    for passage in _passages(samples, prompt_tokens * _PASSAGE_CHARACTERS):
        tokens = tokenizer.encode(passage)[:prompt_tokens]
        if len(tokens) < prompt_tokens:
            raise ConfigError(
                f"the held-out text is too short for {samples} prompts of {prompt_tokens} tokens; "
                f"ask for fewer or shorter ones"
            )
        prompts.append(tuple(tokens))
    return prompts


def held_out_texts(samples: int, characters: int) -> list[str]:
    """`samples` prompts of `characters` characters, evenly spread over the held-out text."""
    texts = _passages(samples, characters)
    if len(texts[-1]) < characters:
        raise ConfigError(
            f"the held-out text is too short for {samples} prompts of {characters} characters; "
            f"ask for fewer or shorter ones"
        )
    return texts


def _passages(samples: int, characters: int) -> list[str]:
    text = (recipes.data_dir("calib") / HELD_OUT_TEXT).read_text(encoding="utf-8")
    stride = len(text) // samples
    if stride == 0:
        raise ConfigError(f"the held-out text has no {samples} passages; ask for fewer samples")
    starts = range(0, samples * stride, stride)
    return [text[start : start + characters] for start in starts]
