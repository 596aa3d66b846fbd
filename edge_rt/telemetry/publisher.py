"""Publishes over MQTT from one thread, which owns the spool and the connection."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_rt.telemetry.commands import Commands, Handler
from edge_rt.telemetry.connection import Connection, Message
from edge_rt.telemetry.delivery import Delivery
from edge_rt.telemetry.link import Link, Timing
from edge_rt.telemetry.mailbox import Mailbox
from edge_rt.telemetry.record import SCHEMA_VERSION, Record
from edge_rt.telemetry.settings import MqttSettings
from edge_rt.telemetry.spool import Spool
from edge_rt.telemetry.status import LinkStatus

logger = logging.getLogger(__name__)

TICK_S = 1.0  # the longest sleep, as keep-alive is looked at after each
STOP_S = 4.0
GOODBYE_S = 1.0  # of it at least for the last state
CLOSING_S = 0.5  # of it for DISCONNECT and the spool
STATUS_S = 0.2
FAULT_S = 1.0  # that follows an exception of ours

HOME_ASSISTANT_STATUS = "homeassistant/status"


@dataclass(frozen=True, slots=True)
class Duties:
    """What the publisher asks and tells, in its thread, where none may block.

    Only `on_command` has a thread of its own, but for commands that are AT_ONCE.

    `info` gives what `/info` says besides schema, time and boot. `retained` gives the topics and
    payloads that Home Assistant finds the device by. `on_event` is told what the connection met.
    """

    info: Callable[[], Mapping[str, Any]] = dict
    retained: Callable[[], Sequence[tuple[str, str]]] = tuple
    on_command: Handler | None = None
    on_event: Callable[[str, Mapping[str, Any]], None] = lambda _name, _fields: None


class Publisher:
    """Any thread may call it; nothing blocks but `stop`, and nothing raises."""

    def __init__(
        self,
        settings: MqttSettings,
        device: str,
        boot_id: str,
        *,
        spool: Callable[[], Spool],
        duties: Duties | None = None,
        timing: Timing | None = None,
    ) -> None:
        """`spool` opens it, in the publisher's thread."""
        self._mailbox = Mailbox()
        self._worker = _Worker(
            settings,
            device,
            boot_id,
            make_spool=spool,
            duties=duties or Duties(),
            timing=timing or Timing(),
            mailbox=self._mailbox,
        )
        self._thread = threading.Thread(target=self._worker.run, name="mqtt", daemon=True)

    def start(self) -> None:
        """Connect, and stay connected."""
        self._thread.start()

    def publish(self, record: Record) -> None:
        """Hand a record over; the spool has it a moment later."""
        self._mailbox.put_record(record)

    def set_state(self, state: str) -> None:
        """What `/state` says from now on, also after each reconnection."""
        self._mailbox.set_state(state)

    @property
    def status(self) -> LinkStatus:
        """How it fares."""
        return self._worker.status

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Say goodbye and close the spool; whether that was done in time."""
        self._mailbox.stop(time.monotonic() + timeout_s)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        elif self._thread.ident is None:  # never started
            self._mailbox.close()
        return not self._thread.is_alive()


class _Worker:
    """The thread's own."""

    def __init__(
        self,
        settings: MqttSettings,
        device: str,
        boot_id: str,
        *,
        make_spool: Callable[[], Spool],
        duties: Duties,
        timing: Timing,
        mailbox: Mailbox,
    ) -> None:
        self.status = LinkStatus()
        self._settings, self._boot_id, self._make_spool = settings, boot_id, make_spool
        self._device, self._prefix = device, f"{settings.base}/{device}"
        self._duties, self._timing, self._mailbox = duties, timing, mailbox
        self._commands: Commands | None = None
        if duties.on_command is not None and settings.commands:
            self._commands = Commands(
                self._prefix, settings.commands, duties.on_command, mailbox.put_message
            )
        client_id = settings.client_id or f"edge_rt-{device}"
        self._link = Link(
            settings,
            client_id,
            will=self._will,
            wake=mailbox.wake,
            on_event=self._tell_event,
            timing=timing,
        )
        self._served: Connection | None = None
        self._told_state: object = None
        self._is_goodbye_said = False
        self._uncommitted_s: float | None = None  # since when
        self._is_status_late = False
        self._fault, self._status_s, self._spool_note = "", 0.0, ""

    def run(self) -> None:
        """Until it is told to stop; an exception costs the connection, not the thread."""
        try:
            self._spool = self._make_spool()
            self._delivery = Delivery(
                self._spool, self._prefix, self._settings.replay_per_s, self._timing.refused
            )
            is_readable = False
            while not self._is_over(time.monotonic()):
                try:
                    is_readable = self._step(time.monotonic(), is_readable)
                except Exception as error:
                    self._recover(error)
            is_clean = self._is_goodbye_said and self._delivery.is_idle
            self._link.close(with_will=not is_clean)
            self._take_records()
            self._delivery.end(time.monotonic())
            self._spool.close()
            self._set_status(time.monotonic())
        except BaseException as error:
            self.status = LinkStatus("down", f"the publisher's thread ended: {error!r}")
            logger.exception("MQTT is off until the daemon is started again")
        finally:
            self._mailbox.close()

    def _step(self, now_s: float, is_readable: bool) -> bool:
        """Do what can be done, then sleep; whether the socket then has something to read."""
        self._take_records()
        self._link.step(now_s, is_readable)
        if self._link.connection is not self._served:
            self._change(now_s)
        if self._served is not None:
            self._serve(self._served, now_s)
        self._commit(now_s)
        self._set_status(time.monotonic())
        link = self._link
        if link.has_pending:
            return True
        return self._mailbox.wait(link.fileno, link.wants_write, self._sleep_s(now_s))

    def _recover(self, error: Exception) -> None:
        what = repr(error)
        if what != self._fault:
            self._fault = what
            logger.exception("the MQTT connection is given up for a fault of edge_rt")
        self._link.drop(f"a fault of edge_rt: {what}", time.monotonic())
        self._served = None
        self._delivery.end(time.monotonic())
        self._set_status(time.monotonic())
        time.sleep(FAULT_S)

    def _change(self, now_s: float) -> None:
        """The connection has come or gone."""
        if self._served is not None:
            self._delivery.end(now_s)
        self._served = self._link.connection
        if self._served is None:
            return
        self._delivery.begin(self._served, now_s)
        self._served.subscribe(
            (self._commands.topics if self._commands else [])
            + ([HOME_ASSISTANT_STATUS] if self._settings.home_assistant else [])
        )
        self._told_state = None
        self._tell_state()

    def _serve(self, connection: Connection, now_s: float) -> None:
        while connection.received:
            message = connection.received.popleft()
            if message.topic == HOME_ASSISTANT_STATUS:
                if message.payload == b"online":
                    self._introduce()
            elif self._commands is not None:
                self._commands.take(message)
        if not self._is_goodbye_said:
            self._tell_state()
        for answer in self._mailbox.take_messages():
            self._delivery.say(answer)
        self._delivery.step(now_s, 2.0 * self._settings.keepalive_s)
        if self._delivery.fault:
            self._link.drop(self._delivery.fault, now_s)

    def _tell_state(self) -> None:
        state = self._mailbox.state
        if state != self._told_state:
            self._told_state = state
            self._say("state", {"state": state.name, "time_ms": state.since_ms})
            self._say("info", {"device": self._device} | dict(self._duties.info()))
            self._introduce()

    def _introduce(self) -> None:
        for topic, payload in self._duties.retained():
            self._delivery.say(Message(topic, payload.encode(), retain=True))

    def _say(self, topic: str, fields: Mapping[str, Any]) -> None:
        head = {"time_ms": time.time_ns() // 1_000_000}
        self._delivery.say(self._own(topic, head | dict(fields)))

    def _own(self, topic: str, fields: Mapping[str, Any]) -> Message:
        head = {"schema_version": SCHEMA_VERSION, "boot_id": self._boot_id}
        payload = json.dumps(head | dict(fields), separators=(",", ":"))
        return Message(f"{self._prefix}/{topic}", payload.encode(), retain=True)

    def _will(self) -> Message:
        """Without a time: the broker publishes it, when nobody can say beforehand."""
        return self._own("state", {"state": "offline", "reason": "connection lost"})

    def _tell_event(self, name: str, fields: Mapping[str, Any]) -> None:
        try:
            self._duties.on_event(name, fields)
        except Exception:
            logger.exception("event %s is not told", name)

    def _take_records(self) -> None:
        for record in self._mailbox.take_records():
            self._spool.put(record)
            self._delivery.is_changed = True

    def _commit(self, now_s: float) -> None:
        if not self._delivery.is_changed:
            self._uncommitted_s = None
        elif self._uncommitted_s is None:
            self._uncommitted_s = now_s
        elif now_s - self._uncommitted_s >= self._settings.spool_commit_s:
            self._delivery.commit()
            self._uncommitted_s = None

    def _sleep_s(self, now_s: float) -> float:
        stop_s = self._mailbox.stop_s
        waits = [TICK_S, self._link.due_s(now_s), self._delivery.due_s(now_s)]
        if self._is_status_late:
            waits.append(STATUS_S)
        if self._uncommitted_s is not None:
            waits.append(self._uncommitted_s + self._settings.spool_commit_s - now_s)
        if stop_s is not None:
            waits.append(0.05)
        return min(waits)

    def _is_over(self, now_s: float) -> bool:
        """Whether to end: there is no connection, the broker has all, or the time is up."""
        stop_s = self._mailbox.stop_s
        if stop_s is None:
            return False
        delivery, last_s = self._delivery, stop_s - CLOSING_S
        if self._served is None or now_s >= last_s:
            return True
        delivery.is_stopping = True
        is_drained = delivery.is_idle and not delivery.has_more
        if not self._is_goodbye_said and (is_drained or now_s >= last_s - GOODBYE_S):
            self._is_goodbye_said = True
            reason = "failed" if self._mailbox.state.name == "failed" else "stopped"
            self._say("state", {"state": "offline", "reason": reason})
            return False
        return self._is_goodbye_said and delivery.is_idle

    def _set_status(self, now_s: float) -> None:
        link, delivery, spool = self._link, self._delivery, self._spool
        due_s = self._status_s + STATUS_S  # as the spool counts its records for it
        self._is_status_late = link.state == self.status.state and now_s < due_s
        if self._is_status_late:
            return
        self._status_s, before = now_s, self.status
        self.status = LinkStatus(
            link.state,
            link.why or delivery.refusal,
            spool.records,
            spool.bytes,
            spool.dropped + self._mailbox.dropped,
            delivery.published,
            max(0, link.connections - 1),
            spool.fault,
            delivery.refused,
            spool.dropped_before,
        )
        if spool.fault != before.spool_fault:
            logger.warning("the spool: %s", spool.fault or "on disk again")
        if spool.note != self._spool_note:
            self._spool_note = spool.note
            logger.warning("the spool: %s", spool.note)
