"""The daemon: loads the engine, serves, reloads its settings, drains, ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from edge_rt.bundle import Bundle
from edge_rt.errors import ConfigError
from edge_rt.loop import Loop
from edge_rt.runtime import selfcheck
from edge_rt.runtime.base import Runner
from edge_rt.runtime.engines import open_engine
from edge_rt.serve import settings as config
from edge_rt.serve.app import make_app
from edge_rt.serve.cache import ResponseCache
from edge_rt.serve.completions import Completions
from edge_rt.serve.endpoint import CompletionsEndpoint
from edge_rt.serve.front import Front
from edge_rt.serve.journal import JournalFormatter
from edge_rt.serve.keys import Keys
from edge_rt.serve.listen import listen
from edge_rt.serve.settings import Settings
from edge_rt.serve.state import State
from edge_rt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TICK_S = 1.0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


class Daemon:
    """One bundle served at one address.

    `read_settings` reads them anew for SIGHUP; ConfigError if they cannot work.
    """

    def __init__(self, bundle: Path, read_settings: Callable[[], Settings]) -> None:
        self._path, self._read_settings = bundle, read_settings
        found = read_settings()
        name, cache = bundle.resolve().name, ResponseCache(found.cache.responses)
        self._state = State(found, name, _keys(found), cache=cache)

    async def serve(self) -> int:
        """Serve until SIGTERM or SIGINT; the exit code."""
        state, stop = self._state, asyncio.Event()
        set_up_logging(state.settings.log)
        aio = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            aio.add_signal_handler(number, stop.set)
        aio.add_signal_handler(signal.SIGHUP, self.reload)
        app, endpoint = make_app(state)
        bound, where = listen(state.settings.server)
        server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=5,
            )
        )
        serving = asyncio.ensure_future(server.serve([bound]))
        ticking = asyncio.ensure_future(_tick(endpoint))
        try:
            front = await self._load()
            logger.info("ready: %s at %s", state.model, where)
            ended = asyncio.ensure_future(front.ended())
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait({serving, ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                await self._drain(front)
            else:
                state.status = "failed"
                logger.error("the server ends: %s", front.failure or "it cannot listen any more")
            await front.stop()
        finally:
            ticking.cancel()
            server.should_exit = True
            await serving
        return 0 if stop.is_set() else 1

    def reload(self) -> None:
        """Take over what SIGHUP may change, and name what it may not."""
        state = self._state
        try:
            found = self._read_settings()
            keys = _keys(found)
        except ConfigError as error:
            logger.error("settings stay as they were: %s", error)
            return
        changed, fixed = config.changes(state.settings, found)
        if fixed:
            logger.error("settings stay as they were: %s need a restart", ", ".join(fixed))
            return
        state.settings, state.keys = found, keys
        set_up_logging(found.log)
        logger.info("settings read again; changed: %s", ", ".join(changed) or "none but keys")

    async def _load(self) -> Front:
        state = self._state
        bundle = Bundle.load(self._path)
        engine = await asyncio.to_thread(_open, bundle)
        tokenizer = Tokenizer.load(self._path)
        front = state.front = Front(Loop(engine), tokenizer, state.metrics)
        eos = bundle.manifest.model.eos_token_id
        state.completions = Completions(front, tokenizer, state.model, eos)
        front.start()
        state.status = "ready"
        return front

    async def _drain(self, front: Front) -> None:
        state, aio = self._state, asyncio.get_running_loop()
        state.status = "draining"
        logger.info("draining: %d requests are being served", front.alive)
        limit = aio.time() + state.settings.server.drain_s
        while front.alive and aio.time() < limit:
            await asyncio.sleep(0.02)
        if front.alive:
            logger.warning("%d requests are cancelled after drain_s", front.alive)


def _open(bundle: Bundle) -> Runner:
    """The engine, if it computes what the reference computed."""
    engine = open_engine(bundle)
    try:
        selfcheck.check(engine, bundle)
    except BaseException:
        engine.close()
        raise
    return engine


def set_up_logging(log: config.LogSettings) -> None:
    """To stderr; with journald's priorities where stderr is the journal."""
    handler = logging.StreamHandler(sys.stderr)
    if "JOURNAL_STREAM" in os.environ:
        handler.setFormatter(JournalFormatter("%(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log.level.upper())
    for name in ("uvicorn", "asyncio"):  # starts and stops; their warnings are kept
        logging.getLogger(name).setLevel(logging.WARNING)


def _keys(found: Settings) -> Keys | None:
    file = found.server.api_keys_file
    return None if file is None else Keys.load(Path(file))


async def _tick(endpoint: CompletionsEndpoint) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        endpoint.drop_slow_clients()
