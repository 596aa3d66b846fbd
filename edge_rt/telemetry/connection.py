"""One connection to the broker, from its opening to its end; a new one starts from nothing.

paho-mqtt speaks the protocol here and nothing more: it starts no thread, keeps no session, queues
nothing and never reconnects (its external-loop functions: loop_read, loop_write, loop_misc).
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, LogLevel, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from edge_rt.errors import ConfigError
from edge_rt.telemetry.last_words import last_words, rejection
from edge_rt.telemetry.login import read_login
from edge_rt.telemetry.settings import MqttSettings
from edge_rt.telemetry.status import LinkState

logger = logging.getLogger(__name__)

MAX_RECEIVED_BYTES = 128 * 1024  # of a packet; the broker keeps larger ones back
MAX_RECEIVED_AT_ONCE = 16
FLUSH_S = 0.2  # for a last DISCONNECT

# CONNACK: client id, user or password, not authorized, banned, authentication method
_REFUSED_LOGIN = {0x85, 0x86, 0x87, 0x8A, 0x8C}
_UNSUPPORTED_PROTOCOL = 0x84
_NOT_AUTHORIZED = 0x87
_TAKEN_OVER = 0x8E
_PROTOCOL_ERROR = 0x82
_FAILURE = 0x80  # and above, of any reason code
_CUT = 0x80  # paho's for a socket that the other side has closed
_WITH_WILL = 0x04


class Message(NamedTuple):
    """One that goes out with QoS 1."""

    topic: str
    payload: bytes
    retain: bool = False
    correlation: bytes | None = None

    @property
    def packet_bytes(self) -> int:
        """What its PUBLISH takes at most."""
        correlation = 0 if self.correlation is None else len(self.correlation) + 3
        return 13 + len(self.topic.encode()) + len(self.payload) + correlation


class Acknowledgement(NamedTuple):
    """A PUBACK."""

    mid: int
    code: int
    reason: str

    @property
    def is_refused(self) -> bool:
        """Whether the broker did not take the message."""
        return self.code >= _FAILURE


class Accepted(NamedTuple):
    """What the broker's CONNACK allows."""

    receive_maximum: int
    max_packet_bytes: int


