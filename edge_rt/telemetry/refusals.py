"""Records that the broker refuses: which are tried again, and which would block the others."""

from __future__ import annotations

import math

from edge_rt.telemetry.backoff import Backoff, Delays
from edge_rt.telemetry.record import Key

MOST_PARKED = 5
TRIES = 3
_MOST_REMEMBERED = 100

# PUBACK: topic name invalid, packet too large, payload format invalid. No try will change it.
_NEVER = {0x90, 0x95, 0x99}
_NOT_AUTHORIZED = 0x87


class Refusals:
    """A refused record is parked until `retry_s`; with MOST_PARKED of them nothing more is sent.

    It is dropped if the reason is the record itself, if its topic alone is not allowed, or if it is
    refused again and again while others are accepted. Some brokers (mosquitto 2.0.11) close the
    connection at each refusal, so all of this outlasts connections.
    """

    def __init__(self, delays: Delays) -> None:
        self.why = ""  # as long as something is refused
        self.retry_s = math.inf
        self._backoff = Backoff(delays)
        self._parked: set[Key] = set()
        self._tries: dict[Key, tuple[int, int]] = {}  # and what was accepted before the first
        self._accepted = 0
        self._accepted_topics: set[str] = set()
        self._denied: dict[str, float] = {}  # topics, until one record is to try again

    @property
    def is_full(self) -> bool:
        """Whether to send no records."""
        return len(self._parked) >= MOST_PARKED

    def is_parked(self, key: Key) -> bool:
        """Whether not to send it now."""
        return key in self._parked

    def is_denied(self, topic: str, now_s: float) -> bool:
        """Whether not to send its records at all."""
        return now_s < self._denied.get(topic, 0.0)

    def accept(self, key: Key) -> None:
        """The broker took it."""
        self._accepted += 1
        self._accepted_topics.add(key.topic)
        self._denied.pop(key.topic, None)
        self._tries.pop(key, None)
        if not self._tries and not self._denied:
            self.why = ""
            self._backoff.reset()

    def drops(self, key: Key, code: int, reason: str, now_s: float) -> bool:
        """What becomes of a record that was refused: dropped, else parked."""
        self.why = f"the broker refuses {key.topic}: {reason}"
        tries, accepted = self._tries.pop(key, (0, self._accepted))
        if code in _NEVER:
            return True
        topics = self._accepted_topics
        if code == _NOT_AUTHORIZED and topics and key.topic not in topics:
            self._denied[key.topic] = now_s + self._backoff.next_s()
            return True
        if tries + 1 >= TRIES and self._accepted > accepted:
            return True
        self._tries[key] = tries + 1, accepted
        if len(self._tries) > _MOST_REMEMBERED:
            del self._tries[next(iter(self._tries))]
        self._parked.add(key)
        if self.retry_s == math.inf:
            self.retry_s = now_s + self._backoff.next_s()
        return False

    def retry(self) -> None:
        """All may be sent again."""
        self._parked.clear()
        self.retry_s = math.inf
