"""One record from a program that is no daemon: a benchmark's result."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Mapping
from typing import Any

from edge_rt.errors import PublishError
from edge_rt.telemetry.connection import Connection, Message
from edge_rt.telemetry.record import Recorder
from edge_rt.telemetry.settings import MqttSettings

TIMEOUT_S, STEP_S = 30.0, 10.0
TURN_MS = 100


def publish(
    settings: MqttSettings,
    device: str,
    kind: str,
    fields: Mapping[str, Any],
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Publish a record of its own boot_id beside the daemon's; its topic, once the broker has it.

    PublishError if that does not happen in time.
    """
    record = Recorder().make(kind, dict(fields) | {"historical": False})
    topic = f"{settings.base}/{device}/{kind}"
    client_id = f"{settings.client_id or f'edge_rt-{device}'}-{kind}"
    connection = Connection(settings, client_id, None, min(STEP_S, timeout_s))
    opened, deadline_s = threading.Event(), time.monotonic() + timeout_s
    connection.open_in_background(opened.set)
    opened.wait(timeout_s)
    why = _send(connection, Message(topic, record.payload.encode()), deadline_s)
    if why:
        connection.drop(why)
        raise PublishError(f"{topic} could not be published: {why}")
    connection.close(with_will=False)
    return topic


def _send(connection: Connection, message: Message, deadline_s: float) -> str:
    """Wait until the broker has it; else why it has not."""
    mid = None
    while not connection.ended:
        if time.monotonic() >= deadline_s:
            return "the broker did not answer in time"
        connection.step(_wait(connection))
        if connection.accepted is not None and mid is None:
            mid = connection.publish(message)
        for answer in connection.acknowledged:
            if answer.mid == mid:
                return f"the broker refused it: {answer.reason}" if answer.is_refused else ""
    return connection.ended


def _wait(connection: Connection) -> bool:
    """For the socket, a little; whether there is something to read."""
    number = connection.fileno()
    if number < 0 or connection.has_pending:
        return number >= 0
    poll = select.poll()
    poll.register(number, select.POLLIN | (select.POLLOUT if connection.wants_write else 0))
    return any(events & ~select.POLLOUT for _, events in poll.poll(TURN_MS))
