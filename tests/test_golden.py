from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from edge_rt.errors import BundleError
from edge_rt.golden import Golden, GoldenPrompt

TOKENS = np.arange(6, dtype=np.int32)
LOGITS = np.linspace(-1, 1, 4 * 10, dtype=np.float32).reshape(4, 10)


def test_round_trip(tmp_path: Path) -> None:
    prompts = [GoldenPrompt(TOKENS, LOGITS), GoldenPrompt(TOKENS[::-2], LOGITS[:1])]
    Golden.save(tmp_path / "golden.safetensors", prompts)
    loaded = Golden.load(tmp_path / "golden.safetensors").prompts
    assert [prompt.start for prompt in loaded] == [2, 2]
    for read, written in zip(loaded, prompts, strict=True):
        np.testing.assert_array_equal(read.tokens, written.tokens)
        np.testing.assert_array_equal(read.logits, written.logits)


def test_prompts_keep_their_order(tmp_path: Path) -> None:
    prompts = [GoldenPrompt(np.full(1, i, np.int32), LOGITS[:1, :]) for i in range(10)]
    prompts += [GoldenPrompt(np.full(2, i, np.int32), LOGITS[:1, :]) for i in range(2)]
    Golden.save(tmp_path / "g", prompts)
    loaded = Golden.load(tmp_path / "g").prompts
    assert [p.tokens.tolist() for p in loaded] == [p.tokens.tolist() for p in prompts]


@pytest.mark.parametrize(
    ("tokens", "logits", "message"),
    [
        (TOKENS.astype(np.int64), LOGITS, "tokens are int64"),
        (TOKENS[None], LOGITS, r"tokens are int32 \[1, 6\]"),
        (TOKENS[:0], LOGITS[:0], r"logits are float32 \[0, 10\]"),
        (TOKENS, LOGITS.astype(np.float16), "logits are float16"),
        (TOKENS, LOGITS[0], r"logits are float32 \[10\]"),
        (TOKENS[:3], LOGITS, r"expected float32 \[1 to 3, vocab\]"),
        (TOKENS + 5, LOGITS, "tokens are 5 to 10, expected 0 to 9"),
        (TOKENS - 1, LOGITS, "tokens are -1 to 4"),
        (TOKENS, LOGITS * np.float32(np.nan), "not finite"),
    ],
)
def test_unfit_prompt_is_refused_both_ways(
    tmp_path: Path, tokens: Any, logits: Any, message: str
) -> None:
    good = GoldenPrompt(TOKENS, LOGITS)
    with pytest.raises(BundleError, match=f"golden prompt 1: .*{message}"):
        Golden.save(tmp_path / "saved", [good, GoldenPrompt(tokens, logits)])
    assert not (tmp_path / "saved").exists()
    save_file({"tokens.0": tokens, "logits.0": logits}, tmp_path / "foreign")
    with pytest.raises(BundleError, match=f"foreign: golden prompt 0: .*{message}"):
        Golden.load(tmp_path / "foreign")


def test_one_vocabulary(tmp_path: Path) -> None:
    prompts = [GoldenPrompt(TOKENS, LOGITS), GoldenPrompt(TOKENS, LOGITS[:, :9])]
    with pytest.raises(BundleError, match=r"\[9, 10\] columns"):
        Golden.save(tmp_path / "g", prompts)


def test_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="at least one"):
        Golden.save(tmp_path / "g", [])


@pytest.mark.parametrize("names", [("tokens.0",), ("tokens.0", "logits.1"), ("a", "b")])
def test_foreign_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    save_file(dict.fromkeys(names, LOGITS), tmp_path / "g")
    with pytest.raises(BundleError, match=r"expected tokens\.N and logits\.N"):
        Golden.load(tmp_path / "g")


def test_missing_and_damaged(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="absent cannot be read"):
        Golden.load(tmp_path / "absent")
    (tmp_path / "g").write_bytes(b"\0" * 7)
    with pytest.raises(BundleError, match="cannot be read"):
        Golden.load(tmp_path / "g")
