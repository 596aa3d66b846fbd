"""`edge-rt bench server` as a user meets it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.bundles import slow_bundle
from fakes.command import run_json
from serve.conftest import Daemon, started

from edge_rt.bench.extent import Extent
from edge_rt.cli import bench_server, main

pytestmark = pytest.mark.timeout(300)

BundleFactory = Callable[[str], Path]
SMALL = ("--samples", "20", "--max-tokens", "4", "--prompt-tokens", "16")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return tmp_path / "cache/edge-rt/loadgen"


@pytest.fixture(scope="module")
def null(demo_bundle: BundleFactory) -> Iterator[Daemon]:
    with started(demo_bundle("demo.null")) as one:
        yield one


@pytest.fixture(scope="module")
def slow(demo_quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that serves one request at a time, 20 ms for a step."""
    directory = tmp_path_factory.mktemp("slow")
    return slow_bundle(demo_quantized, directory, max_batch=1, step_ms=20)


def processes(of: Path) -> list[int]:
    """Those that have this path in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and str(of).encode() in words:
            found.append(int(process.name))
    return found


@contextlib.contextmanager
def running(
    bundle: Path, place: Path, timer: str, *, wait: bool = True
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command, in the midst of its measurement if we `wait`, and its daemon."""
    own = place / "bundle"
    shutil.copytree(bundle, own)
    options = ["--samples", "5000", "--max-tokens", "400", "--rate", "0.5", "--timer", timer]
    with subprocess.Popen(
        [sys.executable, "-m", "edge_rt", "bench", "server", str(own), *options, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:

        def until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 100
            while not condition():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)

        try:
            until(lambda: bool(processes(own)))
            (daemon,) = processes(own)
            if wait:
                until(lambda: is_warm(daemon))
            yield process, daemon
        finally:
            process.kill()
            for one in processes(own):
                os.kill(one, signal.SIGKILL)


def is_warm(daemon: int) -> bool:
    """Whether it has answered a long request, which is the last of the warm-up."""
    log = Path(f"/proc/{daemon}/fd/2").readlink()
    return "completion_tokens=400" in log.read_text(encoding="utf-8")


def check_table(table: dict[str, Any], timer: str) -> None:
    assert (table["scenario"], table["timer"]) == ("server", timer)
    assert table["refused"] == 0
    assert table["tokens"] == 4 * table["samples"]
    assert 0 < table["ttft_ms_p50"] <= table["ttft_ms_p99"] <= table["latency_ms_p99"]
    assert 0 < table["latency_ms_p50"] <= table["latency_ms_p90"] <= table["latency_ms_p99"]
    assert table["tpot_ms_p50"] >= 0
    assert table["throughput_tok_s"] == pytest.approx(table["tokens"] / table["duration_s"])
    assert table["prompt_tokens_mean"] == pytest.approx(16, rel=0.4)
    assert ("loadgen" in table) is (timer == "loadgen")


def test_the_share_of_the_capacity_is_said() -> None:
    table = {
        "url": "u",
        "samples": 3,
        "prompt_tokens_mean": 4.0,
        "max_tokens": 5,
        "duration_s": 6.0,
        "refused": 0,
        "rate_per_s": 7.0,
        "capacity_per_s": 10.0,
    }
    assert "at 7 a second (70 % of the 10 that it does" in bench_server.heading(table)


@pytest.mark.parametrize("timer", ["own", "loadgen"])
def test_a_running_daemon(null: Daemon, capsys: pytest.CaptureFixture[str], timer: str) -> None:
    arguments = ("bench", "server", null.url, *SMALL, "--timer", timer, "--rate", "40")
    table = run_json(capsys, *arguments)
    check_table(table, timer)
    assert (table["url"], table["rate_per_s"], table["samples"]) == (null.url, 40, 20)
    assert "capacity_per_s" not in table
    assert main(list(arguments)) == 0
    out = capsys.readouterr().out
    assert f"server, {null.url}: 20 requests of" in out
    assert "+ 4 tokens at 40 a second in" in out


@pytest.mark.parametrize("timer", ["own", "loadgen"])
def test_a_bundle_is_served_for_as_long_as_it_is_measured(
    demo_bundle: BundleFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str], timer: str
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(demo_bundle("demo.cpu"), bundle)
    table = run_json(capsys, "bench", "server", str(bundle), *SMALL, "--timer", timer)
    check_table(table, timer)
    assert (table["bundle"], table["engine"], table["max_batch"]) == (str(bundle), "ort", 8)
    assert table["rate_per_s"] == pytest.approx(0.7 * table["capacity_per_s"], rel=0.01)
    assert processes(bundle) == []
    assert table["url"].startswith("http://127.0.0.1:")
    assert main(["bench", "server", table["url"]]) == 1
    assert "no daemon answers at" in capsys.readouterr().err


def test_without_samples_it_goes_on_for_64_requests_and_the_time(
    null: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_rt.bench.extent.DEFAULT", Extent(64, 2.0))
    more = ("--max-tokens", "2", "--rate", "50", "--timer", "own")
    assert run_json(capsys, "bench", "server", null.url, *more)["samples"] == 110


def test_a_load_that_is_too_much_is_said(
    slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "edge-rt.toml"
    config.write_text("[server]\nmax_queue = 8\n")
    load = ("--samples", "64", "--max-tokens", "4", "--rate", "30")
    with started(slow, "--config", str(config)) as daemon:
        command = ("bench", "server", daemon.url, *load, "--timer")
        table = run_json(capsys, *command, "own")
        assert table["refused"] > 0
        assert table["samples"] == 64 - table["refused"]
        assert any("refused" in warning for warning in table["warnings"])
        assert main([*command, "loadgen"]) == 1
        assert "LoadGen knows answers only" in capsys.readouterr().err
    with started(slow) as daemon:
        table = run_json(capsys, "bench", "server", daemon.url, *load, "--timer", "own")
    assert table["refused"] == 0
    assert any("its queue grew" in warning for warning in table["warnings"])


def test_api_keys(
    demo_bundle: BundleFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, config, key = (tmp_path / name for name in ("keys.toml", "edge-rt.toml", "key"))
    keys.write_text(f'[[key]]\nname = "a"\nsha256 = "{hashlib.sha256(b"secret").hexdigest()}"\n')
    keys.chmod(0o600)
    config.write_text(f"[server]\napi_keys_file = '{keys}'\n")
    key.write_text("secret\n")
    with started(demo_bundle("demo.null"), "--config", str(config)) as daemon:
        command = ["bench", "server", daemon.url, *SMALL, "--rate", "40"]
        assert main(command) == 2
        assert "--api-key-file" in capsys.readouterr().err
        for timer in ("own", "loadgen"):
            arguments = (*command, "--timer", timer, "--api-key-file", str(key))
            assert run_json(capsys, *arguments)["samples"] == 20
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert run_json(capsys, *command)["samples"] == 20
        key.write_text("wrong")
        assert main([*command, "--api-key-file", str(key)]) == 2
        assert "wrong API key" in capsys.readouterr().err


def test_what_cannot_work_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, message in (
        (["server", "http://127.0.0.1:1"], 1, "no daemon answers at http://127.0.0.1:1"),
        (["server", "unix:/nowhere/s"], 1, "no daemon answers at unix:/nowhere/s"),
        (["server", "ftp://x"], 2, "is no daemon's URL"),
        (["server", str(tmp_path / "none")], 1, "none"),
        (["server", "http://x:1", "--plot", "x.png"], 2, "--plot draws"),
        (["server", "http://x:1", "--api-key-file", "/nowhere"], 2, "cannot be read"),
        (["server", "http://x:1", "--api-key-file", os.devnull], 2, "does not hold one API key"),
        (["offline", "http://x:1"], 2, "only server takes a URL"),
        (["offline", "x", "--rate", "1"], 2, "are for server"),
    ):
        assert main(["bench", *arguments]) == code
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    for rate in ("0", "-1", "nan", "inf", "x"):
        with pytest.raises(SystemExit):
            main(["bench", "server", "x", f"--rate={rate}"])


@pytest.mark.parametrize("timer", ["own", "loadgen"])
def test_a_started_daemon_that_dies(slow: Path, tmp_path: Path, timer: str) -> None:
    with running(slow, tmp_path, timer) as (process, daemon):
        os.kill(daemon, signal.SIGKILL)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (1, "")
    assert "the daemon has ended with -9; it said last" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("timer", ["own", "loadgen"])
def test_an_interrupt_ends_it_and_its_daemon(
    slow: Path, tmp_path: Path, timer: str, number: signal.Signals
) -> None:
    with running(slow, tmp_path, timer) as (process, _):
        process.send_signal(number)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == ({signal.SIGINT: 130, signal.SIGTERM: 143}[number], "")
    assert "Traceback" not in err
    assert processes(tmp_path / "bundle") == []


def test_an_interrupt_while_the_daemon_loads(slow: Path, tmp_path: Path) -> None:
    with running(slow, tmp_path, "own", wait=False) as (process, _):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
    assert (process.returncode, "Traceback" in err) == (130, False)
    assert processes(tmp_path / "bundle") == []


def test_the_json_object_is_one(null: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = ["bench", "server", null.url, *SMALL, "--rate", "40", "--json", str(file)]
    assert main(command) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["url"] == null.url
