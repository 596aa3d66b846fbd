"""Clients that go away, engines that fail, ends that are asked for."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.bundles import slow_bundle
from fakes.server import serve
from serve.conftest import Daemon, started

from edge_rt.core import FinishReason, Limits, Priority, Request, SamplingParams
from edge_rt.errors import EngineError
from edge_rt.loop import Loop
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner
from edge_rt.serve.completions import Completions
from edge_rt.serve.front import Front, Mailbox
from edge_rt.serve.schema import CompletionRequest
from edge_rt.serve.settings import ServerSettings, Settings
from edge_rt.serve.state import State
from edge_rt.telemetry.metrics import Metrics
from edge_rt.tokenizer import Tokenizer

LIMITS = Limits(2, 2, 64, 16, 2, 64, 64, 3072)
STEP_MS = 20


@pytest.fixture(scope="module")
def slow(demo_quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that serves one request at a time, STEP_MS for a token."""
    directory = tmp_path_factory.mktemp("slow")
    return slow_bundle(demo_quantized, directory, max_batch=1, step_ms=STEP_MS)


def open_stream(daemon: Daemon, tokens: int) -> socket.socket:
    """A connection on which a stream has been asked for."""
    body = {"prompt": [1, 2, 3], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", daemon.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_a_client_that_goes_away_frees_its_place(slow: Path) -> None:
    """llama.cpp #11720, #13262, #24496: it was generated for, also while it waited."""
    with started(slow) as daemon:
        running = open_stream(daemon, 400)
        assert b"200 OK" in running.recv(1000)
        queued = open_stream(daemon, 400)
        begun = time.monotonic()
        answers = []

        def ask() -> None:
            body = {"prompt": [5], "max_tokens": 3, "ignore_eos": True}
            answers.append(httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60))

        waiting = threading.Thread(target=ask)
        waiting.start()
        time.sleep(0.3)
        queued.close()
        running.close()
        waiting.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 3
        assert time.monotonic() - begun < 400 * STEP_MS / 1e3 / 2  # it did not wait for them


def test_sigterm_lets_streams_end(slow: Path) -> None:
    with started(slow) as daemon, open_stream(daemon, 60) as connection:
        received = connection.recv(1000)
        daemon.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = httpx.post(f"{daemon.url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert httpx.get(f"{daemon.url}/health").json() == {"status": "draining"}
        while piece := connection.recv(65536):
            received += piece
        assert received.count(b'"finish_reason":"length"') == 1
        assert b"data: [DONE]" in received
        assert daemon.process.wait(30) == 0


def test_health_answers_while_long_prompts_are_read(daemon: Daemon) -> None:
    """ik_llama.cpp #1210: a prompt blocked it. The limit, 100 ms, is measured elsewhere."""
    ended = threading.Event()

    def ask() -> None:
        body = {"prompt": [[token] * 500 for token in range(1, 17)], "max_tokens": 1}
        assert httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=300).is_success
        ended.set()

    asking = threading.Thread(target=ask)
    asking.start()
    during = 0
    with httpx.Client(base_url=daemon.url, timeout=1.0) as client:
        while not ended.is_set():
            assert client.get("/health").json() == {"status": "ready"}
            page = client.get("/metrics").text
            during += 'edge_rt_num_requests_running{model_name="demo.cpu"} 0.0' not in page
    asking.join()
    assert during > 3


