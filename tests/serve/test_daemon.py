"""The process: settings read again, sockets, ends that nobody asked for."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from fakes.waiting import eventually, free_port
from safetensors.numpy import load_file, save
from serve.conftest import Daemon, started, wait_until_ready

from edge_rt.golden import GOLDEN_FILE

BundleFactory = Callable[[str], Path]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "edge-rt.toml"
    path.write_text("[server]\nmax_queue = 2\n")
    return path


def status(daemon: Daemon, prompts: int) -> int:
    body = {"prompt": [[1]] * prompts, "max_tokens": 1}
    return httpx.post(f"{daemon.url}/v1/completions", json=body).status_code


def test_sighup_reads_the_settings_again(demo_bundle: BundleFactory, config: Path) -> None:
    with started(demo_bundle("demo.null"), "--config", str(config)) as daemon:
        assert (status(daemon, 2), status(daemon, 3)) == (200, 400)
        config.write_text("[server]\nmax_queue = 3\n")
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: status(daemon, 3) == 200)
        # What cannot work, or needs a restart, changes nothing.
        for text in ("[server]\nmax_queue = 0\n", "[server]\nmax_queue = 9\nunix_socket = 'x'\n"):
            config.write_text(text)
            daemon.process.send_signal(signal.SIGHUP)
            time.sleep(0.3)
            assert (status(daemon, 3), status(daemon, 4)) == (200, 400)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 0


def test_a_unix_socket(demo_bundle: BundleFactory, tmp_path: Path) -> None:
    path = tmp_path / "s"
    config = tmp_path / "edge-rt.toml"
    config.write_text(f"[server]\nunix_socket = '{path}'\n")
    command = ["serve", "--bundle", str(demo_bundle("demo.null")), "--config", str(config)]
    with subprocess.Popen([sys.executable, "-m", "edge_rt", *command]) as process:
        try:
            eventually(path.exists)  # httpx leaks a socket that it could not connect
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://edge-rt") as client:

                def is_ready() -> bool:
                    with contextlib.suppress(httpx.TransportError):
                        return client.get("/health").status_code == 200
                    return False

                eventually(is_ready)
                body = {"prompt": [1], "max_tokens": 3, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body)
                assert answer.json()["usage"]["completion_tokens"] == 3
            assert path.stat().st_mode & 0o777 == 0o660
            process.terminate()
            assert process.wait(30) == 0
            assert not path.exists()
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--bundle", "/nope"], 1, "/nope"),
        (["--bundle", "BUNDLE", "--host", "0.0.0.0"], 2, "name an api_keys_file"),  # noqa: S104
        (["--bundle", "BUNDLE", "--port", "99999"], 2, "port must be 0 to 65535"),
        (["--bundle", "BUNDLE", "--config", "/nope.toml"], 2, "/nope.toml cannot be read"),
        (["--bundle", "BUNDLE", "--host", "203.0.113.7"], 2, "can be reached"),
    ],
)
def test_what_cannot_be_served_is_said(
    demo_bundle: BundleFactory, arguments: list[str], code: int, message: str
) -> None:
    given = [str(demo_bundle("demo.null")) if one == "BUNDLE" else one for one in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "edge_rt", "serve", "--port", "0", *given]
        if "--port" not in given
        else [sys.executable, "-m", "edge_rt", "serve", *given],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken(demo_bundle: BundleFactory) -> None:
    bundle = demo_bundle("demo.null")
    with started(bundle) as daemon:
        command = ["serve", "--bundle", str(bundle), "--port", str(daemon.port)]
        done = subprocess.run(
            [sys.executable, "-m", "edge_rt", *command],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert "Address already in use; choose another" in done.stderr
        assert "Traceback" not in done.stderr


@contextlib.contextmanager
def changed(before: str, bundle: Path) -> Iterator[Daemon]:
    """A daemon of a process that has run `before` first; it may not be ready."""
    port = free_port()
    arguments = ["serve", "--bundle", str(bundle), "--port", str(port)]
    code = f"{before}\nimport edge_rt.cli, sys\nsys.exit(edge_rt.cli.main({arguments}))\n"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Daemon(process, port)
        finally:
            process.kill()


def test_it_loads_neither_torch_nor_the_build_side(demo_bundle: BundleFactory) -> None:
    say = """
