from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from fakes import command

from edge_rt.cli import main
from edge_rt.recipes import data_dir
from edge_rt.tokenizer import Tokenizer

BundleFactory = Callable[[str], Path]

KEYS = {
    "target", "kind", "perplexity", "perplexity_ci95", "predicted_tokens", "windows",
    "context_tokens", "top1_accuracy", "duration_s", "tokens_per_s",
}  # fmt: skip
PAIR_KEYS = {
    "against", "perplexity_difference", "perplexity_difference_ci95", "greedy_agreement",
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((data_dir("calib") / "heldout.txt").read_text(encoding="utf-8")[:8000])
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    return command.run_json(capsys, "eval", *map(str, arguments))


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["eval", *map(str, arguments)])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


def test_a_checkpoint(
    demo_checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = run_json(capsys, demo_checkpoint, "--text", text)
    assert table.keys() == KEYS
    tokens = len(Tokenizer.load(demo_checkpoint).encode(text.read_text(encoding="utf-8")))
    assert table["target"] == str(demo_checkpoint)
    assert table["kind"] == "checkpoint"
    assert table["context_tokens"] == 512
    assert table["windows"] == tokens // 512
    assert table["predicted_tokens"] == tokens // 512 * 511
    low, high = table["perplexity_ci95"]
    assert 5 < low <= table["perplexity"] <= high < 50
    assert 0.3 < table["top1_accuracy"] < 0.8
    assert table["tokens_per_s"] == pytest.approx(table["predicted_tokens"] / table["duration_s"])


def test_a_quantized_checkpoint_against_the_float_one(
    demo_checkpoint: Path, demo_quantized: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        *(demo_quantized, "--text", text, "--against", demo_checkpoint),
        *("--context", 64, "--tokens", 1024),
    )
    table = run_json(capsys, *arguments)
    assert table.keys() == KEYS | PAIR_KEYS
    assert table["against"].keys() == KEYS
    assert (table["kind"], table["against"]["kind"]) == ("quantized", "checkpoint")
    found = table["perplexity"] - table["against"]["perplexity"]
    assert table["perplexity_difference"] == pytest.approx(found)
    low, high = table["perplexity_difference_ci95"]
    assert low < found < high
    # Far narrower than each one's own, which is the point of resampling in pairs.
    assert high - low < 0.2 * (table["perplexity_ci95"][1] - table["perplexity_ci95"][0])
    assert 0.85 < table["greedy_agreement"] < 1
    assert main(["eval", *map(str, arguments)]) == 0
    said = capsys.readouterr().out
    assert f"{demo_quantized} (quantized): perplexity {table['perplexity']:.4f}" in said
    assert f"{demo_checkpoint} (checkpoint): perplexity" in said
    assert f"difference {found:+.4f} (95 % interval {low:+.4f} to {high:+.4f})" in said
    assert f"greedy agreement {100 * table['greedy_agreement']:.2f} %" in said
    assert f"{table['predicted_tokens']:,} tokens predicted" in said


@pytest.mark.parametrize(("recipe", "rel"), [("demo.cpu-exact", 1e-3), ("demo.cpu", 0.01)])
def test_a_bundle_against_its_checkpoint(
    demo_quantized: Path,
    demo_bundle: BundleFactory,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    rel: float,
) -> None:
    table = run_json(
        capsys,
        *(demo_bundle(recipe), "--text", text, "--against", demo_quantized),
        *("--context", 64, "--tokens", 1000),
    )
    assert table["kind"] == "bundle"
    assert table["windows"] == table["against"]["windows"] == 1000 // 64
    assert table["perplexity"] == pytest.approx(table["against"]["perplexity"], rel=rel)
    assert table["greedy_agreement"] > 0.93


def test_one_window_has_no_interval(
    demo_checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = (demo_checkpoint, "--text", text, "--tokens", 99, "--context", 64)
    assert run_json(capsys, *one)["perplexity_ci95"] is None
    table = run_json(capsys, *one, "--against", demo_checkpoint)
    assert table["perplexity_difference"] == 0
    assert table["perplexity_difference_ci95"] is None
    assert table["greedy_agreement"] == 1
    assert main(["eval", *map(str, one)]) == 0
    assert "no interval: it takes 2 windows or more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b"\x93NUMPY\xff\xfe", "is not UTF-8 text"),
        (b"GIF\0\0", "is a binary file: it has a zero byte at character 3"),
        (b"a few words", "fewer than one window of 512; give more text"),
    ],
    ids=str,
)
def test_texts_that_cannot_be_used(
    demo_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    message: str,
) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    code, said = fails(capsys, demo_checkpoint, "--text", file)
    assert code == 2
    assert message in said


