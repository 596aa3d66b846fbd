"""The daemon: loads the engine, serves, reloads its settings, drains, ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from edge_rt.bundle import Bundle
from edge_rt.errors import ConfigError
from edge_rt.loop import Loop
from edge_rt.runtime import selfcheck
from edge_rt.runtime.base import Runner
from edge_rt.runtime.engines import open_engine
from edge_rt.sched.scheduler import Scheduler
from edge_rt.serve import settings as config
from edge_rt.serve.app import make_app
from edge_rt.serve.cache import ResponseCache
from edge_rt.serve.completions import Completions
from edge_rt.serve.connections import Connections
from edge_rt.serve.front import Front
from edge_rt.serve.keys import Keys, key_changes
from edge_rt.serve.listen import Listening
from edge_rt.serve.log import Log
from edge_rt.serve.reporting import Reporting
from edge_rt.serve.settings import Settings
from edge_rt.serve.state import State, Status
from edge_rt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TICK_S = 1.0
ENDING_S = 6  # that connections have when all requests have ended


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


class Daemon:
    """One bundle served at one address.

    `read_settings` reads them anew for SIGHUP; ConfigError if they cannot work. `on_ready` is told
    where it listens, and the model's name.
    """

    def __init__(
        self,
        bundle: Path,
        read_settings: Callable[[], Settings],
        on_ready: Callable[[str, str], None],
    ) -> None:
        self._path, self._read_settings, self._on_ready = bundle, read_settings, on_ready
        self._log, self._stops = Log(), 0  # how often it was told to stop
        self._stop = asyncio.Event()
        found = read_settings()
        name = found.server.model_name or bundle.resolve().name
        self._state = State(found, name, _keys(found), cache=ResponseCache(found.cache.responses))
        self._reporting = Reporting(self._state, self._stop_from_afar)

    async def serve(self) -> int:
        """Serve until SIGTERM or SIGINT; the exit code."""
        self._log.start(self._state.settings.log.level)
        try:
            code = await self._serve()
        finally:
            is_written = self._log.stop()
        if not is_written:  # Python would wait for the thread that cannot write it
            os._exit(code)
        return code

    async def _serve(self) -> int:
        state, stop = self._state, self._stop
        aio = self._aio = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            aio.add_signal_handler(number, self._ask_to_stop)
        aio.add_signal_handler(signal.SIGHUP, self.reload)
        app = make_app(state)
        listening = Listening(state.settings.server)
        server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=ENDING_S,
            )
        )
        serving = asyncio.ensure_future(server.serve([listening.socket]))
        self._reporting.start()
        repeated = [asyncio.ensure_future(self._tick(server))]
        repeated.append(asyncio.ensure_future(self._reporting.run()))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            front = await self._load_unless(stopping, listening)
            logger.info("ready: %s at %s", state.model, listening.where)
            self._on_ready(listening.where, state.model)
            ended = asyncio.ensure_future(front.ended())
            await asyncio.wait({serving, ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                await self._drain(front)
            else:
                why = str(front.failure or "it cannot listen any more")
                self._move_to("failed", why)
                logger.error("the server ends: %s", why)
            await front.stop()
        except Exception as error:
            self._move_to("failed", str(error))
            raise
        finally:
            server.should_exit = True
            try:
                await serving
            finally:
                for task in repeated:
                    task.cancel()
                listening.remove()
                await self._reporting.stop()
        logger.info("stopped")
        return 0 if stop.is_set() else 1

    def _ask_to_stop(self) -> None:
        self._stops += 1
        self._stop.set()

    def _stop_from_afar(self) -> None:
        """As SIGTERM, from another thread."""
        self._aio.call_soon_threadsafe(self._ask_to_stop)

    def _move_to(self, status: Status, why: str = "") -> None:
        self._state.status = status
        self._reporting.moved(status, why)

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
            logger.error("settings stay as they were: a restart is needed for %s", ", ".join(fixed))
            return
        changed += [f"key '{name}'" for name in key_changes(state.keys, keys)]
        state.settings, state.keys = found, keys
        what = ", ".join(changed) or "nothing"
        logger.info("settings read again; changed: %s", what)
        self._reporting.reloaded(what)
        self._log.set_level(found.log.level)

    async def _load_unless(self, stopping: asyncio.Future[Any], listening: Listening) -> Front:
        """Load, or end the process where it is: a library that reads weights cannot be stopped."""
        loading = asyncio.ensure_future(self._load())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            logger.info("stopped while loading")
            listening.remove()
            await self._reporting.stop()
            self._log.stop()
            os._exit(0)
        return await loading

    async def _load(self) -> Front:
        state = self._state
        bundle = Bundle.load(self._path)
        engine = await asyncio.to_thread(_open, bundle)
        tokenizer = Tokenizer.load(self._path)
        scheduler = Scheduler(engine.limits, state.settings.scheduler)
        front = state.front = Front(Loop(engine, scheduler), tokenizer, state.metrics)
        eos = bundle.manifest.model.eos_token_id
        state.completions = Completions(front, tokenizer, state.model, eos)
        front.start()
        # What is here stays: a collection that looks through it all holds up every thread.
        gc.collect()
        gc.freeze()
        self._reporting.told(bundle)
        self._move_to("ready")
        return front

    async def _drain(self, front: Front) -> None:
        state, aio = self._state, asyncio.get_running_loop()
        self._move_to("draining")
        logger.info("draining; still being served: %d", front.alive)
        limit = aio.time() + state.settings.server.drain_s
        while front.alive and aio.time() < limit and self._stops == 1:
            await asyncio.sleep(0.02)
        if front.alive:
            why = "drain_s is over" if self._stops == 1 else "told to stop again"
            logger.warning("%s; cancelled: %d", why, front.alive)

    async def _tick(self, server: uvicorn.Server) -> None:
        connections = Connections()
        while True:
            await asyncio.sleep(TICK_S)
            try:
                limit_s = self._state.settings.server.slow_client_s
                if server.should_exit:  # uvicorn waits for ENDING_S and then makes a fuss
                    limit_s = min(limit_s, ENDING_S / 3)
                connections.drop_stuck(tuple(server.server_state.connections), limit_s)
            except Exception:  # it is not worth the daemon's life
                logger.exception("slow clients are not dropped")


def _open(bundle: Bundle) -> Runner:
    """The engine, if it computes what the reference computed."""
    engine = open_engine(bundle)
    try:
        selfcheck.check(engine, bundle)
    except BaseException:
        engine.close()
        raise
    return engine


def _keys(found: Settings) -> Keys | None:
    file = found.server.api_keys_file
    return None if file is None else Keys.load(Path(file))
