"""The daemon's settings: what `edge-rt serve --config FILE` takes, as TOML.

A field's `doc` says what it is for; docs/configuration.md is made of them.
"""

from __future__ import annotations

import ipaddress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from edge_rt import config
from edge_rt.errors import ConfigError
from edge_rt.power.settings import BoardSettings
from edge_rt.sched.queue import SchedulerOptions
from edge_rt.telemetry.settings import MqttSettings, TelemetrySettings

LogLevel = Literal["debug", "info", "warning", "error"]

RELOADABLE = frozenset(
    {
        "server.api_keys_file",
        "server.max_queue",
        "server.timeout_s",
        "server.max_timeout_s",
        "server.max_body_bytes",
        "server.slow_client_s",
        "server.drain_s",
        "log.level",
        "log.prompts",
    }
)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where requests come from, and how much of everything a client may have."""

    host: str = field(
        default="127.0.0.1",
        metadata={"doc": "Address to listen at. One that others can reach needs `api_keys_file`."},
    )
    port: int = field(
        default=8000,
        metadata={"doc": "Port to listen at; 0 takes a free one, which the log names."},
    )
    unix_socket: str | None = field(
        default=None,
        metadata={"doc": "Unix socket to listen at instead; its owner and group may connect."},
    )
    api_keys_file: str | None = field(
        default=None,
        metadata={
            "doc": "File of API keys, a format of its own. Without it nobody is asked for one."
        },
    )
    model_name: str | None = field(
        default=None,
        metadata={"doc": "Name of the model in requests; not set: that of the bundle's directory."},
    )
    max_queue: int = field(
        default=128,
        metadata={
            "doc": "Prompts that wait or are served at once; a request on top of them gets 429, "
            "one that has more by itself 400."
        },
    )
    timeout_s: float = field(
        default=600.0, metadata={"doc": "How long a request may take if it does not say."}
    )
    max_timeout_s: float = field(
        default=3600.0, metadata={"doc": "The most that a request gets, whatever it says."}
    )
    max_body_bytes: int = field(
        default=1 << 20, metadata={"doc": "The longest body that is read; a longer one gets 413."}
    )
    slow_client_s: float = field(
        default=30.0,
        metadata={
            "doc": "A client that sends no whole head, nothing of its body, or takes nothing of "
            "its answer for so long is given up."
        },
    )
    drain_s: float = field(
        default=30.0,
        metadata={
            "doc": "After SIGTERM what is served may go on for so long; then, or at a second "
            "SIGTERM, it is cancelled."
        },
    )

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65_535, f"port must be 0 to 65535, found {self.port}")
        for name in ("model_name", "unix_socket", "api_keys_file"):
            _require(getattr(self, name) != "", f"{name} is empty; leave it out or give it a value")
        _require(
            (self.model_name or "").isprintable(),
            f"model_name has characters that cannot be printed: {self.model_name!r}",
        )
        _require(self.max_queue >= 1, f"max_queue must be 1 or more, found {self.max_queue}")
        _require(
            self.max_body_bytes >= 1024,
            f"max_body_bytes must be 1024 or more, found {self.max_body_bytes}",
        )
        for name in ("timeout_s", "max_timeout_s", "slow_client_s"):
            value = getattr(self, name)
            _require(0 < value <= 86_400, f"{name} must be more than 0 and at most 86400 (a day)")
        _require(0 <= self.drain_s <= 86_400, f"drain_s must be 0 to 86400, found {self.drain_s:g}")
        _require(
            self.timeout_s <= self.max_timeout_s,
            f"timeout_s {self.timeout_s:g} is more than max_timeout_s {self.max_timeout_s:g}",
        )
        _require(
            self.unix_socket is not None or self.api_keys_file is not None or self.is_local,
            f"host {self.host} can be reached from other machines, so everybody there could use "
            f"the engine; name an api_keys_file, or take 127.0.0.1",
        )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach `host`."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, to stderr."""

    level: LogLevel = field(
        default="info", metadata={"doc": "The least that is logged; at info one line a request."}
    )
    prompts: bool = field(
        default=False,
        metadata={"doc": "Whether prompts and answers are logged with their request."},
    )


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Answers that are kept for the same request again."""

    responses: int = field(
        default=0,
        metadata={
            "doc": "How many are kept; only where the answer would be the same again: without a "
            "temperature or with a seed, and not streamed. 0: none."
        },
    )

    def __post_init__(self) -> None:
        _require(
            0 <= self.responses <= 1_000_000,
            f"responses must be 0 to 1000000, found {self.responses}",
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """All of them."""

    server: ServerSettings = field(default_factory=ServerSettings)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    log: LogSettings = field(default_factory=LogSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    mqtt: MqttSettings = field(default_factory=MqttSettings)
    board: BoardSettings = field(default_factory=BoardSettings)


def load(path: Path | None, board: str | None = None, **server: Any) -> Settings:
    """Settings of a file, or the defaults; `board` overrides its board's kind, `server` its
    server's.

    ConfigError names the file and the key of any fault.
    """
    table: dict[str, Any] = {} if path is None else config.read(path)
    given = {name: value for name, value in server.items() if value is not None}
    in_file = table.get("server", {})
    if given and isinstance(in_file, dict):
        table["server"] = in_file | given
    sensors = table.get("board", {})
    if board is not None and isinstance(sensors, dict):
        table["board"] = sensors | {"kind": board}
    where = "the command line" if path is None else str(path)
    found = config.from_table(Settings, table, where)
    if given and found.server.unix_socket is not None:
        raise ConfigError(
            f"{where}: with unix_socket the daemon has no host and port; leave it out, or "
            f"{', '.join(f'--{name}' for name in given)}"
        )
    return found


def changes(old: Settings, new: Settings) -> tuple[list[str], list[str]]:
    """Names of what differs, section and key: what may change while the daemon runs, what not."""
    different = [
        f"{section}.{name}"
        for section, values in asdict(old).items()
        for name, value in values.items()
        if getattr(getattr(new, section), name) != value
    ]
    can = [name for name in different if name in RELOADABLE]
    return can, [name for name in different if name not in RELOADABLE]
