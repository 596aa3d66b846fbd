"""tools/peers: its arithmetic by hand, its refusals, and a run of the whole at tiny size."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers

from edge_rt.build.bundle import build
from edge_rt.bundle import Bundle
from edge_rt.errors import ConfigError, EngineError
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.quant.pipeline import quantize

TOOLS = Path(__file__).parents[2] / "tools"
DEADLINE_S = 300


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(checkpoint=tmp_path, prompt_tokens=8, new_tokens=8)


@pytest.fixture
def tiny(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path
) -> tuple[Path, Path]:
    """A random checkpoint of two layers, and its bundle with weights and arithmetic in float."""
    checkpoint = random_gptj(64, 2, 16)
    quantize(checkpoint, tmp_path / "quantized", recipe("float"))
    build(tmp_path / "quantized", "demo.cpu-exact", tmp_path / "bundle")
    return checkpoint, tmp_path / "bundle"


def row(batch: int, threads: int, wall_s: list[float], prefill_s: list[float]) -> dict[str, Any]:
    what = {"setting": {"threads": threads}, "batch": batch, "tokens": batch * 10, "steps": 9}
    return what | {"wall_s": wall_s, "prefill_s": prefill_s}


def test_the_fastest_call_counts_for_the_whole_and_for_its_prefill(
    tool: Callable[[str], ModuleType],
) -> None:
    turns = [
        [row(1, 2, [0.8, 0.9], [0.3, 0.2]), row(8, 2, [0.5], [0.1])],
        [row(1, 2, [0.4, 0.7], [0.3, 0.4]), row(8, 2, [0.9], [0.05])],
    ]
    one, eight = tool("peer_table").merged(turns)
    assert one["wall_s"] == [0.8, 0.9, 0.4, 0.7]
    assert one["tokens_per_s"] == pytest.approx(10 / 0.4)
    assert one["step_ms"] == pytest.approx((400 - 200) / 9)
    assert eight["tokens_per_s"] == pytest.approx(80 / 0.5)
    assert eight["step_ms"] == pytest.approx((500 - 50) / 9)
    assert turns[0][0]["wall_s"] == [0.8, 0.9]  # what was measured stays as it is


def test_each_batch_size_has_its_own_best_setting(tool: Callable[[str], ModuleType]) -> None:
    turn = [
        row(1, 2, [0.5], [0.1]),
        row(8, 2, [0.5], [0.1]),
        row(1, 1, [0.4], [0.1]),
        row(8, 1, [0.6], [0.1]),
    ]
    library = tool("peer_table")
    best = library.winners(library.merged([turn]))
    assert {key: one["setting"]["threads"] for key, one in best.items()} == {"b1": 1, "b8": 2}


def test_ratios_agreement_and_doubts(tool: Callable[[str], ModuleType]) -> None:
    library = tool("peer_table")
    tried = {
        "edge_rt": library.merged([[row(1, 2, [0.1], [0.01]), row(8, 2, [0.2], [0.02])]]),
        "transformers": library.merged([[row(1, 2, [0.4], [0.01]), row(8, 2, [0.3], [0.02])]]),
    }
    oracle = [[1, 2, 3, 4], [5, 6, 7, 8]]
    first = {
        "edge_rt": {"b1": [[1, 2, 3, 9], [5, 6, 7, 8]], "b8": [[9, 9, 9, 9], [9, 9, 7, 8]]},
        "transformers": {"b1": oracle, "b8": oracle},
    }
    found = library.table(tried, first)
    assert found["tokens_per_s"]["edge_rt"] == {"b1": 100.0, "b8": 400.0}
    assert found["ratios"] == {"transformers": pytest.approx({"b1": 4.0, "b8": 1.5})}
    assert found["agreement"]["edge_rt"] == {"b1": 7 / 8, "b8": 2 / 8}
    assert found["agreement"]["transformers"] == {"b1": 1.0, "b8": 1.0}
    (doubt,) = found["warnings"]
    assert "25 % of edge_rt's first tokens at b8" in doubt
    del first["transformers"]
    assert library.table(tried, first)["agreement"] == {}


def test_a_busy_machine_is_told(tool: Callable[[str], ModuleType]) -> None:
    busy = tool("peer_table").busy
    assert busy(0.2) == []
    assert "load average was 3.5 before the run" in busy(3.5)[0]


def test_settings_are_distinct_and_the_first_takes_every_core(
    tool: Callable[[str], ModuleType],
) -> None:
    library = tool("peer_engines")
    for engine in library.ENGINES:
        for cores in (1, 2, 4):
            found = library.settings_of(engine, cores, "x86_64")
            assert len({json.dumps(one, sort_keys=True) for one in found}) == len(found)
            assert cores in {found[0].get("threads"), found[0].get("intra_threads")}
            for one in found:  # more threads than cores would only get in each other's way
                threads = one.get("threads") or one["intra_threads"] * one["inter_threads"]
                assert threads in {1, cores}
    assert library.settings_of("torch_int8", 2, "x86_64")[0]["backend"] == "x86"
    assert library.settings_of("torch_int8", 2, "aarch64")[0]["backend"] == "qnnpack"


def test_calls_of_every_size_are_timed_after_a_warm_up(tool: Callable[[str], ModuleType]) -> None:
    calls: list[tuple[int, int]] = []

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        calls.append((len(prompts), new_tokens))
        return [[0] * new_tokens for _ in prompts]

    library = tool("peer_engines")
    found = library.measured(generate, [[[1]] * 2] * 3, 5)
    assert calls == [(2, 5), (2, 1)] * 4
    assert [len(found[key]) for key in ("wall_s", "prefill_s")] == [3, 3]
    assert (found["tokens"], found["steps"]) == (2 * 5, 4)
    with pytest.raises(EngineError, match="before it had 5 tokens"):
        library.measured(lambda prompts, _count: [[0]] * len(prompts), [[[1]]], 5)


def test_a_peer_that_fails_is_left_out_and_ours_is_not(
    tool: Callable[[str], ModuleType], options: argparse.Namespace, demo_checkpoint: Path
) -> None:
    library = tool("peers")
    for name, value in (
        ("checkpoint", demo_checkpoint),
        ("bundle", None),
        ("quick", True),
        ("peers", ["transformers", "torch_int8"]),
    ):
        setattr(options, name, value)
    bench = library.Bench(options, "", options.checkpoint)

    def part(failing: str) -> Callable[[str], None]:
        def run(engine: str) -> None:
            if engine == failing:
                raise EngineError("out of order")

        return run

    bench.first["torch_int8"] = {}
    bench.each(part("torch_int8"))
    assert list(bench.turns) == ["edge_rt", "transformers"]
    assert bench.left_out == {"torch_int8": "out of order"}
    assert bench.first == {}
    with pytest.raises(EngineError, match="out of order"):
        bench.each(part("edge_rt"))


def test_a_missing_library_is_named(
    tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tool("peers")
    monkeypatch.setitem(library.NEEDS, "ctranslate2", ("tokenizers", "no_such_library"))
    assert library.missing("edge_rt") is None
    why = library.missing("ctranslate2")
    assert why.startswith("not installed: no_such_library; install: ")


def test_ctranslate2_keeps_off_mkl_but_on_intel(tool: Callable[[str], ModuleType]) -> None:
    environment = tool("peers").environment
    assert environment("AuthenticAMD")["CT2_USE_MKL"] == "0"
    assert "CT2_USE_MKL" not in environment("GenuineIntel")


def test_a_bundle_must_be_the_checkpoint_s_and_hold_what_is_measured(
    tool: Callable[[str], ModuleType],
    options: argparse.Namespace,
    demo_checkpoint: Path,
    tiny: tuple[Path, Path],
) -> None:
    check_fit, bundle = tool("peers").check_fit, Bundle.load(tiny[1])
    config = Checkpoint.open(tiny[0]).config
    options.new_tokens = 64 - 8
    check_fit(bundle, config, options)
    with pytest.raises(ConfigError, match=r"has n_layer 2, .* has 4"):
        check_fit(bundle, Checkpoint.open(demo_checkpoint).config, options)
    narrow = replace(bundle.manifest, recipe=replace(bundle.manifest.recipe, max_batch=7))
    with pytest.raises(ConfigError, match="serves 7 requests at once, 8 are measured"):
        check_fit(replace(bundle, manifest=narrow), config, options)
    options.new_tokens += 1
    with pytest.raises(ConfigError, match=r"are 65 in all, .* holds 64"):
        check_fit(bundle, config, options)


def test_a_tokenizer_is_filled_up_for_ctranslate2(
    tool: Callable[[str], ModuleType], random_gptj: Callable[..., Path], tmp_path: Path
) -> None:
    convertible = tool("peers").convertible
    checkpoint = random_gptj(64, 2, 16)
    assert convertible(checkpoint, 3072, tmp_path / "none") == checkpoint
    view = convertible(checkpoint, 3100, tmp_path / "view")
    filled = tokenizers.Tokenizer.from_file(str(view / "tokenizer.json"))
    assert filled.get_vocab_size() == 3100
    assert (view / "config.json").resolve() == (checkpoint / "config.json").resolve()
    plain = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert plain.get_vocab_size() == 3072


def test_a_fault_is_one_line(
    tool: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main = tool("peers").main
    assert main(["--new-tokens", "1"]) == 2
    assert main(["--checkpoint", str(tmp_path / "nowhere")]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("tools/peers: --new-tokens must be 2 or more")
    assert second.startswith("tools/peers: ")


@pytest.mark.slow
def test_the_whole_at_tiny_size(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    command = [sys.executable, TOOLS / "peers.py", "--quick", "--prompt-tokens", "8"]
    command += ["--checkpoint", tiny[0], "--bundle", tiny[1], "--json", file]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TOOLS.parent)},
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    expected = {"edge_rt", "transformers", "torch_int8", "ctranslate2"}
    if util.find_spec("ctranslate2") is None:  # no extra of edge_rt brings it
        expected.remove("ctranslate2")
        assert "not installed: ctranslate2" in found["left_out"].pop("ctranslate2")
    assert found["left_out"] == {}
    assert set(found["tokens_per_s"]) == expected
    for engine, rates in found["tokens_per_s"].items():
        one, eight = found["tried"][engine]
        assert (one["batch"], eight["batch"]) == (1, 8)
        assert rates == {"b1": one["tokens_per_s"], "b8": eight["tokens_per_s"]}
        assert one["tokens"] / one["tokens_per_s"] == pytest.approx(min(one["wall_s"]))
    # Unquantized and in float32 every token of ours must be the library's; in int8 most are.
    agree = found["agreement"]
    assert agree["edge_rt"] == {"b1": 1.0, "b8": 1.0}
    assert min(agree[engine]["b1"] for engine in expected) > 0.3
    assert found["edge_rt_recipe"]["ort"]["accuracy_level"] == 0
    assert "edge_rt b1: threads" in done.stdout
