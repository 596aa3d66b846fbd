"""Commands that come over MQTT: few, allowed one by one, live, and each one answered."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paho.mqtt.client import MQTTMessage

from edge_rt.telemetry.connection import Message
from edge_rt.telemetry.record import SCHEMA_VERSION

logger = logging.getLogger(__name__)

MAX_WAITING = 4
AT_ONCE = "drain"  # or a long bench would hold up what is to end it
MAX_PAYLOAD_BYTES = 64 * 1024

Reply = Callable[[Mapping[str, Any]], None]
Handler = Callable[[str, dict[str, Any], Reply], None]


class Commands:
    """Runs the handler in a thread of its own, one command at a time; AT_ONCE in the caller's.

    The handler calls its `reply` once, then or later, with whatever the answer holds; `ok` is true
    unless it says otherwise. An exception of the handler is an answer too.
    """

    def __init__(
        self,
        prefix: str,
        verbs: Sequence[str],
        handler: Handler,
        send: Callable[[Message], None],
    ) -> None:
        """`send` may be called from any thread. Nothing is subscribed to without `verbs`."""
        self.topics = [f"{prefix}/cmd/{verb}" for verb in verbs]
        self._prefix, self._handler, self._send = prefix, handler, send
        self._waiting: queue.Queue[tuple[str, dict[str, Any], Reply]] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="mqtt-commands", daemon=True)

    def take(self, message: MQTTMessage) -> None:
        """Queue one for the handler, or answer why not; blocks no longer than AT_ONCE."""
        if message.topic not in self.topics:
            return
        verb = message.topic.rpartition("/")[2]
        reply = self._reply_to(verb, message)
        try:
            payload = _payload(message)
        except ValueError as error:
            logger.warning("command %s is not taken: %s", verb, error)
            reply({"ok": False, "error": str(error)})
            return
        if verb == AT_ONCE:
            self._carry_out(verb, payload, reply)
            return
        try:
            self._waiting.put_nowait((verb, payload, reply))
        except queue.Full:
            error_text = f"busy: {MAX_WAITING} commands wait already"
            logger.warning("command %s is not taken: %s", verb, error_text)
            reply({"ok": False, "error": error_text})
            return
        if not self._thread.is_alive():
            self._thread.start()

    def _work(self) -> None:
        while True:
            self._carry_out(*self._waiting.get())

    def _carry_out(self, verb: str, payload: dict[str, Any], reply: Reply) -> None:
        logger.info("command %s", verb)
        try:
            self._handler(verb, payload, reply)
        except Exception as error:
            logger.exception("command %s failed", verb)
            reply({"ok": False, "error": str(error) or type(error).__name__})

    def _reply_to(self, verb: str, message: MQTTMessage) -> Reply:
        """What sends the first answer to where the message says, and no second one."""
        topic = getattr(message.properties, "ResponseTopic", "")
        correlation = getattr(message.properties, "CorrelationData", None)
        if topic and not self._may_answer(topic):
            logger.warning("command %s is not answered: its response topic is %r", verb, topic)
            topic = ""
        unanswered = [topic] if topic else []

        def reply(fields: Mapping[str, Any]) -> None:
            try:
                to = unanswered.pop()
            except IndexError:
                return
            self._send(Message(to, _answer(verb, fields), correlation=correlation))

        return reply

    def _may_answer(self, topic: str) -> bool:
        """Not to a pattern, not to the broker's topics, and not in the name of the device."""
        if any(character in topic for character in "+#\0") or topic.startswith("$"):
            return False
        ours, reply = f"{self._prefix}/", f"{self._prefix}/reply/"
        return not topic.startswith(ours) or topic.startswith(reply)


def _payload(message: MQTTMessage) -> dict[str, Any]:
    """ValueError says what is wrong with it."""
    if message.retain:
        raise ValueError("it is retained; a command is only taken live, publish it without retain")
    if len(message.payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"{len(message.payload)} bytes; at most {MAX_PAYLOAD_BYTES} are taken")
    try:
        found = json.loads(message.payload or b"{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the payload is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"the payload must be empty or a JSON object, found {type(found).__name__}"
        )
    return found


def _answer(verb: str, fields: Mapping[str, Any]) -> bytes:
    head = {"schema_version": SCHEMA_VERSION, "time_ms": time.time_ns() // 1_000_000}
    try:
        body = json.dumps(head | {"ok": True} | dict(fields) | {"verb": verb}, allow_nan=False)
    except (TypeError, ValueError) as error:
        body = json.dumps(head | {"ok": False, "verb": verb, "error": f"its answer: {error}"})
    return body.encode()
