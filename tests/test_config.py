from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from edge_rt import config
from edge_rt.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ConfigError(f"seconds must not be negative, found {self.seconds}")


@dataclass(frozen=True)
class Settings:
    name: str
    count: int = 1
    enabled: bool = False
    level: Literal[0, 4] = 4
    limit: int | None = None
    inner: Inner = field(default_factory=Inner)
    optional: Inner | None = None
    labels: dict[str, str] = field(default_factory=dict)
    parts: dict[str, Inner] = field(default_factory=dict)


def settings(**table: Any) -> Settings:
    return config.from_table(Settings, {"name": "a", **table}, "here")


def test_defaults() -> None:
    assert settings() == Settings("a")


def test_every_kind_of_value() -> None:
    assert settings(
        count=3,
        enabled=True,
        level=0,
        limit=7,
        inner={"seconds": 2.5},
        optional={"seconds": 2},
        labels={"x": "y"},
        parts={"p": {"seconds": 3.0}},
    ) == Settings("a", 3, True, 0, 7, Inner(2.5), Inner(2.0), {"x": "y"}, {"p": Inner(3.0)})


def test_none_only_where_it_is_allowed() -> None:
    assert settings(limit=None, optional=None) == Settings("a")
    with pytest.raises(ConfigError, match="count: expected int, found NoneType"):
        settings(count=None)


def test_whole_number_for_float() -> None:
    seconds = settings(inner={"seconds": 2}).inner.seconds
    assert type(seconds) is float


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"cuont": 1}, "here: unknown key 'cuont'; did you mean 'count'?"),
        ({"zzz": 1}, "here: unknown key 'zzz'; known keys: count, enabled, inner"),
        ({"inner": {"secs": 1}}, "here: inner: unknown key 'secs'"),
        ({"inner": {"seconds": -1}}, "here: inner: seconds must not be negative, found -1"),
        ({"inner": 3}, "here: inner: expected a table, found 3"),
        ({"optional": {"seconds": "1"}}, "here: optional: seconds: expected float, found str '1'"),
        ({"count": "3"}, "here: count: expected int, found str '3'"),
        ({"count": 3.0}, "here: count: expected int, found float 3.0"),
        ({"count": True}, "here: count: expected int, found bool True"),
        ({"limit": True}, "here: limit: expected int, found bool True"),
        ({"enabled": 1}, "here: enabled: expected bool, found int 1"),
        ({"inner": {"seconds": True}}, "seconds: expected float, found bool True"),
        ({"inner": {"seconds": float("nan")}}, "seconds: expected a finite number, found nan"),
        ({"inner": {"seconds": float("inf")}}, "seconds: expected a finite number, found inf"),
        ({"level": 3}, "here: level: 3 is not one of 0, 4"),
        ({"level": False}, "here: level: False is not one of 0, 4"),
        ({"level": 4.0}, "here: level: 4.0 is not one of 0, 4"),
        ({"level": []}, "here: level: [] is not one of 0, 4"),
        ({"labels": ["x"]}, "here: labels: expected a table"),
        ({"labels": {"x": 1}}, "here: labels: x: expected str, found int 1"),
        ({"parts": {"p": {"second": 1}}}, "here: parts: p: unknown key 'second'; did you mean"),
    ],
)
def test_fault_names_the_key(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**table)
    assert message in str(caught.value)


def test_missing_key() -> None:
    with pytest.raises(ConfigError, match="here: missing key 'name'"):
        config.from_table(Settings, {}, "here")


def test_load(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('name = "b"\n[inner]\nseconds = 4\n[parts.p]\nseconds = 5.5\n')
    assert config.load(Settings, file) == Settings("b", inner=Inner(4.0), parts={"p": Inner(5.5)})


def test_load_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('name = "b"\n[inner]\nsecond = 4\n')
    with pytest.raises(ConfigError) as caught:
        config.load(Settings, file)
    assert str(caught.value) == (f"{file}: inner: unknown key 'second'; did you mean 'seconds'?")


@pytest.mark.parametrize("content", [b"name =", b"name = 'a'\nname = 'b'", b"\xff"])
def test_load_bad_toml(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.toml is not valid TOML"):
        config.load(Settings, file)


def test_load_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        config.load(Settings, tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config.load(Settings, tmp_path)
