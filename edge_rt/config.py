"""Settings from TOML into frozen dataclasses: an unknown key is an error, never ignored."""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from edge_rt.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def load(cls: type[T], path: Path) -> T:
    """Read a TOML file as `cls`; any fault is a ConfigError that names the file and the key."""
    return from_table(cls, read(path), str(path))


def read(path: Path) -> dict[str, Any]:
    """A TOML file's table; ConfigError if there is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad TOML, nested without end
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def from_table(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """Make a dataclass of a table; nested dataclasses and `dict[str, ...]` take nested tables,
    `list[...]` takes lists.

    The dataclass checks its own values in `__post_init__` and raises ConfigError; `where` is put
    before whatever it says.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise ConfigError(f"{where}: unknown key '{key}'{_nearest(key, fields)}")
    missing = [
        name
        for name, f in fields.items()
        if name not in table
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: missing key '{missing[0]}'")
    values = {key: _convert(value, hints[key], f"{where}: {key}") for key, value in table.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _nearest(key: str, known: Mapping[str, object]) -> str:
    match = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean '{match[0]}'?" if match else f"; known keys: {', '.join(sorted(known))}"


def _convert(value: Any, kind: Any, where: str) -> Any:
    if typing.get_origin(kind) in {types.UnionType, typing.Union}:
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
        return None if value is None else _convert(value, kind, where)
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: expected a list, found {value!r}")
        (item_kind,) = typing.get_args(kind)
        return [_convert(item, item_kind, f"{where}[{i}]") for i, item in enumerate(value)]
    if dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict:
        return _convert_table(value, kind, where)
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        # Types are compared too: False equals 0, and 4.0 equals 4.
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise ConfigError(f"{where}: {value!r} is not one of {', '.join(map(repr, choices))}")
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        found = type(value).__name__
        raise ConfigError(f"{where}: expected {kind.__name__}, found {found} {value!r}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{where}: expected a finite number, found {value!r}")
    return value


def _convert_table(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a table, found {value!r}")
    if typing.get_origin(kind) is not dict:
        return from_table(kind, value, where)
    _, item_kind = typing.get_args(kind)
    return {key: _convert(item, item_kind, f"{where}: {key}") for key, item in value.items()}