def test_a_directory_is_no_text(
    demo_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = fails(capsys, demo_checkpoint, "--text", tmp_path)
    assert code == 2
    assert "cannot be read: Is a directory" in said


def test_line_ends_are_the_texts_own(
    demo_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dos.txt"
    file.write_bytes(b"one line\r\n" * 20)
    tokens = len(Tokenizer.load(demo_checkpoint).encode("one line\r\n" * 20))
    assert tokens != len(Tokenizer.load(demo_checkpoint).encode("one line\n" * 20))
    table = run_json(capsys, demo_checkpoint, "--text", file, "--context", 2)
    assert table["windows"] == tokens // 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "1"), "a context of 1 token predicts nothing; give 2 or more"),
        (("--context", "513"), "has n_positions 512; give at most that"),
        (("--tokens", "1000000"), "tokens; give fewer, or leave it out"),
        (("--tokens", "100"), "100 tokens are fewer than one window of 512"),
    ],
)
def test_settings_that_cannot_work(
    demo_checkpoint: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    code, said = fails(capsys, demo_checkpoint, "--text", text, *arguments)
    assert code == 2
    assert message in said


@pytest.mark.parametrize("arguments", [["--context", "0"], ["--tokens", "-1"], ["--device", "tpu"]])
def test_a_wrong_command_line(text: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["eval", "x", "--text", str(text), *arguments])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("exists", "found"), [(True, "holds neither config.json"), (False, "is not a directory")]
)
def test_what_is_no_target(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], exists: bool, found: str
) -> None:
    target = tmp_path / "target"
    if exists:
        target.mkdir()
    code, said = fails(capsys, target, "--text", text)
    assert code == 1
    assert f"{target} {found}" in said


def test_the_null_engine_is_refused_before_the_work(
    demo_checkpoint: Path,
    demo_bundle: BundleFactory,
    text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    against = demo_bundle("demo.null")
    code, said = fails(capsys, demo_checkpoint, "--text", text, "--against", against)
    assert code == 2
    assert "the engine null, which computes nothing; build the model with another" in said


def test_a_bundle_runs_on_its_own_engine(
    demo_bundle: BundleFactory, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = fails(capsys, demo_bundle("demo.cpu"), "--text", text, "--device", "cuda")
    assert code == 2
    assert "runs on the engine that it was built for; leave --device out" in said


@pytest.fixture
def altered(demo_bundle: BundleFactory, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the demo's bundle with other figures in its manifest."""

    def make(part: str, **change: int) -> Path:
        path = tmp_path / "altered"
        shutil.copytree(demo_bundle("demo.cpu"), path)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest[part] |= change
        (path / "manifest.json").write_text(json.dumps(manifest))
        return path

    return make


def test_a_context_beyond_the_bundle(
    demo_checkpoint: Path,
    altered: Callable[..., Path],
    text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = altered("recipe", max_context=48)
    code, said = fails(capsys, bundle, "--text", text, "--context", 64)
    assert code == 2
    assert f"--context 64: {bundle} has max_context 48; give at most that" in said
    # By default both get windows that both can take.
    table = run_json(capsys, demo_checkpoint, "--text", text, "--against", bundle, "--tokens", 200)
    assert table["context_tokens"] == table["against"]["context_tokens"] == 48


def test_other_vocabularies_do_not_compare(
    demo_checkpoint: Path,
    altered: Callable[..., Path],
    text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = altered("model", vocab_size=4000)
    code, said = fails(capsys, demo_checkpoint, "--text", text, "--against", bundle)
    assert code == 2
    assert "has a vocabulary of 3072" in said
    assert "of 4000; only targets of one vocabulary can be compared" in said


def copied(demo: Path, path: Path) -> Path:
    path.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(demo / name, path)
    return path


def test_other_tokenizers_do_not_compare(
    demo_checkpoint: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copied(demo_checkpoint, tmp_path / "other")
    table = json.loads((other / "tokenizer.json").read_text())
    del table["model"]["merges"][100:]
    (other / "tokenizer.json").write_text(json.dumps(table))
    code, said = fails(capsys, demo_checkpoint, "--text", text, "--against", other)
    assert code == 2
    assert "cut the text into different tokens; only targets with one tokenizer.json" in said


def test_a_tokenizer_beyond_the_vocabulary(
    demo_bundle: BundleFactory,
    altered: Callable[..., Path],
    text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, said = fails(capsys, altered("model", vocab_size=300), "--text", text)
    assert code == 1
    assert "vocabulary has 300; they do not belong together" in said


def test_weights_that_overflow_are_named(
    demo_checkpoint: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = copied(demo_checkpoint, tmp_path / "broken")
    tensors = safetensors.numpy.load_file(broken / "model.safetensors")
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    tensors["transformer.h.2.ln_1.weight"] *= np.float32(3e37)
    safetensors.numpy.save_file(tensors, broken / "model.safetensors")
    code, said = fails(capsys, broken, "--text", text, "--context", 64, "--tokens", 128)
    assert code == 1
    assert "the output of layer 2 holds values that are not finite" in said


def test_a_perplexity_beyond_float64(
    demo_checkpoint: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = copied(demo_checkpoint, tmp_path / "broken")
    tensors = safetensors.numpy.load_file(broken / "model.safetensors")
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    tensors["transformer.ln_f.weight"] *= np.float32(1e6)
    safetensors.numpy.save_file(tensors, broken / "model.safetensors")
    code, said = fails(capsys, broken, "--text", text, "--context", 64, "--tokens", 128)
    assert code == 1
    assert "beyond what a float64 can hold" in said


def test_help_states_the_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "windows without overlap; a remainder is dropped" in said
    assert "percentile bootstraps over windows (1,000 resamples, fixed seed)" in said


def test_the_cpu_needs_no_torch(demo_checkpoint: Path, text: Path) -> None:
    arguments = ["eval", str(demo_checkpoint), "--text", str(text), "--context", "32"]
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from edge_rt.cli import main\n"
        f"assert main({[*arguments, '--tokens', '64']!r}) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_packed_checkpoint_is_to_be_taken_over_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "gptj", "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "text").write_text("some text")
    code, said = fails(capsys, tmp_path, "--text", tmp_path / "text")
    assert code == 2
    assert "take it over with edge-rt quantize" in said
