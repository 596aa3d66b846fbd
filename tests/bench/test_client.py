"""The HTTP client: what it notes of a stream, and what it says of an answer that is none."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from serve.conftest import started

from edge_rt.bench.client import Address, Client, Refused, _Answer
from edge_rt.bench.timer import Timing
from edge_rt.core import FinishReason
from edge_rt.errors import ConfigError, EngineError
from edge_rt.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(300)

BundleFactory = Callable[[str], Path]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(text: str | None, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices} | more).encode() + b"\n\n"


def usage(completion: int) -> bytes:
    return event(None, usage={"prompt_tokens": 7, "completion_tokens": completion})


DONE = b"data: [DONE]\n\n"
WHOLE = event("a") + event("\n\n") + event("c", "length") + usage(3) + DONE


def timing() -> Timing:
    return Timing("one", time.monotonic_ns())


def serve(handler: Handler, use: Callable[[Client], Awaitable[None]]) -> None:
    """Run `use` with a client of a server that answers everything by `handler`."""

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with Client(Address(f"http://127.0.0.1:{port}")) as client:
                await use(client)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def streaming(content: bytes, *, breaks: bool = False) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(content)
        if breaks:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handler


@pytest.mark.parametrize(
    ("url", "base", "socket"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", None),
        ("http://host:8000/", "http://host:8000", None),
        ("http://host:8000/v1/", "http://host:8000", None),
        ("https://host", "https://host", None),
        ("http://[::1]:8000", "http://[::1]:8000", None),
        ("unix:/run/s", "http://localhost", "/run/s"),
        ("unix:///run/s", "http://localhost", "/run/s"),
    ],
)
def test_where_a_daemon_is(url: str, base: str, socket: str | None) -> None:
    found = Address.parse(url)
    assert (found.base, found.socket) == (base, socket)
    assert Address.parse(str(found)) == found


@pytest.mark.parametrize(
    "url",
    ["unix:s", "unix:", "ftp://host", "http://", "http://host:x", "http://host/v2", "http://h?a=1"],
)
def test_what_is_no_daemons_url(url: str) -> None:
    with pytest.raises(ConfigError, match="write it as"):
        Address.parse(url)


def test_tokens_are_counted_wherever_the_stream_is_cut() -> None:
    for size in (1, 7, len(WHOLE)):
        one, first = timing(), []
        answer = _Answer(one, lambda first=first: first.append(0))
        for start in range(0, len(WHOLE), size):
            answer.take(WHOLE[start : start + size])
        assert answer.prompt_tokens(3) == 7
        assert (len(one.token_ns), one.finish, len(first)) == (3, FinishReason.LENGTH, 1)
        assert one.submitted_ns <= one.token_ns[0] <= one.token_ns[-1] <= one.ended_ns


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (event("a") + DONE, "got 1 of 3 tokens and no end"),
        (WHOLE.removesuffix(DONE), "got 3 of 3 tokens and no end"),
        (event("a", "length") + usage(1) + DONE, "got 1 of 3 tokens and finish_reason length"),
        (event("a", "timeout") + usage(1) + DONE, "finish_reason timeout"),
        (event("a") + event("b", "stop") + usage(3) + DONE, "got 2 of 3 tokens and .* stop"),
        (WHOLE.replace(usage(3), usage(4)), "3 events and usage says 4"),
        (WHOLE.replace(usage(3), b""), "usage says None"),
        (event("a") + b'data: {"choices": [], "usage": 7}\n\n', "not an event of a completion"),
        (event("a") + b'data: {"error": {"message": "lost"}}\n\n' + DONE, "failed: lost"),
        (b"data: {]\n\n" + DONE, "not an event of a completion"),
        (b"", "got 0 of 3 tokens"),
    ],
)
def test_half_an_answer_is_no_measurement(content: bytes, message: str) -> None:
    async def use(client: Client) -> None:
        with pytest.raises(EngineError, match=message):
            await client.complete("x", 3, timing())

    serve(streaming(content), use)


def test_a_connection_that_breaks() -> None:
    async def use(client: Client) -> None:
        with pytest.raises(EngineError, match=r"the connection to http://127.0.0.1:\d+ broke"):
            await client.complete("x", 3, timing())

    serve(streaming(event("a"), breaks=True), use)


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (401, ConfigError, "no key of yours; give a key by --api-key-file"),
        (429, Refused, "refused a request with 429: no key"),
        (500, EngineError, "refused a request with 500: no key"),
        (503, EngineError, "refused a request with 503: no key"),
    ],
)
def test_refusals(status: int, kind: type[Exception], message: str) -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no key of yours"}}, status=status)

    async def use(client: Client) -> None:
        with pytest.raises(kind, match=message) as caught:
            await client.complete("x", 3, timing())
        assert type(caught.value) is kind

    serve(handler, use)


def test_a_daemon_that_is_loading() -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.json_response({"status": "loading"}, status=503)

    async def use(client: Client) -> None:
        with pytest.raises(EngineError, match=r"is not ready .* answers 503"):
            await client.check()

    serve(handler, use)


def test_a_real_daemon(demo_bundle: BundleFactory) -> None:
    bundle = demo_bundle("demo.null")
    text = "def read_file(path"

    async def run(url: str) -> None:
        one = timing()
        async with Client(Address.parse(url)) as client:
            await client.check()
            counted = await client.complete(text, 5, one)
        assert counted == len(Tokenizer.load(bundle).encode(text))
        assert len(one.token_ns) == 5
        assert one.finish is FinishReason.LENGTH

    with started(bundle) as daemon:
        asyncio.run(run(daemon.url))

    async def nobody(url: str) -> None:
        async with Client(Address.parse(url)) as client:
            with pytest.raises(EngineError, match=r"no daemon answers at .* edge-rt serve"):
                await client.check()

    asyncio.run(nobody(daemon.url))
    asyncio.run(nobody("unix:/nowhere/s"))
