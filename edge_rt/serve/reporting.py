"""Sensors and MQTT of a daemon, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import edge_rt
from edge_rt.bundle import Bundle
from edge_rt.core import BoardInfo
from edge_rt.errors import EdgeRTError
from edge_rt.power.board import open_board
from edge_rt.power.sampler import Sampler
from edge_rt.serve.remote import Remote
from edge_rt.serve.state import State, Status
from edge_rt.telemetry import login
from edge_rt.telemetry.commands import Reply
from edge_rt.telemetry.device import default_device
from edge_rt.telemetry.homeassistant import discovery
from edge_rt.telemetry.publisher import Duties, Publisher
from edge_rt.telemetry.record import Record, Recorder
from edge_rt.telemetry.reporter import Reporter
from edge_rt.telemetry.settings import MqttSettings
from edge_rt.telemetry.spool import Spool

logger = logging.getLogger(__name__)

SPOOL_NAME = "mqtt-spool.sqlite"


class Reporting:
    """Says what a daemon does: `stop` is called where an operator asks for a drain.

    Whatever fails here is logged, and costs nothing else.
    """

    def __init__(self, state: State, stop: Callable[[], None]) -> None:
        """ConfigError for settings that cannot work."""
        settings, recorder = state.settings, Recorder()
        self._state, self._interval_s = state, settings.telemetry.interval_s
        self._bundle: Bundle | None = None
        self._sampler: Sampler | None = None
        if settings.board.kind != "none":
            self._sampler = Sampler(partial(open_board, settings.board), settings.board.interval_s)
            state.board = self._sampler.latest
        self._publisher: Publisher | None = None
        self._reporter = Reporter(state.sources(), recorder, self._publish)
        if settings.mqtt.host is not None:
            login.check(settings.mqtt)
            remote = Remote(state, stop, self._reporter.bench)
            publisher = self._make_publisher(settings.mqtt, recorder.boot_id, remote)
            state.link = lambda: publisher.status
            self._publisher = publisher

    def start(self) -> None:
        """Read and connect."""
        if self._sampler is not None:
            self._sampler.start()
        if self._publisher is not None:
            self._publisher.start()
        self._reporter.event("started", version=edge_rt.__version__)

    async def run(self) -> None:
        """Publish figures every so often, for ever."""
        aio = asyncio.get_running_loop()
        due_s = aio.time()
        while True:
            due_s += self._interval_s
            if due_s <= aio.time():  # after a stall; figures of no time are noise
                due_s = aio.time() + self._interval_s
            await asyncio.sleep(due_s - aio.time())
            self._tick()

    def told(self, bundle: Bundle) -> None:
        """What the next birth says is served."""
        self._bundle = bundle

    def moved(self, status: Status, why: str = "") -> None:
        """The daemon is doing something else now."""
        if self._publisher is not None:
            self._publisher.set_state(status)
        self._reporter.event(status, why)

    def reloaded(self, changed: str) -> None:
        """Settings were read again."""
        self._reporter.event("settings-reloaded", changed)

    async def stop(self) -> None:
        """Publish the last figures, say goodbye and wait for it, some seconds at the most."""
        self._tick()
        self._reporter.event("stopped")
        if self._publisher is not None and not await asyncio.to_thread(self._publisher.stop):
            logger.warning("MQTT did not end in time; what it held waits in the spool")
        if self._sampler is not None:
            await asyncio.to_thread(self._sampler.stop)

    def _tick(self) -> None:
        try:
            self._reporter.tick()
        except Exception:  # telemetry is not worth the daemon's life
            logger.exception("no figures are published this time")

    def _publish(self, record: Record) -> None:
        if self._publisher is not None:
            self._publisher.publish(record)

    def _make_publisher(self, settings: MqttSettings, boot_id: str, remote: Remote) -> Publisher:
        device = settings.device or default_device(Path(self._state.settings.board.root))

        def introductions() -> list[tuple[str, str]]:
            if not settings.home_assistant:
                return []
            return [discovery(settings.base, device, self._info())]

        def on_command(verb: str, payload: dict[str, Any], reply: Reply) -> None:
            try:
                reply(remote(verb, payload))
            except EdgeRTError as error:
                reply({"ok": False, "error": str(error)})

        return Publisher(
            settings,
            device,
            boot_id,
            spool=lambda: Spool(spool_file(settings), settings.spool_max_bytes),
            duties=Duties(
                info=self._info,
                retained=introductions,
                on_command=on_command,
                on_event=lambda name, fields: self._reporter.event(name, **fields),
            ),
        )

    def _info(self) -> dict[str, Any]:
        """What does not change while this is served; what is not known is not there."""
        state = self._state
        found: dict[str, Any] = {
            "version": edge_rt.__version__,
            "model": state.model,
            "interval_s": self._interval_s,
            "python": platform.python_version(),
            "kernel": platform.release(),
            "commands": ",".join(sorted(state.settings.mqtt.commands)),
        }
        if self._bundle is not None:
            manifest = self._bundle.manifest
            found |= {
                "engine": manifest.recipe.engine,
                "weight_bits": manifest.quantization.bits,
                "fp16_fraction": manifest.quantization.fp16_fraction,
                "bundle_created_utc": manifest.created_utc,
            }
        engine = state.sources().engine()
        if engine is not None:
            limits = engine[0]
            found |= {
                "max_batch": limits.max_requests,
                "max_rows": limits.max_rows,
                "max_context": limits.max_context,
            }
        board = state.board()
        if board is not None:
            found |= _of_the_board(board[0])
        return found


def _of_the_board(info: BoardInfo) -> dict[str, str]:
    found = {
        "board_kind": info.kind,
        "board_model": info.model,
        "board_serial": info.serial,
        "l4t": info.l4t,
        "jetpack": info.jetpack,
        "power_scope": info.power_scope,
    }
    return {name: value for name, value in found.items() if value is not None}


def spool_file(settings: MqttSettings) -> Path:
    """Where records wait."""
    if settings.spool_file is not None:
        return Path(settings.spool_file)
    directory = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]  # systemd's, may be several
    if directory:
        return Path(directory) / SPOOL_NAME
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "edge-rt" / SPOOL_NAME
