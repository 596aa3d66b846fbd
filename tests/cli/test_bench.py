"""`edge-rt bench` as a user meets it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import schema
from fakes.broker import broker, listener
from fakes.command import run_json
from fakes.waiting import eventually, free_port
from PIL import Image

from edge_rt.bench.extent import Extent
from edge_rt.cli import bench, main

pytestmark = pytest.mark.timeout(300)

BundleFactory = Callable[[str], Path]
SMALL = ("--samples", "20", "--max-tokens", "4", "--prompt-tokens", "16")
LOADGEN_FILES = ("mlperf_log_summary.txt", "mlperf_log_detail.txt", "mlperf_log_accuracy.json")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/edge-rt/loadgen"


@pytest.fixture
def no_loadgen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_loadgen", None)


@pytest.mark.parametrize("timer", ["loadgen", "own"])
@pytest.mark.parametrize("scenario", ["single-stream", "offline"])
def test_bench_reports_the_keys_of_the_contract(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str], scenario: str, timer: str
) -> None:
    bundle = str(demo_bundle("demo.null"))
    table = run_json(capsys, "bench", scenario, bundle, *SMALL, "--timer", timer)
    assert table["timer"] == timer
    assert table["samples"] == 20
    assert table["tokens"] == 80
    assert 0 < table["latency_ms_p50"] <= table["latency_ms_p90"] <= table["latency_ms_p99"]
    assert 0 < table["ttft_ms_p50"] <= table["ttft_ms_p99"]
    assert table["tpot_ms_p50"] >= 0
    assert table["throughput_tok_s"] == pytest.approx(80 / table["duration_s"])
    assert table["samples_per_s"] == pytest.approx(20 / table["duration_s"])
    assert any("20 samples" in warning for warning in table["warnings"])
    assert ("loadgen" in table) is (timer == "loadgen")


def test_the_demo_bundle_under_loadgen(
    demo_bundle: BundleFactory,
    tmp_path: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["bench", "offline", str(demo_bundle("demo.cpu")), *SMALL]
    table = run_json(capsys, *arguments, "--logs", str(tmp_path / "a/logs"))
    assert table["timer"] == "loadgen"
    said = table["loadgen"]
    assert said["logs"] == str(tmp_path / "a/logs")
    assert all((tmp_path / "a/logs" / name).is_file() for name in LOADGEN_FILES)
    assert said["valid"]
    assert said["reasons"] == []
    assert table["samples"] == 20
    assert table["tokens"] == 80
    # Two timers of one process; what they may differ by is for warnings.
    summary = (tmp_path / "a/logs/mlperf_log_summary.txt").read_text(encoding="utf-8")
    (rate,) = [
        float(line.split(":")[1])
        for line in summary.splitlines()
        if line.startswith("Samples per second")
    ]
    assert table["samples_per_s"] == pytest.approx(rate, rel=0.2)
    assert not cache.exists()
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "timer       LoadGen" in out
    (fresh,) = cache.iterdir()
    assert str(fresh) in out
    assert all((fresh / name).is_file() for name in LOADGEN_FILES)


def test_without_samples_it_goes_on_for_64_requests(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_rt.bench.extent.DEFAULT", Extent(64, 0.5))
    arguments = ("bench", "single-stream", str(demo_bundle("demo.null")), "--max-tokens", "2")
    table = run_json(capsys, *arguments)
    assert table["samples"] > 64
    assert table["duration_s"] >= 0.5
    assert table["loadgen"]["valid"]


@pytest.mark.usefixtures("no_loadgen")
def test_without_loadgen_our_own_timer_takes_over_and_says_so(
    demo_bundle: BundleFactory, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "offline", str(demo_bundle("demo.null")), *SMALL]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "own timer measures instead of MLPerf's LoadGen" in out
    assert "pip install mlcommons-loadgen" in out
    assert "timer       edge_rt's own" in out
    table = run_json(capsys, *arguments)
    assert table["timer"] == "own"
    assert "pip install mlcommons-loadgen" in table["timer_note"]
    assert not cache.exists()
    assert main([*arguments, "--timer", "loadgen"]) == 1
    assert "extra 'bench'" in capsys.readouterr().err


@pytest.mark.usefixtures("no_loadgen")
def test_the_demo_needs_no_loadgen(demo_bundle: BundleFactory) -> None:
    """It measures as this does."""
    table = bench.measure("offline", demo_bundle("demo.null"), samples=4, warnings=["as before"])
    assert table["timer"] == "own"
    assert table["warnings"][0] == "as before"


def test_plot_draws_the_result_over_batch_size(
    demo_bundle: BundleFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.png"
    arguments = ("bench", "single-stream", str(demo_bundle("demo.cpu")), *SMALL)
    table = run_json(capsys, *arguments, "--plot", str(file))
    with Image.open(file) as image:
        assert image.format == "PNG"
    assert table["plot"] == str(file)
    assert [point["batch"] for point in table["batches"]] == [1, 2, 4, 8]
    assert all(point["throughput_tok_s"] > 0 for point in table["batches"])
    reading_ms = table["weights_bytes"] / (table["memory_gb_s"] * 1e6)
    assert table["weights_reading_ms"] == pytest.approx(reading_ms)


def test_what_would_fail_after_the_work_fails_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for arguments, message in (
        (["--plot", str(tmp_path / "x.pdf")], "does not end in .png"),
        (["--plot", str(tmp_path / "none/x.png")], "cannot be written"),
        (["--logs", str(tmp_path / "file")], "is no directory that can be written to"),
        (["--logs", str(tmp_path), "--timer", "own"], "--timer own writes none"),
    ):
        assert main(["bench", "offline", "no-bundle", *arguments]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "offline", "no-bundle", "--plot", str(tmp_path / "x.png")]) == 1
    assert "extra 'plot'" in capsys.readouterr().err


@pytest.mark.parametrize("scenario", ["single-stream", "offline"])
def test_ctrl_c_ends_it(demo_bundle: BundleFactory, cache: Path, scenario: str) -> None:
    command = [sys.executable, "-m", "edge_rt", "bench", scenario, str(demo_bundle("demo.null"))]
    with subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 100
        while not list(cache.glob("*/mlperf_log_detail.txt")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # into the run
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("scenario", ["single-stream", "offline", "server"])
def test_the_result_is_published(
    demo_bundle: BundleFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: str
) -> None:
    settings = tmp_path / "settings.toml"
    more = () if scenario == "server" else ("--timer", "own")
    with broker(tmp_path) as bus, listener(bus.port) as ears:
        settings.write_text(f'[mqtt]\nhost = "127.0.0.1"\nport = {bus.port}\ndevice = "box"\n')
        arguments = ("--publish", str(settings), *more)
        table = run_json(
            capsys, "bench", scenario, str(demo_bundle("demo.null")), *SMALL, *arguments
        )
        (heard,) = eventually(lambda: ears.on("edge_rt/box/bench"))
    schema.check(heard.topic, heard.fields)
    assert heard.fields["model"] == "demo.null"
    for name in ("scenario", "samples", "tokens", "throughput_tok_s", "latency_ms_p90"):
        assert heard.fields[name] == table[name]


def test_publishing_that_cannot_work_fails_before_the_work(
    demo_bundle: BundleFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "settings.toml"
    arguments = ["bench", "offline", str(demo_bundle("demo.null")), "--publish", str(settings)]
    for text, message in (
        ("", "names no broker"),
        ('[mqtt]\nhost = "x"\ntls = true\nca_file = "/nowhere"\n', "ca_file /nowhere"),
    ):
        settings.write_text(text)
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    settings.write_text(f'[mqtt]\nhost = "127.0.0.1"\nport = {free_port()}\n')
    assert main([*arguments, *SMALL, "--timer", "own"]) == 1
    said = capsys.readouterr()
    assert "tokens/s" in said.out  # the result is not lost
    assert "could not be published" in said.err
