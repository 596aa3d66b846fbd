"""The application over an engine, in this process and without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from edge_rt.loop import Loop
from edge_rt.runtime.base import Runner
from edge_rt.serve.app import make_app
from edge_rt.serve.completions import Completions
from edge_rt.serve.front import Front
from edge_rt.serve.state import State
from edge_rt.tokenizer import Tokenizer

Use = Callable[[httpx.AsyncClient], Awaitable[None]]


def serve(runner: Runner, tokenizer: Tokenizer, use: Use, state: State | None = None) -> None:
    """Run `use` with a client of it; then nothing may be left alive."""
    state = state or State()

    async def run() -> None:
        front = state.front = Front(Loop(runner), tokenizer, state.metrics)
        state.completions = Completions(front, tokenizer, "model", None)
        front.start()
        state.status = "ready"
        transport = httpx.ASGITransport(make_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await use(client)
        await front.stop()
        assert front.alive == 0
        assert front.failure is None

    asyncio.run(run())
