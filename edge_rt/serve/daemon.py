"""The daemon: loads the engine, checks it, serves, drains, ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from edge_rt.bundle import Bundle
from edge_rt.loop import Loop
from edge_rt.runtime.engines import open_engine
from edge_rt.serve.app import State, make_app
from edge_rt.serve.completions import Completions
from edge_rt.serve.front import Front
from edge_rt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where and what to serve."""

    bundle: Path
    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 30.0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


async def serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    state = State()
    config = uvicorn.Config(
        make_app(state),
        host=options.host,
        port=options.port,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    stop = asyncio.Event()
    aio = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        aio.add_signal_handler(number, stop.set)
    serving = asyncio.ensure_future(server.serve())
    bundle = Bundle.load(options.bundle)
    engine = await asyncio.to_thread(open_engine, bundle)
    tokenizer = Tokenizer.load(options.bundle)
    front = Front(Loop(engine), tokenizer)
    model = bundle.path.resolve().name
    state.front = front
    state.completions = Completions(front, tokenizer, model, bundle.manifest.model.eos_token_id)
    front.start()
    state.status = "ready"
    logger.warning("serving %s on http://%s:%d", model, options.host, options.port)
    waits = [asyncio.ensure_future(wait) for wait in (stop.wait(), front.ended())]
    await asyncio.wait({*waits, serving}, return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if front.failure is not None or serving.done():
        state.status, code = "failed", 1
    else:
        state.status = "draining"
        with_limit = aio.time() + options.drain_s
        while front.alive and aio.time() < with_limit:
            await asyncio.sleep(0.05)
    await front.stop()
    server.should_exit = True
    await serving
    return code
