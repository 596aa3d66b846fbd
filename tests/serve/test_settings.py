"""Settings from files, the command line and SIGHUP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_rt.errors import ConfigError
from edge_rt.serve.settings import ServerSettings, Settings, changes, load


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = written(
        tmp_path / "s.toml", '[server]\nport = 9000\nmax_queue = 7\n[log]\nlevel="error"'
    )
    found = load(file, host="localhost", port=None)
    assert (found.server.host, found.server.port, found.server.max_queue) == ("localhost", 9000, 7)
    assert load(file, port=1).server.port == 1
    assert found.log.level == "error"
    assert load(None) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1", r"s\.toml: server: unknown key 'prot'; did you mean 'port'"),
        ("[server]\nport = 70000", "port must be 0 to 65535, found 70000"),
        ("[server]\nmax_queue = 0", "max_queue must be 1 or more"),
        ("[server]\ntimeout_s = 0", "timeout_s must be more than 0"),
        ("[server]\ntimeout_s = 4000", "timeout_s 4000 is more than max_timeout_s 3600"),
        ("[server]\nmax_body_bytes = 5", "max_body_bytes must be 1024 or more"),
        ('[server]\nhost = "0.0.0.0"', "host 0.0.0.0 can be reached from other machines"),
        ('[log]\nlevel = "loud"', "'loud' is not one of"),
        ("[cache]\nresponses = -1", "responses must be 0 to 1000000"),
        ("[sever]", "unknown key 'sever'; did you mean 'server'"),
        ("[server", "not valid TOML"),
        ('[server]\nunix_socket = ""', "unix_socket is empty"),
        ('[server]\nmodel_name = "a\\nb"', "characters that cannot be printed"),
        ("server = 5", r"s\.toml: server: expected a table, found 5"),
        ("[scheduler]\nageing_ms = -1", "ageing_ms must be 0 to"),
        ('[mqtt]\nhost = "mqtts://b:8883"', "host must be a name or an address alone"),
        ('[mqtt]\nhost = "b:8883"', "the port goes into port"),
    ],
)
def test_faults_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path / "s.toml", text))


def test_a_port_beside_a_unix_socket(tmp_path: Path) -> None:
    file = written(tmp_path / "s.toml", '[server]\nunix_socket = "s"')
    assert load(file).server.unix_socket == "s"
    with pytest.raises(ConfigError, match=r"has no host and port; leave it out, or --port"):
        load(file, port=1)
    with pytest.raises(ConfigError, match=r"s\.toml: server: expected a table"):
        load(written(tmp_path / "s.toml", "server = 5"), port=1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"host": "0.0.0.0", "api_keys_file": "keys.toml"},  # noqa: S104
        {"host": "0.0.0.0", "unix_socket": "/run/x"},  # noqa: S104
        {"host": "127.0.0.2"},
        {"host": "::1"},
        {"host": "localhost"},
    ],
)
def test_addresses_that_may_be_served(arguments: dict[str, Any]) -> None:
    ServerSettings(**arguments)


def test_what_sighup_may_change() -> None:
    old = Settings()
    new = Settings(ServerSettings(port=1, max_queue=5, timeout_s=1.0))
    assert changes(old, new) == (["server.max_queue", "server.timeout_s"], ["server.port"])
    assert changes(old, Settings()) == ([], [])
