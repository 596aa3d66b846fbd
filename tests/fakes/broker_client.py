"""A publisher of the tests, which waits less than a real one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_rt.telemetry.backoff import Delays
from edge_rt.telemetry.link import Timing
from edge_rt.telemetry.publisher import Duties, Publisher
from edge_rt.telemetry.record import Recorder
from edge_rt.telemetry.settings import MqttSettings
from edge_rt.telemetry.spool import Spool

QUICK = Timing(
    step_s=2.0,
    opening_s=4.0,
    lost=Delays(0.1, 0.5),
    refused=Delays(0.3, 1.0, 1.0, 1.5),
    taken_over=Delays(2.0, 8.0, 1.0, 1.5),
)
LIMIT_BYTES = 1 << 20
KEEPALIVE_S = 2  # less than settings may say


class Device:
    """A publisher with the records it was given; `is_impatient` has the least keep-alive."""

    def __init__(
        self,
        port: int,
        path: Path | None = None,
        duties: Duties | None = None,
        timing: Timing = QUICK,
        is_impatient: bool = False,
        **settings: Any,
    ) -> None:
        self.settings = MqttSettings(**{"host": "127.0.0.1", "port": port} | settings)
        if is_impatient:
            object.__setattr__(self.settings, "keepalive_s", KEEPALIVE_S)
        self.recorder = Recorder()
        name = self.settings.device or "box"
        self.publisher = Publisher(
            self.settings,
            name,
            self.recorder.boot_id,
            spool=lambda: Spool(path, LIMIT_BYTES),
            duties=duties or Duties(info=lambda: {"version": "1"}),
            timing=timing,
        )
        self.prefix = f"edge_rt/{name}"

    @property
    def status(self) -> Any:
        return self.publisher.status

    def make(self, count: int = 1, topic: str = "telemetry", pause_s: float = 0.0) -> None:
        for number in range(count):
            self.publisher.publish(self.recorder.make(topic, {"number": number}))
            time.sleep(pause_s)


@contextlib.contextmanager
def started(box: Device) -> Iterator[Device]:
    box.publisher.start()
    try:
        yield box
    finally:
        assert box.publisher.stop()


@contextlib.contextmanager
def device(port: int, path: Path | None = None, **more: Any) -> Iterator[Device]:
    with started(Device(port, path, **more)) as box:
        yield box
