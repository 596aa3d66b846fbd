"""`edge-rt generate`: prompts, sampling, stop strings, and readers that go away."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.command import run_json

from edge_rt.cli import main
from edge_rt.cli.generate import generate
from edge_rt.core import SamplingParams, StepStats
from edge_rt.loop import Loop

BundleFactory = Callable[[str], Path]


def test_generate_prints_prompt_and_text(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = str(demo_bundle("demo.cpu"))
    arguments = ["generate", bundle, "--prompt", "def read_file(path", "--max-tokens", "8"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("def read_file(path")
    (completion,) = run_json(capsys, *arguments)["completions"]
    assert text == completion["prompt"] + completion["text"] + "\n"
    assert completion["tokens"] == 8
    assert completion["finish_reason"] == "length"
    assert 0 < completion["ttft_ms"] <= completion["latency_ms"]


def test_a_seed_draws_the_same_text_again(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = str(demo_bundle("demo.cpu"))

    def text(*arguments: str) -> str:
        options = ("--prompt", "def ", "--max-tokens", "12", "--temperature", "1.2", *arguments)
        found: str = run_json(capsys, "generate", bundle, *options)["completions"][0]["text"]
        return found

    assert text("--seed", "5") == text("--seed", "5")
    assert len({text("--seed", str(seed)) for seed in range(4)}) > 1
    assert text("--top-k", "1") == text("--top-p", "1e-9") == text("--min-p", "1")


def test_generate_ends_before_a_stop_string(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(demo_bundle("demo.cpu")), "--prompt", "def read_file(path"]
    (free,) = run_json(capsys, *arguments)["completions"]
    stop = free["text"][9:12]
    (stopped,) = run_json(capsys, *arguments, "--stop", "never", "--stop", stop)["completions"]
    assert stopped["text"] == free["text"][: free["text"].index(stop)]
    assert stopped["finish_reason"] == "stop"
    assert stopped["tokens"] < free["tokens"]
    assert main([*arguments, "--stop", stop]) == 0
    assert capsys.readouterr().out == "def read_file(path" + stopped["text"] + "\n"


def test_sampling_that_cannot_be_is_refused(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(demo_bundle("demo.null")), "--prompt", "x", "--top-p", "1.5"]
    assert main(arguments) == 1
    assert "top_p must be a number, 0 to 1, found 1.5" in capsys.readouterr().err


def test_prompts_in_one_batch_get_what_they_get_alone(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = str(demo_bundle("demo.cpu"))
    prompts = ["import os", "The SELECT statement", "x", "Return the number of", "import os"]
    together = run_json(
        capsys,
        "generate",
        bundle,
        "--max-tokens",
        "12",
        *(part for prompt in prompts for part in ("--prompt", prompt)),
    )
    for prompt, completion in zip(prompts, together["completions"], strict=True):
        alone = run_json(capsys, "generate", bundle, "--max-tokens", "12", "--prompt", prompt)
        assert completion["text"] == alone["completions"][0]["text"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "empty"), ("word " * 600, "what fits"), ("\udc80", "half a surrogate pair")],
)
def test_a_prompt_that_cannot_be_served(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str], prompt: str, message: str
) -> None:
    assert main(["generate", str(demo_bundle("demo.null")), "--prompt", prompt]) == 1
    assert message in capsys.readouterr().err


def test_text_that_nobody_reads_is_not_generated(
    demo_bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = Loop.step

    def counted(self: Loop) -> StepStats | None:
        nonlocal steps
        steps += 1
        return step(self)

    def gone(_piece: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Loop, "step", counted)
    with pytest.raises(BrokenPipeError):
        generate(demo_bundle("demo.null"), ["x"], SamplingParams(400), on_text=gone)
    assert steps == 1


def test_a_reader_that_goes_away_is_no_error_to_shout_about(demo_bundle: BundleFactory) -> None:
    arguments = ["generate", str(demo_bundle("demo.cpu")), "--prompt", "x", "--max-tokens", "400"]
    with subprocess.Popen(
        [sys.executable, "-m", "edge_rt", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == "x"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_weights_that_are_garbage_give_no_text(
    demo_bundle: BundleFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(demo_bundle("demo.cpu"), bundle)
    size = (bundle / "weights.bin").stat().st_size
    (bundle / "weights.bin").write_bytes(b"\xff" * size)
    assert main(["generate", str(bundle), "--prompt", "x"]) == 1
    assert "not finite" in capsys.readouterr().err


def test_which_of_several_prompts_is_empty(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(demo_bundle("demo.null")), "--prompt", "a", "--prompt", ""]
    assert main(arguments) == 1
    assert "prompt 2 of 2 is empty" in capsys.readouterr().err


def test_several_continuations_and_the_best_of_them(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = str(demo_bundle("demo.cpu"))
    arguments = ["generate", bundle, "--prompt", "def ", "--max-tokens", "8", "--temperature", "1"]
    drawn = run_json(capsys, *arguments, "--n", "4")["completions"]
    assert [one["continuation"] for one in drawn] == [1, 2, 3, 4]
    assert len({one["text"] for one in drawn}) > 1
    best = run_json(capsys, *arguments, "--n", "2", "--best-of", "4")["completions"]
    texts = {one["continuation"]: one["text"] for one in drawn}
    assert [one["text"] for one in best] == [texts[one["continuation"]] for one in best]
    assert best[0]["logprob_per_token"] >= best[1]["logprob_per_token"]
    assert main([*arguments, "--n", "2", "--best-of", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"--- prompt 1 of 1, continuation {best[0]['continuation']} of 4")
    assert "def " + best[1]["text"] in printed


def test_best_of_less_than_is_shown(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(demo_bundle("demo.null")), "--prompt", "x", "--n", "3"]
    assert main([*arguments, "--best-of", "2"]) == 2
    assert "--best-of 2 is less than --n 3" in capsys.readouterr().err
    assert main(["generate", *arguments[1:4], "--n", "3"]) == 2
    assert "at temperature 0 all continuations are alike" in capsys.readouterr().err
    assert main(["generate", *arguments[1:4], "--n", "300", "--temperature", "1"]) == 1
    assert "a request may take 1 to" in capsys.readouterr().err
