"""The small measuring tools, run for a moment: whole, and plausible in what they say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BundleFactory = Callable[[str], Path]
Tool = Callable[[str], ModuleType]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """A tool's main, with these arguments; what it wrote."""

    def main(module: ModuleType, *arguments: str) -> dict[str, Any]:
        out = tmp_path / "out.json"
        monkeypatch.setattr(sys, "argv", ["tool", *arguments, "--json", str(out)])
        module.main()
        found: dict[str, Any] = json.loads(out.read_text())
        assert found["date"]
        assert found["machine"]["cores"] >= 1
        return found

    return main


def test_loop_cost(tool: Tool, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tool("loop_cost")
    monkeypatch.setattr(module, "STEPS", 20)
    found = run(module)
    for rows in (1, 8, 32):
        one = found[f"rows_{rows}"]
        assert sum(one["parts_us"].values()) == pytest.approx(one["step_us"])
        assert one["token_us"] == pytest.approx(one["step_us"] / rows)
        assert min(one["parts_us"][part] for part in ("schedule", "null_engine", "finish")) > 0


def test_batching(tool: Tool, run: Run, demo_bundle: BundleFactory) -> None:
    bundle = str(demo_bundle("demo.null"))
    found = run(tool("batching"), bundle, "--samples", "30", "--more-tokens", "1", "--rounds", "2")
    for way in ("offline", "in_flight", "static"):
        assert found[way]["samples"] == 30
        assert found[way]["throughput_tok_s"] > 0
    assert {way: len(rounds) for way, rounds in found["rounds"].items()} == {
        "in_flight": 2,
        "static": 2,
    }
    assert found["rate_per_s"] == pytest.approx(0.7 * found["offline"]["samples_per_s"])


def test_cpu_settings(
    tool: Tool, run: Run, demo_bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tool("cpu_settings")
    monkeypatch.setattr(module, "TURNS", 1)
    monkeypatch.setattr(module, "STEPS", 2)
    found = run(module, str(demo_bundle("demo.cpu")))
    assert {one["spinning"] for one in found["threads"]} == {False, True}
    for one in found["threads"]:
        for rows in (1, 8):
            assert one[f"step_ms_b{rows}"] > 0
            assert one[f"step_ms_b{rows}_beside_a_busy_core"] > 0
    assert [one["prefill_chunk"] for one in found["chunks"]] == [16, 32, 64, 128, 256]
    assert all(one["tokens_per_s"] > 0 for one in found["chunks"])


def test_serve_speed(tool: Tool, run: Run, demo_bundle: BundleFactory) -> None:
    bundles = str(demo_bundle("demo.null")), "--prefill", str(demo_bundle("demo.cpu"))
    found = run(tool("serve_speed"), *bundles, "--tokens", "50", "--seconds", "1")
    streams = found["streams"]
    assert streams["tokens_per_s_worst"] <= streams["tokens_per_s"] <= streams["tokens_per_s_best"]
    assert streams["daemon_cpu_us_per_token"] > streams["client_cpu_us_per_token"] > 0
    assert found["under_streams"]["tokens_per_s"] > 0
    assert found["under_prefill"]["prompt_tokens_per_s"] > 0
    for name in ("idle", "under_streams", "under_prefill"):
        assert 0 < found[name]["health_ms_p50"] <= found[name]["health_ms_p99"]
        assert found[name]["health_answers"] > 3


@pytest.mark.parametrize(
    ("name", "arguments", "code", "message"),
    [
        ("batching", ["/nope"], 1, "/nope"),
        ("batching", ["/nope", "--samples", "0"], 2, "'0' is not a whole number of 1 or more"),
        ("batching", ["/nope", "--load", "0"], 2, "0 is not more than 0 and at most 1"),
        ("cpu_settings", ["/nope"], 1, "/nope"),
        ("serve_speed", ["/nope"], 1, "/nope"),
        ("loop_cost", ["--json", "/nope/x"], 2, "'/nope/x' cannot be written"),
    ],
)
def test_bad_input_is_said_before_the_work(
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", *arguments])
    with pytest.raises(SystemExit) as ended:
        tool(name).main()
    assert ended.value.code == code
    assert message in capsys.readouterr().err


def test_the_null_engine_has_no_such_settings(
    tool: Tool,
    demo_bundle: BundleFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", str(demo_bundle("demo.null"))])
    with pytest.raises(SystemExit):
        tool("cpu_settings").main()
    assert "give one of the ort engine" in capsys.readouterr().err
