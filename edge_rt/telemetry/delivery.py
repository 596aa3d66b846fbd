"""What goes out: the daemon's own messages, then new records, then those of an outage."""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import NamedTuple

from edge_rt.telemetry.backoff import Backoff, Delays
from edge_rt.telemetry.connection import Acknowledgement, Connection, Message
from edge_rt.telemetry.record import Key, Record
from edge_rt.telemetry.spool import Spool

logger = logging.getLogger(__name__)

WINDOW = 20  # publishes without PUBACK; so many records may arrive twice after a crash
REFUSED_TRIES = 3
LEAST_SLEEP_S = 0.02

# PUBACK: topic name invalid, packet too large, payload format invalid. No try will change it.
_NEVER = {0x90, 0x95, 0x99}
_NOT_AUTHORIZED = 0x87
_FAILURE = 0x80


class _Sent(NamedTuple):
    at_s: float
    record: Record | None = None
    is_historical: bool = False


class Delivery:
    """At least once: a record leaves the spool when the broker has acknowledged it.

    `fault` says why the connection is of no use; `refusal` why records wait though there is one.
    """

    def __init__(self, spool: Spool, prefix: str, replay_per_s: float, refused: Delays) -> None:
        self.published = self.refused = 0
        self.fault = self.refusal = ""
        self.is_changed = False  # the spool, since it was last committed
        self.is_stopping = False  # no replay any more
        self.has_more = True  # new records, maybe
        self._spool, self._prefix, self._replay_per_s = spool, prefix, replay_per_s
        self._connection: Connection | None = None
        self._window = self._max_packet_bytes = 0
        self._control: deque[Message] = deque()
        self._sent: dict[int, _Sent] = {}  # by packet id, oldest first
        self._tokens, self._filled_s, self._has_backlog = 0.0, 0.0, True
        self._pause, self._paused_until_s = Backoff(refused), 0.0
        self._tries: Counter[Key] = Counter()
        self._accepted_topics: set[str] = set()
        self._told: set[tuple[str, str]] = set()

    def begin(self, connection: Connection, now_s: float) -> None:
        """Everything in the spool now was not sent when it was new."""
        assert connection.accepted is not None
        self._connection = connection
        self._window = min(WINDOW, connection.accepted.receive_maximum)
        self._max_packet_bytes = connection.accepted.max_packet_bytes
        self._filled_s, self._tokens = now_s, 0.0
        self._paused_until_s = 0.0
        self._accepted_topics.clear()
        self._release()

    def end(self) -> None:
        """The connection is over: nobody knows what became of what it carried."""
        self._connection, self.fault, self.refusal = None, "", ""
        self._control.clear()
        self._sent.clear()
        self._release()

    def say(self, message: Message) -> None:
        """Send one of the daemon's own; lost if the connection ends, as each one starts anew."""
        if self._connection is None:
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
        if now_s < self._paused_until_s:
            return self._paused_until_s - now_s
        if self._has_backlog and self._tokens < 1.0:
            return max(LEAST_SLEEP_S, (1.0 - self._tokens) / self._replay_per_s)
        return 3600.0

    def step(self, now_s: float, stall_s: float) -> None:
        """Take what was acknowledged, send what the window has room for."""
        connection = self._connection
        if connection is None:
            return
        while connection.acknowledged:
            self._settle(connection.acknowledged.popleft(), now_s)
        oldest = next(iter(self._sent.values()), None)
        if oldest is not None and now_s - oldest.at_s > stall_s:
            self.fault = f"the broker has acknowledged nothing for {stall_s:g} s"
            return
        while self._control and len(self._sent) < self._window:
            self._send(connection, self._control.popleft(), _Sent(now_s))
        if now_s >= self._paused_until_s:
            self._send_records(connection, now_s)

    def _send_records(self, connection: Connection, now_s: float) -> None:
        in_flight = [sent for sent in self._sent.values() if sent.record is not None]
        if self._paused_until_s:  # the pause is over: once more what was refused
            if in_flight:
                return
            self._paused_until_s = 0.0
            self._release()
        room = min(self._window - len(self._sent), WINDOW - self._spool.unsettled)
        new = self._spool.take_new(max(0, room))
        self.has_more = len(new) >= room
        for record in new:
            self._send_record(connection, record, now_s, is_historical=False)
        if self._has_backlog and not self.is_stopping:
            replayed = sum(sent.is_historical for sent in in_flight)
            self._replay(connection, now_s, replayed, len(in_flight))

    def _replay(self, connection: Connection, now_s: float, replayed: int, in_flight: int) -> None:
        """Some of the backlog, which leaves a quarter of the window to new records.

        One that is acknowledged but still on disk arrives twice after a crash, so it counts too.
        """
        self._tokens += (now_s - self._filled_s) * self._replay_per_s
        self._tokens, self._filled_s = min(self._tokens, max(1.0, self._replay_per_s)), now_s
        settled = self._spool.unsettled - in_flight
        if settled > 0 and replayed == 0:
            self.commit()
            settled = self._spool.unsettled - in_flight
        room = min(
            self._window - len(self._sent),
            max(1, self._window * 3 // 4) - replayed,
            WINDOW * 3 // 4 - replayed - settled,
            int(self._tokens),
        )
        if room < 1:
            return
        old = self._spool.take_backlog(room)
        self._has_backlog = len(old) == room
        self._tokens -= len(old)
        for record in old:
            self._send_record(connection, record, now_s, is_historical=True)

    def commit(self) -> None:
        """Write the spool; new records that wait become backlog by it."""
        self._spool.commit()
        self.is_changed, self._has_backlog = False, True

    def _release(self) -> None:
        self._spool.release()
        self._has_backlog = True

    def _send_record(
        self, connection: Connection, record: Record, now_s: float, is_historical: bool
    ) -> None:
        mark = "true" if is_historical else "false"
        payload = f'{record.payload[:-1]},"historical":{mark}}}'
        message = Message(f"{self._prefix}/{record.key.topic}", payload.encode())
        if message.packet_bytes > self._max_packet_bytes:
            self._refuse(record, f"larger than the broker takes ({self._max_packet_bytes} bytes)")
            return
        self._send(connection, message, _Sent(now_s, record, is_historical))

    def _send(self, connection: Connection, message: Message, sent: _Sent) -> None:
        mid = connection.publish(message)
        if mid is not None:  # else the connection is over, and the record waits for the next one
            self._sent[mid] = sent

    def _settle(self, acknowledgement: Acknowledgement, now_s: float) -> None:
        sent = self._sent.pop(acknowledgement.mid, None)
        if sent is None:
            return
        is_failure = acknowledgement.code >= _FAILURE
        if sent.record is None:
            if is_failure:
                self._tell("one of state, info and answers", acknowledgement.reason)
        elif is_failure:
            self._on_refusal(sent.record, acknowledgement, now_s)
        else:
            self._accept(sent.record)

    def _accept(self, record: Record) -> None:
        self.published += 1
        self._accepted_topics.add(record.key.topic)
        self._acknowledge(record.key)
        if self.refusal and not self._paused_until_s and not self._tries:
            self.refusal = ""
            self._pause.reset()

    def _on_refusal(self, record: Record, refusal: Acknowledgement, now_s: float) -> None:
        """Keep a record that the broker may take later; drop one that would block the others."""
        topic, topics = record.key.topic, self._accepted_topics
        self._tries[record.key] += 1
        is_topic = refusal.code == _NOT_AUTHORIZED and bool(topics) and topic not in topics
        is_record = bool(topics) and self._tries[record.key] >= REFUSED_TRIES
        if refusal.code in _NEVER or is_topic or is_record:
            self._refuse(record, refusal.reason)
            return
        self.refusal = f"the broker refuses records of {topic}: {refusal.reason}"
        if not self._paused_until_s:
            wait_s = self._pause.next_s()
            self._paused_until_s = now_s + wait_s
            self._tell(topic, f"{refusal.reason}; they wait in the spool")

    def _refuse(self, record: Record, why: str) -> None:
        self.refused += 1
        self._tell(record.key.topic, f"{why}; they are dropped")
        self._acknowledge(record.key)

    def _acknowledge(self, key: Key) -> None:
        self._tries.pop(key, None)
        self._spool.acknowledge(key)
        self.is_changed = True

    def _tell(self, topic: str, why: str) -> None:
        if (topic, why) not in self._told and len(self._told) < 100:
            self._told.add((topic, why))
            logger.warning("messages of %s are refused: %s", topic, why)