import atexit, sys
atexit.register(lambda: sys.stderr.write("modules: " + " ".join(sys.modules)))
"""
    with changed(say, demo_bundle("demo.cpu")) as daemon:
        wait_until_ready(daemon)
        daemon.process.send_signal(signal.SIGTERM)
        _, errors = daemon.process.communicate(timeout=60)
    modules = set(errors.partition("modules: ")[2].split())
    assert {"edge_rt.loop", "edge_rt.serve.daemon", "onnxruntime"} <= modules
    roots = {name.split(".")[0] for name in modules}
    assert not roots & {"torch", "transformers", "onnx", "openai", "httpx", "pytest"}
    assert not modules & {"edge_rt.quant", "edge_rt.build", "edge_rt.model.checkpoint"}


def test_a_loop_that_dies_ends_the_process(demo_bundle: BundleFactory) -> None:
    """Whoever started it then starts it again; it must not stay and refuse."""
    breaks = """
from edge_rt.sched.scheduler import Scheduler
def check_integrity(self):
    assert not self._arrivals, "a page is lost"
Scheduler.check_integrity = check_integrity
"""
    with changed(breaks, demo_bundle("demo.null")) as daemon:
        wait_until_ready(daemon)
        assert status(daemon, 1) == 200
        _, errors = daemon.process.communicate(timeout=60)
    assert daemon.process.returncode == 1
    assert "the server ends: a page is lost" in errors


def test_an_engine_that_computes_something_else_never_serves(
    demo_bundle: BundleFactory, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(demo_bundle("demo.cpu"), bundle)
    golden = load_file(bundle / GOLDEN_FILE)
    golden["logits.0"] = golden["logits.0"] + np.float32(5)
    (bundle / GOLDEN_FILE).write_bytes(save(golden))
    done = subprocess.run(
        [sys.executable, "-m", "edge_rt", "serve", "--bundle", str(bundle), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "golden logits differ" in done.stderr
    assert "ready" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_client_that_does_not_come_to_its_end(demo_bundle: BundleFactory, config: Path) -> None:
    """Neither half a head nor half a body holds a connection for ever."""
    config.write_text("[server]\nslow_client_s = 0.5\n")
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    with started(demo_bundle("demo.null"), "--config", str(config)) as daemon:
        for sent, answer in (
            (b"", b""),
            (post, b""),
            (post + b"content-length: 100\r\n\r\n{", b"HTTP/1.1 408 "),
        ):
            address = ("127.0.0.1", daemon.port)
            with socket.create_connection(address, timeout=30) as connection:
                connection.sendall(sent)
                received = b""
                while piece := connection.recv(4096):
                    received += piece
                assert received.startswith(answer)
                assert bool(received) == bool(answer)


def test_a_client_that_takes_nothing(
    demo_bundle: BundleFactory, config: Path, tmp_path: Path
) -> None:
    """It is cut off; one that asks again and again on one connection is not."""
    config.write_text("[server]\nslow_client_s = 0.5\n")
    body = json.dumps(  # an answer of 10 MB, more than the kernel takes off the daemon's hands
        {"prompt": [[1]] * 64, "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": 0}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    log = tmp_path / "log"
    with (
        log.open("wb") as stderr,
        started(demo_bundle("demo.null"), "--config", str(config), stderr=stderr) as daemon,
        httpx.Client(base_url=daemon.url, timeout=30) as busy,
        socket.socket() as taking_nothing,
    ):
        taking_nothing.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        taking_nothing.connect(("127.0.0.1", daemon.port))
        taking_nothing.sendall(head % len(body) + body)
        before = busy.get("/health").extensions["network_stream"]
        eventually(lambda: busy.get("/health").is_success and b"status=499" in log.read_bytes())
        for _ in range(30):  # for longer than a client may be silent
            time.sleep(0.1)
            assert busy.get("/health").extensions["network_stream"] is before
    assert b"ERROR" not in log.read_bytes()


def test_stopped_while_it_loads(demo_bundle: BundleFactory) -> None:
    slow = """
import time
from edge_rt.serve import daemon
daemon.selfcheck.check = lambda *_: time.sleep(600)
"""
    with changed(slow, demo_bundle("demo.null")) as daemon:
        eventually(lambda: _health(daemon) == 503)
        daemon.process.send_signal(signal.SIGTERM)
        _, errors = daemon.process.communicate(timeout=30)
    assert daemon.process.returncode == 0
    assert "stopped while loading" in errors


def test_told_twice_to_stop(demo_bundle: BundleFactory, config: Path) -> None:
    """The second time it does not wait for what is being served."""
    slow = """
