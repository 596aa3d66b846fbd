"""Keeps a connection to the broker: opens it, notices its end, waits, opens the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from edge_rt.telemetry.backoff import Backoff, Delays
from edge_rt.telemetry.connection import Connection, Message, port_of
from edge_rt.telemetry.settings import MqttSettings
from edge_rt.telemetry.status import LinkState

logger = logging.getLogger(__name__)


CUTS = 3  # in a row that are taken for a takeover


class Timing(NamedTuple):
    """Limits and waits; other than these ones in tests alone.

    `step_s` limits each of: reaching one address, the TLS handshake, CONNACK. `opening_s` limits
    all up to CONNACK, with the lookup of the name and each of its addresses. A connection that
    lasted `steady_s` was no failure.
    """

    step_s: float = 10.0
    opening_s: float = 40.0
    steady_s: float = 60.0
    lost: Delays = Delays(1.0, 60.0)
    refused: Delays = Delays(30.0, 300.0, 1.0, 1.5)
    taken_over: Delays = Delays(60.0, 600.0, 1.0, 1.5)
    undisturbed_s: float = 1800.0  # more than the longest wait: two of one id do not start anew


class Link:
    """`state` and `why` are LinkStatus'; `connection` is there while messages can be sent."""

    def __init__(
        self,
        settings: MqttSettings,
        client_id: str,
        *,
        will: Callable[[], Message],
        wake: Callable[[], None],
        on_event: Callable[[str, Mapping[str, Any]], None],
        timing: Timing,
    ) -> None:
        self.state: LinkState = "connecting"
        self.why = ""
        self.connections = 0
        self.connection: Connection | None = None
        self._settings, self._client_id, self._will = settings, client_id, will
        self._wake, self._on_event, self._timing = wake, on_event, timing
        self._current: Connection | None = None  # from its opening on
        self._next_s = 0.0  # when it is given up, or opened
        self._connected_s = 0.0
        self._tries = self._cuts = 0
        self._backoffs: dict[LinkState, Backoff] = {
            "down": Backoff(timing.lost),
            "auth-failed": Backoff(timing.refused),
            "taken-over": Backoff(timing.taken_over),
        }

    @property
    def fileno(self) -> int:
        """To wait on; -1 if there is none."""
        return -1 if self._current is None else self._current.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether to wait for writing too."""
        return self._current is not None and self._current.is_open and self._current.wants_write

    @property
    def has_pending(self) -> bool:
        """Whether not to wait at all."""
        return self._current is not None and self._current.is_open and self._current.has_pending

    def due_s(self, now_s: float) -> float:
        """In how long `step` has something to do, if nothing is heard before."""
        return 3600.0 if self.connection is not None else max(0.0, self._next_s - now_s)

    def step(self, now_s: float, is_readable: bool) -> None:
        """Whatever can be done now, without waiting."""
        current = self._current
        if current is None:
            if now_s >= self._next_s:
                self._open(now_s)
            return
        if current.is_open and not current.ended:
            current.step(is_readable)
        if not current.ended and current.accepted is None and now_s >= self._next_s:
            current.drop(f"{self._where} did not answer in time")
        if current.ended:
            self._lost(current, now_s)
        elif current.accepted is not None and self.connection is None:
            self.connection, self._connected_s = current, now_s
            self.connections += 1
            self._become("connected", "")
        elif current.is_open and self._next_s > now_s + self._timing.step_s:
            self._next_s = now_s + self._timing.step_s  # for CONNACK

    def drop(self, why: str, now_s: float) -> None:
        """Give the connection up, and try again later."""
        if self._current is not None:
            self._current.drop(why)
            self._lost(self._current, now_s)

    def close(self, with_will: bool) -> None:
        """The end of all connections."""
        current, self._current, self.connection = self._current, None, None
        if current is not None:
            current.close(with_will)
        self.state, self.why = "off", ""

    @property
    def _where(self) -> str:
        return f"{self._settings.host}:{port_of(self._settings)}"

    def _open(self, now_s: float) -> None:
        self._next_s, self._tries = now_s + self._timing.opening_s, self._tries + 1
        self._current = Connection(
            self._settings, self._client_id, self._will(), self._timing.step_s
        )
        self._current.open_in_background(self._wake)

    def _lost(self, current: Connection, now_s: float) -> None:
        was_connected = self.connection is not None
        lasted_s = now_s - self._connected_s if was_connected else 0.0
        state, why = self._judge(current, lasted_s)
        self._current = self.connection = None
        current.drop("")
        if was_connected:
            self._backoffs["auth-failed"].reset()
        if lasted_s >= self._timing.steady_s:
            self._backoffs["down"].reset()
        if lasted_s >= self._timing.undisturbed_s:
            self._backoffs["taken-over"].reset()
        wait_s = self._backoffs[state].next_s()
        self._next_s = now_s + wait_s
        self._become(state, why)
        if state == "taken-over":
            self._on_event("mqtt-taken-over", {"client_id": self._client_id, "retry_s": wait_s})

    def _judge(self, ended: Connection, lasted_s: float) -> tuple[LinkState, str]:
        """Older brokers (mosquitto 2.0.11) tell nobody that it was taken over, but just close.

        A broker that stopped refuses the next try; one that accepts it at once, and soon closes it
        too, again and again, has another client of this name.
        """
        if lasted_s >= self._timing.steady_s or not ended.was_cut:
            self._cuts = 0
        elif self._tries == 1:
            self._cuts += 1
        if lasted_s > 0.0:
            self._tries = 0
        if self._cuts < CUTS:
            return ended.ended_as, ended.ended
        why = f"the broker closed {self._cuts} connections in a row soon after it accepted them"
        return "taken-over", why

    def _become(self, state: LinkState, why: str) -> None:
        if (state, why) == (self.state, self.why):
            return
        self.state, self.why = state, why
        if state == "connected":
            logger.info("connected to %s as %s", self._where, self._client_id)
            return
        hint = {
            "auth-failed": "; check username, password_file, cert_file and what the broker allows: "
            "the files are read again at each try",
            "taken-over": f"; another client is called {self._client_id} too or has its "
            "certificate, or this daemon runs twice: set device or client_id in [mqtt]",
        }.get(state, "")
        logger.warning("MQTT is %s: %s%s; trying again", state, why, hint)
