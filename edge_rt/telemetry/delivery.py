"""What goes out: the daemon's own messages, then new records, then those of an outage."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

from edge_rt.telemetry.backoff import Delays
from edge_rt.telemetry.connection import Connection, Message
from edge_rt.telemetry.record import Key, Record
from edge_rt.telemetry.refusals import Refusals
from edge_rt.telemetry.spool import Spool

logger = logging.getLogger(__name__)

WINDOW = 20  # publishes without PUBACK; so many records may arrive twice after a crash
MOST_WAITING = 1000  # messages of the daemon's own, which only a flood of commands makes
LEAST_SLEEP_S = 0.02


class _Sent(NamedTuple):
    at_s: float
    record: Record | None = None
    is_historical: bool = False


class Delivery:
    """At least once: a record leaves the spool when the broker has acknowledged it.

    `fault` says why the connection is of no use.
    """

    def __init__(self, spool: Spool, prefix: str, replay_per_s: float, refused: Delays) -> None:
        self.published = self.refused = 0
        self.fault = ""
        self.is_changed = False  # the spool, since it was last committed
        self.is_stopping = False  # no replay any more
        self.has_more = True  # new records, maybe
        self._spool, self._prefix, self._replay_per_s = spool, prefix, replay_per_s
        self._connection: Connection | None = None
        self._window = self._max_packet_bytes = 0
        self._control: deque[Message] = deque()
        self._sent: dict[int, _Sent] = {}  # by packet id, oldest first
        self._tokens, self._filled_s, self._has_backlog = 0.0, 0.0, True
        self._replayed = 0  # and acknowledged since the last commit
        self._refusals = Refusals(refused)
        self._told: set[tuple[str, str]] = set()

    def begin(self, connection: Connection, now_s: float) -> None:
        """Everything in the spool now was not sent when it was new."""
        assert connection.accepted is not None
        self._connection = connection
        self._window = min(WINDOW, connection.accepted.receive_maximum)
        self._max_packet_bytes = connection.accepted.max_packet_bytes
        self._filled_s, self._tokens = now_s, 0.0
        self._release()

    def end(self, now_s: float) -> None:
        """The connection is over; of what has no PUBACK nobody knows what became."""
        if self._connection is not None:
            self._settle(self._connection, now_s)
        self._connection, self.fault = None, ""
        self._control.clear()
        self._sent.clear()

    @property
    def refusal(self) -> str:
        """Why records are dropped, or wait though there is a connection."""
        return self._refusals.why

    def say(self, message: Message) -> None:
        """Send one of the daemon's own; lost if the connection ends, as each one starts anew."""
        if self._connection is None:
            return
        if len(self._control) >= MOST_WAITING:
            self._tell(message.topic, "more than the broker takes in time")
            return
        if message.packet_bytes > self._max_packet_bytes:
            self._tell(message.topic, f"larger than the broker takes ({self._max_packet_bytes})")
            return
        self._control.append(message)

    @property
    def is_idle(self) -> bool:
        """Whether all that was sent is acknowledged."""
        return not self._control and not self._sent

    def due_s(self, now_s: float) -> float:
        """In how long a record may be sent that may not be now."""
        if self._connection is None:
            return 3600.0
        if self._refusals.is_full:
            return max(LEAST_SLEEP_S, self._refusals.retry_s - now_s)
        if self._has_backlog and self._tokens < 1.0:
            return max(LEAST_SLEEP_S, (1.0 - self._tokens) / self._replay_per_s)
        return 3600.0

    def step(self, now_s: float, stall_s: float) -> None:
        """Take what was acknowledged, send what the window has room for."""
        connection = self._connection
        if connection is None:
            return
        self._settle(connection, now_s)
        oldest = next(iter(self._sent.values()), None)
        if oldest is not None and now_s - oldest.at_s > stall_s:
            self.fault = f"the broker has acknowledged nothing for {stall_s:g} s"
            return
        # A flood of commands leaves room for records, too.
        own = sum(sent.record is None for sent in self._sent.values())
        for _ in range(min(len(self._control), self._room(own), self._window - len(self._sent))):
            self._send(connection, self._control.popleft(), _Sent(now_s))
        self._send_records(connection, now_s)

    def _send_records(self, connection: Connection, now_s: float) -> None:
        in_flight = [sent for sent in self._sent.values() if sent.record is not None]
        if now_s >= self._refusals.retry_s:
            if in_flight:
                return
            self._refusals.retry()
            self._release()
        if self._refusals.is_full:
            return
        room = min(self._window - len(self._sent), WINDOW - self._spool.unsettled)
        new = self._spool.take_new(max(0, room))
        self.has_more = len(new) >= room
        for record in new:
            self._send_record(connection, record, now_s, is_historical=False)
        if self._has_backlog and not self.is_stopping:
            replayed = sum(sent.is_historical for sent in in_flight)
            self._replay(connection, now_s, replayed)

    def _replay(self, connection: Connection, now_s: float, replayed: int) -> None:
        """Some of the backlog, which leaves a quarter of the window to new records.

        One that is acknowledged but still on disk arrives twice after a crash, so it counts too.
        """
        self._tokens += (now_s - self._filled_s) * self._replay_per_s
        self._tokens, self._filled_s = min(self._tokens, max(1.0, self._replay_per_s)), now_s
        if replayed == 0 and self._replayed:
            self.commit()
        room = min(
            self._window - len(self._sent),
            self._room(replayed),
            WINDOW * 3 // 4 - self._spool.unsettled,
            int(self._tokens),
        )
        if room < 1:
            return
        old = self._spool.take_backlog(room)
        self._has_backlog = len(old) == room
        self._tokens -= len(old)
        for record in old:
            self._send_record(connection, record, now_s, is_historical=True)

    def _room(self, taken: int) -> int:
        """What is left of the three quarters of the window that new records leave to others."""
        return max(0, max(1, self._window * 3 // 4) - taken)

    def commit(self) -> None:
        """Write the spool; new records that wait become backlog by it."""
        self._spool.commit()
        self.is_changed, self._has_backlog, self._replayed = False, True, 0

    def _release(self) -> None:
        self._spool.release()
        self._has_backlog = True

    def _send_record(
        self, connection: Connection, record: Record, now_s: float, is_historical: bool
    ) -> None:
        if self._refusals.is_parked(record.key):
            return
        if self._refusals.is_denied(record.key.topic, now_s):
            self._drop(record)
            return
        mark = "true" if is_historical else "false"
        payload = f'{record.payload[:-1]},"historical":{mark}}}'
        message = Message(f"{self._prefix}/{record.key.topic}", payload.encode())
        if message.packet_bytes > self._max_packet_bytes:
            self._drop(record, f"larger than the broker takes ({self._max_packet_bytes} bytes)")
            return
        self._send(connection, message, _Sent(now_s, record, is_historical))

    def _send(self, connection: Connection, message: Message, sent: _Sent) -> None:
        mid = connection.publish(message)
        if mid is not None:  # else the connection is over, and the record waits for the next one
            self._sent[mid] = sent

    def _settle(self, connection: Connection, now_s: float) -> None:
        while connection.acknowledged:
            answer = connection.acknowledged.popleft()
            code, reason = answer.code, answer.reason
            sent = self._sent.pop(answer.mid, None)
            if sent is None:
                continue
            if sent.record is None:
                if answer.is_refused:
                    self._tell("state, info or answers", reason)
            elif not answer.is_refused:
                self.published += 1
                self._replayed += sent.is_historical
                self._refusals.accept(sent.record.key)
                self._acknowledge(sent.record.key)
            elif self._refusals.drops(sent.record.key, code, reason, now_s):
                self._drop(sent.record, reason)
            else:
                self._tell(sent.record.key.topic, f"{reason}; they wait in the spool")

    def _drop(self, record: Record, why: str = "") -> None:
        self.refused += 1
        if why:
            self._tell(record.key.topic, f"{why}; they are dropped")
        self._acknowledge(record.key)

    def _acknowledge(self, key: Key) -> None:
        self._spool.acknowledge(key)
        self.is_changed = True

    def _tell(self, topic: str, why: str) -> None:
        if (topic, why) not in self._told and len(self._told) < 100:
            self._told.add((topic, why))
            logger.warning("messages of %s are refused: %s", topic, why)
