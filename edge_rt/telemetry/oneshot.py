"""One record from a program that is no daemon: a benchmark's result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from edge_rt.errors import PublishError
from edge_rt.telemetry.connection import Connection, Message
from edge_rt.telemetry.mailbox import Mailbox
from edge_rt.telemetry.record import Recorder
from edge_rt.telemetry.settings import MqttSettings

TIMEOUT_S, STEP_S = 30.0, 10.0
TURN_S = 0.1


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
    mailbox, deadline_s = Mailbox(), time.monotonic() + timeout_s
    connection.open_in_background(mailbox.wake)
    try:
        why = _send(connection, Message(topic, record.payload.encode()), mailbox, deadline_s)
    finally:
        mailbox.close()
    if why:
        connection.drop(why)
        raise PublishError(f"{topic} could not be published: {why}")
    connection.close(with_will=False)
    return topic


def _send(connection: Connection, message: Message, mailbox: Mailbox, deadline_s: float) -> str:
    """Wait until the broker has it; else why it has not."""
    mid = None
    while not connection.ended:
        if time.monotonic() >= deadline_s:
            return "the broker did not answer in time"
        if not connection.is_open:
            mailbox.wait(-1, wants_write=False, timeout_s=TURN_S)
            continue
        connection.step(
            connection.has_pending
            or mailbox.wait(connection.fileno(), connection.wants_write, TURN_S)
        )
        if connection.accepted is not None and mid is None:
            mid = connection.publish(message)
        for answer in connection.acknowledged:
            if answer.mid == mid:
                return f"the broker refused it: {answer.reason}" if answer.is_refused else ""
    return connection.ended
