"""One record from a program that is no daemon: a benchmark's result."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from typing import Any

from edge_rt.errors import PublishError
from edge_rt.telemetry.connection import port_of
from edge_rt.telemetry.login import read_login
from edge_rt.telemetry.record import Recorder
from edge_rt.telemetry.settings import MqttSettings

TIMEOUT_S = 30.0


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
    from paho.mqtt import publish as paho
    from paho.mqtt.client import MQTTv5

    assert settings.host is not None
    host, port, login = settings.host, port_of(settings), read_login(settings)
    record = Recorder().make(kind, dict(fields) | {"historical": False})
    topic = f"{settings.base}/{device}/{kind}"
    outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            paho.single(
                topic,
                record.payload,
                qos=1,
                hostname=host,
                port=port,
                client_id=f"{settings.client_id or f'edge_rt-{device}'}-{kind}",
                auth=None
                if login.username is None
                else {"username": login.username, "password": login.password},
                tls=login.tls,  # type: ignore[arg-type] # it takes contexts too
                protocol=MQTTv5,
            )
        except Exception as error:
            outcome.put(error)
        else:
            outcome.put(None)

    logging.getLogger("paho").setLevel(logging.CRITICAL)  # what matters it raises
    threading.Thread(target=run, daemon=True).start()  # paho knows no end of its waiting
    try:
        error = outcome.get(timeout=timeout_s)
    except queue.Empty:
        error = TimeoutError(f"it did not answer within {timeout_s:g} s")
    if error is not None:
        raise PublishError(f"{topic} could not be published at {host}:{port}: {error}") from error
    return topic