import time
from edge_rt.runtime.null import NullRunner
decode = NullRunner.decode
def slowly(*arguments, **options):
    time.sleep(0.05)
    return decode(*arguments, **options)
NullRunner.decode = slowly
"""
    with changed(slow, demo_bundle("demo.null")) as daemon:
        wait_until_ready(daemon)
        body = {"prompt": [1], "max_tokens": 500, "ignore_eos": True, "stream": True}
        url = f"{daemon.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=30) as answer:
            events = answer.iter_lines()
            next(events)
            daemon.process.send_signal(signal.SIGTERM)
            eventually(lambda: _health(daemon) == 503)
            daemon.process.send_signal(signal.SIGTERM)
            assert any('"finish_reason":"cancelled"' in event for event in events)
        _, errors = daemon.process.communicate(timeout=30)
    assert daemon.process.returncode == 0
    assert "told to stop again; cancelled: 1" in errors


def _health(daemon: Daemon) -> int:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{daemon.url}/health", timeout=5).status_code
    return 0


def test_the_names_and_the_scheduler_of_the_settings(
    demo_bundle: BundleFactory, config: Path
) -> None:
    config.write_text("[server]\nmodel_name = 'gpt-j'\n[scheduler]\nbatching_window_ms = 300.0\n")
    with started(demo_bundle("demo.null"), "--config", str(config)) as daemon:
        body = {"model": "gpt-j", "prompt": [1], "max_tokens": 1, "ignore_eos": True}
        begun = time.monotonic()
        assert httpx.post(f"{daemon.url}/v1/completions", json=body).json()["model"] == "gpt-j"
        assert time.monotonic() - begun >= 0.3
        assert 'edge_rt_num_requests_running{model_name="gpt-j"}' in (
            httpx.get(f"{daemon.url}/metrics").text
        )


def test_a_fault_of_ours_is_answered_in_form(demo_bundle: BundleFactory) -> None:
    breaks = """
from edge_rt.serve.completions import Completions
async def understand(*_):
    1 / 0
Completions.understand = understand
"""
    with changed(breaks, demo_bundle("demo.null")) as daemon:
        wait_until_ready(daemon)
        for _ in range(2):
            answer = httpx.post(f"{daemon.url}/v1/completions", json={"prompt": [1]})
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
        daemon.process.terminate()
        _, errors = daemon.process.communicate(timeout=30)
    assert daemon.process.returncode == 0
    assert errors.count("ZeroDivisionError") == 2
    assert errors.count("edge_rt.request: status=500") == 2


def test_a_log_that_nobody_reads(demo_bundle: BundleFactory) -> None:
    """A pipe takes 64 kB; the daemon is neither to wait for its reader nor to stay for it."""
    with changed("", demo_bundle("demo.null")) as daemon:
        wait_until_ready(daemon)
        with httpx.Client(base_url=daemon.url, timeout=20) as client:
            for _ in range(1500):
                assert client.post("/v1/completions", json={}).status_code == 422
        daemon.process.terminate()
        assert daemon.process.wait(30) == 0


def test_a_client_that_takes_nothing_does_not_hold_up_the_end(
    demo_bundle: BundleFactory, tmp_path: Path
) -> None:
    body = json.dumps(
        {"prompt": [[1]] * 64, "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": 0}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    log = tmp_path / "log"
    with (
        log.open("wb") as stderr,
        started(demo_bundle("demo.null"), stderr=stderr) as daemon,
        socket.socket() as taking_nothing,
    ):
        taking_nothing.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        taking_nothing.connect(("127.0.0.1", daemon.port))
        taking_nothing.sendall(head % len(body) + body)
        idle = 'edge_rt_num_requests_running{model_name="demo.null"} 0.0'
        done = (
            'edge_rt_sequences_finished_total{finished_reason="length",model_name="demo.null"} 64.0'
        )
        eventually(
            lambda: idle in (page := httpx.get(f"{daemon.url}/metrics").text) and done in page
        )
        daemon.process.terminate()
        assert daemon.process.wait(30) == 0
    assert b"status=499" in log.read_bytes()
    assert b"ERROR" not in log.read_bytes()
