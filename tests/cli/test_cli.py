"""The command line as a user meets it: text, --json, exit codes, and errors that help."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.command import run_json

from edge_rt import __version__
from edge_rt.cli import main

BundleFactory = Callable[[str], Path]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"edge-rt {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["generate", "bundle"],
        ["generate", "bundle", "--prompt", "x", "--max-tokens", "0"],
        ["generate", "bundle", "--prompt", "x", "--max-tokens", "²"],
        ["bench", "sideways", "bundle"],
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_quantize_build_verify(
    demo_checkpoint: Path,
    small_recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quantized, bundle = str(tmp_path / "quantized"), str(tmp_path / "bundle")
    made = run_json(
        capsys,
        "quantize",
        str(demo_checkpoint),
        "--out",
        quantized,
        "--recipe",
        str(small_recipe),
    )
    assert made["bits"] == 4
    assert made["group_size"] == 128
    # 4 of 384 and 16 of 1536 channels: 1 %, rounded up.
    assert made["fp16_fraction"] == pytest.approx(4 / 384)
    built = run_json(capsys, "build", quantized, "--recipe", "demo.cpu", "--out", bundle)
    assert built["engine"] == "ort"
    verified = run_json(capsys, "verify", bundle)
    assert verified["golden"]["positions"] == 32
    assert verified["golden"]["mean_kl"] < 0.002


def test_verify_names_the_altered_file(
    demo_bundle: BundleFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(demo_bundle("demo.cpu"), bundle)
    weights = bytearray((bundle / "weights.bin").read_bytes())
    weights[len(weights) // 2] ^= 1
    (bundle / "weights.bin").write_bytes(weights)
    assert main(["verify", str(bundle)]) == 1
    captured = capsys.readouterr()
    assert "weights.bin was altered" in captured.err
    assert "edge-rt build" in captured.err
    assert captured.out == ""


def test_verify_says_that_the_null_engine_has_no_logits(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(demo_bundle("demo.null"))]) == 0
    assert "no golden logits" in capsys.readouterr().out


def test_json_to_a_file_leaves_the_text(
    demo_bundle: BundleFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    assert main(["verify", str(demo_bundle("demo.null")), "--json", str(file)]) == 0
    assert "matches the manifest" in capsys.readouterr().out
    assert json.loads(file.read_text())["engine"] == "null"


def test_json_file_that_cannot_be_written(
    demo_bundle: BundleFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "none" / "result.json"
    assert main(["verify", str(demo_bundle("demo.null")), "--json", str(file)]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["verify", "nowhere"], 1, "is no bundle"),
        (["quantize", "nowhere", "--out", "q"], 1, "nowhere"),
        (["build", "nowhere", "--recipe", "demo.cpu", "--out", "b"], 1, "no quantized checkpoint"),
        (["build", "nowhere", "--recipe", "demo.cpi", "--out", "b"], 2, "did you mean 'demo.cpu'?"),
    ],
)
def test_errors_say_what_to_do(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    table = run_json(capsys, "doctor")
    assert table["problems"] == []
    assert "CPUExecutionProvider" in table["onnxruntime_providers"]
    assert "demo.cpu" in table["recipes_engines"]
    assert table["memory_available_bytes"] > 0


def test_doctor_names_the_command_that_mends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edge_rt.runtime.engines.installed_libraries", dict)
    assert main(["doctor"]) == 1
    assert "-m pip install onnxruntime" in capsys.readouterr().out


def test_doctor_says_why_onnxruntime_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('libcudart.so.12: not there')")
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "libcudart.so.12: not there" in printed
    assert "--force-reinstall onnxruntime" in printed


def test_help_loads_no_engine() -> None:
    """Neither ONNX Runtime nor NumPy: a broken extra must not break --help."""
    code = (
        "import sys\nfrom edge_rt.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "loaded = {'numpy', 'onnx', 'onnxruntime', 'torch'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_run_side_loads_nothing_of_the_build_side(demo_bundle: BundleFactory) -> None:
    code = (
        "import sys\nfrom edge_rt.cli import main\n"
        f"assert main(['generate', {str(demo_bundle('demo.cpu'))!r}, '--prompt', 'x']) == 0\n"
        "loaded = {'torch', 'transformers', 'onnx', 'edge_rt.quant', 'edge_rt.build', "
        "'edge_rt.model.checkpoint'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def edge_rt(
    *arguments: str, home: Path, without: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own; `without` names libraries that it shall lack."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({without!r}))\n"
        "from edge_rt.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "XDG_CACHE_HOME"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=environment | {"HOME": str(home)},
    )


@pytest.mark.parametrize("command", ["doctor", "generate"])
def test_nothing_is_left_in_the_home_directory(
    demo_bundle: BundleFactory, tmp_path: Path, command: str
) -> None:
    """ONNX Runtime's telemetry would leave a device id there."""
    rest = [str(demo_bundle("demo.cpu")), "--prompt", "x"] if command == "generate" else []
    done = edge_rt(command, *rest, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", ["demo.cpu", "demo.null"])
def test_without_onnx_the_error_says_how_to_install_it(
    demo_quantized: Path, tmp_path: Path, recipe: str
) -> None:
    out = tmp_path / "b"
    arguments = ("build", str(demo_quantized), "--recipe", recipe, "--out", str(out))
    done = edge_rt(*arguments, home=tmp_path, without=("onnx",))
    assert done.returncode == 1
    assert done.stderr.startswith("edge-rt: onnx is not installed; install with: ")
    assert "-m pip install onnx" in done.stderr


def test_without_the_libraries_of_serve_all_are_named(tmp_path: Path) -> None:
    libraries = ("msgspec", "starlette", "uvicorn")
    done = edge_rt("serve", "--bundle", str(tmp_path), home=tmp_path, without=libraries)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    named = line.partition("-m pip install ")[2].partition(" (")[0]
    assert sorted(named.split()) == sorted(libraries)


def test_json_target_is_checked_before_the_work(
    demo_quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b"
    arguments = ["build", str(demo_quantized), "--recipe", "demo.null", "--out", str(out)]
    assert main([*arguments, "--json", str(tmp_path / "no" / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not out.exists()


def test_a_missing_file_is_named_before_the_engine_starts(
    demo_bundle: BundleFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(demo_bundle("demo.cpu"), bundle)
    (bundle / "weights.bin").unlink()
    assert main(["generate", str(bundle), "--prompt", "x"]) == 1
    assert "weights.bin is missing; rebuild" in capsys.readouterr().err


def test_more_samples_than_the_text_has(
    demo_bundle: BundleFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offline", str(demo_bundle("demo.null")), "--samples", "2000000"]) == 2
    assert "ask for fewer" in capsys.readouterr().err


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edge_rt", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout == f"edge-rt {__version__}\n"


def test_a_terminated_run_leaves_what_is_whole(demo_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["quantize", str(demo_checkpoint), "--out", str(tmp_path / "q")]
    with subprocess.Popen([sys.executable, "-m", "edge_rt", *arguments]) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".q.unfinished-*/*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == 143
    # Nothing, or the work to go on from, if the file that was seen became whole just before.
    left = list(tmp_path.iterdir())
    assert all(directory.name.startswith(".q.unfinished-") for directory in left)
    files = [file for directory in left for file in directory.rglob("*") if file.is_file()]
    assert bool(files) == bool(left)
    assert not [file for file in files if file.name.startswith(".")]


def test_without_paho_the_error_says_how_to_install_it(
    demo_bundle: BundleFactory, tmp_path: Path
) -> None:
    bundle = str(demo_bundle("demo.null"))
    done = edge_rt("serve", "--bundle", bundle, home=tmp_path, without=("paho",))
    assert done.returncode == 1
    assert done.stderr.startswith("edge-rt: paho-mqtt is not installed; install with: ")
