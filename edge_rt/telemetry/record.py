"""What is published and may not be lost: a numbered message."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

SCHEMA_VERSION = 1


class Key(NamedTuple):
    """What tells a record from every other one of a device.

    `boot_id` is new each time the daemon starts; `seq` counts from 1 in each topic, without a gap.
    """

    boot_id: str
    topic: str
    seq: int


class Record(NamedTuple):
    """One message; `payload` is a JSON object as text, which has the key's fields too."""

    key: Key
    payload: str


class Recorder:
    """Numbers what one run of the daemon publishes; any thread may call it."""

    def __init__(self) -> None:
        self.boot_id = uuid.uuid4().hex
        self._last: Counter[str] = Counter()
        self._lock = threading.Lock()

    def make(self, topic: str, fields: Mapping[str, Any]) -> Record:
        """A record of `fields` on a topic, which is one of ours without base and device."""
        with self._lock:
            self._last[topic] += 1
            key = Key(self.boot_id, topic, self._last[topic])
        head = {
            "schema_version": SCHEMA_VERSION,
            "time_ms": time.time_ns() // 1_000_000,
            "boot_id": key.boot_id,
            "seq": key.seq,
        }
        return Record(key, json.dumps(head | dict(fields), separators=(",", ":")))
