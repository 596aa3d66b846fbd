"""What is published when: figures at an interval, events as they happen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from edge_rt.core import BoardReading
from edge_rt.telemetry.record import Record, Recorder
from edge_rt.telemetry.snapshot import Snapshots
from edge_rt.telemetry.sources import Sources
from edge_rt.telemetry.status import LinkStatus

logger = logging.getLogger(__name__)


class Reporter:
    """Makes records of a daemon's figures and events; `publish` gets them.

    `tick` is for one thread. `event` may be called from any.
    """

    def __init__(
        self, sources: Sources, recorder: Recorder, publish: Callable[[Record], None]
    ) -> None:
        self._sources, self._recorder, self._publish = sources, recorder, publish
        self._snapshots = Snapshots(sources)
        self._lost: Mapping[str, str] = {}
        self._throttles: Mapping[str, int] = {}
        self._link = LinkStatus()
        self._dropped = 0  # in this run

    def event(self, name: str, message: str = "", **fields: Any) -> None:
        """Publish that something has happened."""
        said = {"message": message} if message else {}
        self._publish(self._recorder.make("event", {"event": name} | said | fields))

    def bench(self, fields: Mapping[str, Any]) -> None:
        """Publish a measurement."""
        self._publish(self._recorder.make("bench", fields))

    def tick(self) -> None:
        """Publish the figures since the last call, and what they show to have happened."""
        self._publish(self._recorder.make("telemetry", self._snapshots.take()))
        board = self._sources.board()
        if board is not None:
            self._look_at_board(board[1])
        self._look_at_link(self._sources.link())

    def _look_at_board(self, reading: BoardReading) -> None:
        for name in sorted(reading.lost.keys() - self._lost.keys()):
            logger.warning("sensor lost: %s: %s", name, reading.lost[name])
            self.event("sensor-lost", reading.lost[name], sensor=name)
        for name in sorted(self._lost.keys() - reading.lost.keys()):
            logger.info("sensor is back: %s", name)
            self.event("sensor-back", sensor=name)
        self._lost = dict(reading.lost)
        for reason, count in reading.throttles.items():
            happened = count - self._throttles.get(reason, 0)
            if happened > 0:
                logger.warning("the machine slowed itself down: %s, %d times", reason, happened)
                self.event("throttled", reason=reason, count=happened)
        self._throttles = dict(reading.throttles)

    def _look_at_link(self, link: LinkStatus) -> None:
        dropped = link.dropped_records - link.dropped_before
        if dropped > self._dropped:
            self.event("records-dropped", count=dropped - self._dropped)
        self._dropped = dropped
        if link.spool_fault and link.spool_fault != self._link.spool_fault:
            self.event("spool-fault", link.spool_fault)
        self._link = link