@pytest.fixture(scope="module")
def tokenizer(demo_checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(demo_checkpoint)


class FailsOnce(NullRunner):
    """Fails in its second decode step."""

    calls = 0

    def decode(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise EngineError("the second step broke")
        return super().decode(*arguments, **options)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_once_serves_on(tokenizer: Tokenizer, stream: bool) -> None:
    body = {"prompt": [1, 2], "max_tokens": 8, "stream": stream}

    async def use(client: httpx.AsyncClient) -> None:
        failed = await client.post("/v1/completions", json=body)
        assert failed.status_code == (200 if stream else 500)
        assert "the second step broke" in failed.text
        assert '"code":"engine_error"' in failed.text
        good = await client.post("/v1/completions", json=body | {"stream": False})
        assert good.json()["usage"]["completion_tokens"] == 8

    serve(FailsOnce(LIMITS, NullOptions()), tokenizer, use)


def test_a_full_queue_and_a_server_that_is_not_ready(tokenizer: Tokenizer) -> None:
    state = State(Settings(ServerSettings(max_queue=3)))

    async def use(client: httpx.AsyncClient) -> None:
        several = {"prompt": [[1], [2], [3]], "max_tokens": 2}
        never = await client.post("/v1/completions", json=several | {"prompt": [[1]] * 4})
        assert never.status_code == 400
        assert "4 prompts are more than the 3 that the server takes" in never.text
        both = [client.post("/v1/completions", json=several) for _ in range(2)]
        fits, full = sorted(await asyncio.gather(*both), key=lambda one: one.status_code)
        assert (fits.status_code, full.status_code, full.headers["retry-after"]) == (200, 429, "1")
        assert full.json()["error"]["code"] == "queue_full"
        assert (await client.post("/v1/completions", json=several)).status_code == 200
        state.status = "loading"
        loading = await client.post("/v1/completions", json=several)
        assert (loading.status_code, loading.headers["retry-after"]) == (503, "5")
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200

    serve(NullRunner(LIMITS, NullOptions(step_ms=5.0)), tokenizer, use, state)


def test_a_request_that_takes_too_long_ends(tokenizer: Tokenizer) -> None:
    async def use(client: httpx.AsyncClient) -> None:
        body = {"prompt": [1], "max_tokens": 60, "timeout_s": 0.2}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["finish_reason"] == "timeout"
        assert 0 < answer["usage"]["completion_tokens"] < 60

    serve(NullRunner(LIMITS, NullOptions(step_ms=20.0)), tokenizer, use)


class Unclosable(NullRunner):
    """What no engine should do: its first step ends the thread, and so does its end."""

    def prefill(self, *arguments: Any, **options: Any) -> Any:
        raise SystemExit("gone")

    def close(self) -> None:
        raise RuntimeError("stuck")


def test_a_thread_that_dies_is_noticed(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        front = Front(Loop(Unclosable(LIMITS, NullOptions())), tokenizer, Metrics())
        front.start()
        mailbox = Mailbox()
        ticket = front.submit(Request("a", (1, 2), SamplingParams(2)), (), 0, mailbox)
        await asyncio.wait_for(front.ended(), 20)
        assert isinstance(front.failure, SystemExit)
        assert [piece.finish for _, piece in await mailbox.take()] == [FinishReason.ERROR]
        assert (ticket.open_rows, front.alive) == (0, 0)

    asyncio.run(run())


def test_a_stream_whose_requests_end_before_it_is_read_is_whole(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        front = Front(Loop(NullRunner(LIMITS, NullOptions())), tokenizer, Metrics())
        completions = Completions(front, tokenizer, "model", None)
        front.start()
        body = CompletionRequest(prompt=[[1], [2]], max_tokens=3, stream=True)
        call = await completions.understand(body, ServerSettings(), None)
        tickets = completions.submit(call)
        while front.alive:  # as where its client is slow, or its time is up at once
            await asyncio.sleep(0.01)
        events = b"".join([part async for part in completions.stream(call, tickets)])
        assert events.count(b'"index":0') == events.count(b'"index":1') == 3
        assert events.count(b'"finish_reason":"length"') == 2
        assert events.endswith(b"data: [DONE]\n\n")
        await front.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("of_body", "of_key", "expected"),
    [
        (None, None, Priority.INTERACTIVE),
        ("batch", None, Priority.BATCH),
        ("interactive", "batch", Priority.BATCH),
        ("batch", "interactive", Priority.BATCH),
        ("interactive", "interactive", Priority.INTERACTIVE),
    ],
)
def test_a_request_goes_before_others_only_if_its_key_may(
    tokenizer: Tokenizer, of_body: Any, of_key: Any, expected: Priority
) -> None:
    async def run() -> None:
        front = Front(Loop(NullRunner(LIMITS, NullOptions())), tokenizer, Metrics())
        completions = Completions(front, tokenizer, "model", None)
        body = CompletionRequest(prompt=[1], priority=of_body, timeout_s=86_400)
        before_ns = time.monotonic_ns()
        call = await completions.understand(body, ServerSettings(max_timeout_s=600), of_key)
        (one,) = call.requests
        assert one.priority is expected
        assert one.deadline_ns is not None
        assert 0 <= one.deadline_ns - before_ns - 600 * 10**9 < 60 * 10**9  # the settings' most

    asyncio.run(run())
