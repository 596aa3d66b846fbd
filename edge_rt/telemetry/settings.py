"""Settings of what the daemon reports, and to whom."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from edge_rt.errors import ConfigError

COMMANDS = ("bench", "drain", "power-cap")
_SEGMENT = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _is_host(text: str) -> bool:
    if ":" not in text:
        return re.search(r"[/\s\[\]]", text) is None
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """What is reported, whoever reads it."""

    interval_s: float = field(
        default=10.0,
        metadata={"doc": "How often figures are published over MQTT."},
    )

    def __post_init__(self) -> None:
        _require(
            0.1 <= self.interval_s <= 3600,
            f"interval_s must be 0.1 to 3600, found {self.interval_s:g}",
        )


@dataclass(frozen=True, slots=True)
class MqttSettings:
    """The MQTT 5 broker that figures and events go to; nothing is sent anywhere without `host`."""

    host: str | None = field(
        default=None, metadata={"doc": "Name or address of the broker; not set: no MQTT."}
    )
    port: int | None = field(
        default=None, metadata={"doc": "Its port; not set: 1883, with `tls` 8883."}
    )
    tls: bool = field(
        default=False,
        metadata={"doc": "Whether the connection is TLS; the broker's certificate is checked."},
    )
    ca_file: str | None = field(
        default=None,
        metadata={"doc": "Certificates (PEM) that vouch for the broker; not set: the system's."},
    )
    cert_file: str | None = field(
        default=None, metadata={"doc": "Client certificate (PEM), with `key_file`."}
    )
    key_file: str | None = field(
        default=None, metadata={"doc": "Its private key (PEM), not encrypted."}
    )
    username: str | None = field(default=None, metadata={"doc": "Login at the broker."})
    password_file: str | None = field(
        default=None,
        metadata={
            "doc": "File of the password, whose last end of line does not count; read at every "
            "connection. Not set: systemd's credential `mqtt-password`, if there is one."
        },
    )
    device: str | None = field(
        default=None,
        metadata={
            "doc": "The device's part of the topics, of letters, digits and `_.:-`; not set: "
            "`jetson-` and the serial number, or the host's name and six digits of its machine id."
        },
    )
    client_id: str | None = field(
        default=None,
        metadata={"doc": "Unique at the broker; not set: `edge_rt-` and `device`."},
    )
    base: str = field(default="edge_rt", metadata={"doc": "First part of all topics."})
    keepalive_s: int = field(
        default=30,
        metadata={"doc": "A broker that says nothing for twice as long counts as gone."},
    )
    spool_file: str | None = field(
        default=None,
        metadata={
            "doc": "Where records wait that the broker has not acknowledged (SQLite); not set: "
            "`mqtt-spool.sqlite` in systemd's state directory, or in `~/.local/state/edge-rt`."
        },
    )
    spool_max_bytes: int = field(
        default=64 << 20,
        metadata={"doc": "The most that it takes on disk; beyond it the oldest are dropped."},
    )
    spool_commit_s: float = field(
        default=5.0,
        metadata={
            "doc": "A record that has waited so long is written to disk. A power cut or `kill -9` "
            "loses at most the records of so long."
        },
    )
    replay_per_s: float = field(
        default=100.0,
        metadata={"doc": "How many records of an outage are sent per second, beside new ones."},
    )
    commands: list[str] = field(
        default_factory=list,
        metadata={
            "doc": "Commands that are taken from `cmd/` topics: `drain`, `bench`, `power-cap`. "
            "Whoever may publish there can give them."
        },
    )
    home_assistant: bool = field(
        default=False,
        metadata={"doc": "Whether the device announces its sensors to Home Assistant."},
    )

    def __post_init__(self) -> None:
        _require(self.port is None or 1 <= self.port <= 65_535, "port must be 1 to 65535")
        for name in (
            "host", "ca_file", "cert_file", "key_file", "username", "password_file", "spool_file",
        ):  # fmt: skip
            _require(getattr(self, name) != "", f"{name} is empty; leave it out or give it a value")
        _require(
            self.host is None or _is_host(self.host),
            f"host must be a name or an address alone, found {self.host!r}; the port goes into "
            "port, and mqtts:// is tls = true",
        )
        _require(
            (self.cert_file is None) == (self.key_file is None),
            "cert_file and key_file go together; one of them is missing",
        )
        _require(
            self.tls or (self.ca_file is None and self.cert_file is None),
            "ca_file, cert_file and key_file are for TLS; set tls = true",
        )
        _require(
            self.username is not None or self.password_file is None,
            "password_file needs a username",
        )
        for name in ("device", "client_id"):
            value = getattr(self, name)
            _require(
                value is None or _SEGMENT.fullmatch(value) is not None,
                f"{name} must be 1 to 64 letters, digits or _.:-, found {value!r}",
            )
        _require(
            all(_SEGMENT.fullmatch(part) for part in self.base.split("/")),
            f"base must be letters, digits or _.:- in parts with / between them, "
            f"found {self.base!r}",
        )
        _require(5 <= self.keepalive_s <= 3600, "keepalive_s must be 5 to 3600")
        _require(self.spool_max_bytes >= 1 << 20, "spool_max_bytes must be 1048576 or more (1 MiB)")
        _require(0.1 <= self.spool_commit_s <= 600, "spool_commit_s must be 0.1 to 600")
        _require(0 < self.replay_per_s <= 10_000, "replay_per_s must be above 0, at most 10000")
        for verb in self.commands:
            _require(
                verb in COMMANDS,
                f"commands: there is no '{verb}'; there are {', '.join(COMMANDS)}",
            )