class Connection:
    """`ended` says why it is over, `ended_as` what that means; both are empty while it lives.

    Used by one thread, but for the opening, which another one runs beforehand.
    """

    def __init__(
        self, settings: MqttSettings, client_id: str, will: Message | None, step_s: float
    ) -> None:
        """`step_s` limits each of: reaching one address, the TLS handshake."""
        self.ended = ""
        self.ended_as: LinkState = "down"
        self.is_open = False
        self.was_cut = False  # by the other side, after it had accepted us, without a reason
        self.accepted: Accepted | None = None  # after CONNACK
        self.acknowledged: deque[Acknowledgement] = deque()
        self.received: deque[MQTTMessage] = deque()
        self._settings, self._is_abandoned = settings, False
        self._fault = self._refusal = ""
        self._client = client = Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=MQTTProtocolVersion.MQTTv5,
            reconnect_on_failure=False,
        )
        client.connect_timeout = step_s
        client.max_inflight_messages_set(0)  # the window is Delivery's: paho's is not Receive Max.
        if will is not None:
            client.will_set(will.topic, will.payload, qos=1, retain=will.retain)
        client.on_socket_close = self._on_socket_close
        client.on_socket_register_write = lambda *_: None  # so that `publish` only queues
        client.on_connect, client.on_disconnect = self._on_connect, self._on_disconnect
        client.on_publish, client.on_message = self._on_publish, self._on_message
        client.on_subscribe, client.on_log = self._on_subscribe, self._on_log

    def open_in_background(self, wake: Callable[[], None]) -> None:
        """Look the name up, connect, shake hands, all of which block; then `wake` is called."""

        def run() -> None:
            self._open()
            wake()

        threading.Thread(target=run, name="mqtt-connect", daemon=True).start()

    def _open(self) -> None:
        host, port = self._settings.host or "", port_of(self._settings)
        try:
            login = read_login(self._settings)
            if login.username is not None:
                self._client.username_pw_set(login.username, login.password)
            if login.tls is not None:
                self._client.tls_set_context(login.tls)
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = 0  # the spool knows what is not acknowledged
            properties.MaximumPacketSize = MAX_RECEIVED_BYTES
            properties.ReceiveMaximum = MAX_RECEIVED_AT_ONCE
            self._client.connect(
                host, port, self._settings.keepalive_s, clean_start=True, properties=properties
            )
        except Exception as error:  # whatever it is: no connection
            is_login = bool(rejection(str(error)))  # before TLS 1.3 it comes in the handshake
            self._end(_text(error, host, port), "auth-failed" if is_login else "down")
        self.is_open = not self.ended
        if self._is_abandoned or self.ended:
            self._close_socket()

    def fileno(self) -> int:
        """To wait on; -1 if there is none."""
        found = self._client.socket() if self.is_open else None
        return -1 if found is None else found.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether a packet waits until the socket takes it."""
        return self._client.want_write()

    @property
    def has_pending(self) -> bool:
        """Whether TLS has decrypted bytes that no poll shows."""
        found = self._client.socket()
        return isinstance(found, ssl.SSLSocket) and found.pending() > 0

    def step(self, is_readable: bool) -> None:
        """Read what came, write what waits, keep alive; in this order, as the last words of a
        broker that has closed the connection are lost with the first write that fails.
        """
        if is_readable:
            self._client.loop_read()
            while self.has_pending and not self.ended:
                self._client.loop_read()
        if self.wants_write and not self.ended:
            self._client.loop_write()
        self._client.loop_misc()
        if self._client.socket() is None:
            self._end("the connection was lost")

    def publish(self, message: Message) -> int | None:
        """Its packet id; None if the connection is over."""
        properties = None
        if message.correlation is not None:
            properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            properties.CorrelationData = message.correlation
        sent = self._client.publish(
            message.topic, message.payload, qos=1, retain=message.retain, properties=properties
        )
        return None if sent.rc else sent.mid

    def subscribe(self, topics: Sequence[str]) -> None:
        """Live messages alone: retained ones are not sent, and are marked when they are live."""
        if topics:
            options = SubscribeOptions(
                qos=1,
                noLocal=True,
                retainAsPublished=True,
                retainHandling=SubscribeOptions.RETAIN_DO_NOT_SEND,
            )
            self._client.subscribe([(topic, options) for topic in topics])

    def close(self, with_will: bool) -> None:
        """Say goodbye, if the broker listens; `with_will` has it publish the will."""
        if self.is_open and not self.ended:
            code = ReasonCode(PacketTypes.DISCONNECT, identifier=_WITH_WILL if with_will else 0)
            self._client.disconnect(code)
            deadline = time.monotonic() + FLUSH_S
            while self.wants_write and self._client.socket() and time.monotonic() < deadline:
                self._client.loop_write()
                time.sleep(0.01)
        self.drop("closed")

    def drop(self, why: str) -> None:
        """End it without a word. An opening that is under way closes its socket when it is done; it
        does not log in, lest it take over a later connection: the first `step` sends CONNECT.
        """
        self._end(why)
        self._is_abandoned = True  # an opening may not log in now: it would take over a later one
        if self.is_open:
            self._close_socket()

    def _close_socket(self) -> None:
        found = self._client.socket()
        if found is not None:
            found.close()

    def _end(self, why: str, state: LinkState = "down") -> None:
        if not self.ended:
            self.ended, self.ended_as = why, state

    def _on_socket_close(self, _client: Client, _data: Any, closing: Any) -> None:
        if self.ended:
            return
        try:
            for code, mid in last_words(closing):
                if mid is None:
                    self._on_goodbye(code, None)
                else:
                    self._on_publish(self._client, None, mid, code, None)
        except ssl.SSLError as error:
            self._fault = str(error)

    def _on_goodbye(self, code: ReasonCode, got: Properties | None) -> None:
        state: LinkState = "taken-over" if code.value == _TAKEN_OVER else "down"
        self._end(f"the broker ended the connection: {_reason(code, got)}", state)

    def _on_connect(
        self,
        _client: Client,
        _data: Any,
        _flags: ConnectFlags,
        code: ReasonCode,
        got: Properties | None,
    ) -> None:
        if code.value == _UNSUPPORTED_PROTOCOL:
            self._end("the broker does not speak MQTT 5")
        elif code.is_failure:
            state: LinkState = "auth-failed" if code.value in _REFUSED_LOGIN else "down"
            self._end(f"the broker refused the login: {_reason(code, got)}", state)
        elif getattr(got, "MaximumQoS", 1) < 1:
            self._end("the broker takes no QoS 1, which is what keeps records from being lost")
        else:
            self.accepted = Accepted(
                getattr(got, "ReceiveMaximum", 65_535), getattr(got, "MaximumPacketSize", 1 << 28)
            )

    def _on_disconnect(
        self,
        _client: Client,
        _data: Any,
        flags: DisconnectFlags,
        code: ReasonCode,
        got: Properties | None,
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self._on_goodbye(code, got)
        elif not self.accepted:
            if rejected := rejection(self._fault):
                self._end(f"the broker refused the client certificate: {rejected}", "auth-failed")
            is_garbage = code.value == _PROTOCOL_ERROR
            why = "what it sent is not MQTT 5" if is_garbage else "it closed the connection"
            why = self._fault or why
            hint = (
                "it may want a client certificate (cert_file), or not accept this one"
                if self._settings.tls
                else "if its port is one for TLS, set tls = true"
            )
            self._end(f"the broker did not answer CONNECT: {why}; {hint}")
        elif self._refusal:
            self._end(f"the broker refused a message ({self._refusal}) and closed the connection")
        else:
            self.was_cut = code.value == _CUT
            self._end(self._fault or f"the connection was lost: {code}")

    def _on_publish(
        self, _client: Client, _data: Any, mid: int, code: ReasonCode, got: Properties | None
    ) -> None:
        reason = _reason(code, got)
        if code.is_failure:
            self._refusal = str(code)
        if code.value == _NOT_AUTHORIZED:
            reason += "; the broker's access list must let this login write below base/device"
        self.acknowledged.append(Acknowledgement(mid, code.value, reason))

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        self.received.append(message)

    def _on_subscribe(
        self,
        _client: Client,
        _data: Any,
        _mid: int,
        codes: list[ReasonCode],
        got: Properties | None,
    ) -> None:
        for code in codes:
            if code.is_failure:  # telemetry goes on without it
                logger.warning("the broker refused a subscription: %s", _reason(code, got))

    def _on_log(self, _client: Client, _data: Any, level: int, text: str) -> None:
        if (
            level == LogLevel.MQTT_LOG_ERR
        ):  # the only place where paho says what a socket's fault was
            self._fault = text.removeprefix("failed to receive on socket: ")


def port_of(settings: MqttSettings) -> int:
    """The standard's port, unless one is set."""
    return settings.port or (8883 if settings.tls else 1883)


def _reason(code: ReasonCode, properties: Properties | None) -> str:
    """The code's name, and the broker's own words if it has some."""
    words = getattr(properties, "ReasonString", "")
    return f"{code} ({words})" if words else str(code)


def _text(error: Exception, host: str, port: int) -> str:  # noqa: PLR0911 - one line per kind
    where = f"{host}:{port}"
    match error:
        case ConfigError():
            return str(error)
        case socket.gaierror():
            return f"{host} cannot be looked up: {error.strerror}"
        case ssl.SSLCertVerificationError():
            return f"{where}: its certificate is not trusted: {error.verify_message}"
        case ssl.SSLError() if rejected := rejection(str(error)):
            return f"the broker refused the client certificate: {rejected}"
        case ssl.SSLError() | ConnectionResetError():  # until then nothing but TLS was spoken
            reason = getattr(error, "reason", None) or error.strerror or error
            return f"{where}: TLS failed ({reason}); its port may be one without TLS"
        case TimeoutError():
            return f"{where} did not answer in time"
        case OSError():
            return f"{where}: {error.strerror or error}"
        case _:
            return f"{where}: {type(error).__name__}: {error}"
