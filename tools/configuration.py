"""Writes docs/configuration.md from the types that the daemon's files are read with.

python tools/configuration.py
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from edge_rt.cli import serve
from edge_rt.serve.keys import ApiKey, KeyFile
from edge_rt.serve.settings import RELOADABLE, ServerSettings, Settings

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
COMMAND = "python tools/configuration.py"
COLUMNS = 100

NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}
EMPTY = {str: '""', int: "0", float: "0.0", bool: "false"}

TEXT = """\
# Configuration

<!-- Written by {command}: change the types that it reads, not this page. -->

`edge-rt serve --config FILE` reads its settings as TOML. What the file leaves out, or everything
if there is no file, is as the tables say. Units are in the names; paths are relative to the
directory that the daemon is started in. An unknown key, a wrong type or a value that cannot work
ends the start with exit code 2 and a line that says where and what the fault is.

On the command line {overrides},
at the start and whenever SIGHUP reads the file again. `unix_socket` goes with neither: the start
fails. *Changes at* says what it takes for a new value to hold.

{settings}
## Example

What holds without a file; keys behind `#` are not set.

```toml
{example}```

## SIGHUP

SIGHUP reads the settings and the file of API keys again. All new values hold, or none: if either
file cannot be read or is wrong, or if a key that needs a restart has another value, the daemon goes
on with what it had and logs an error that names the fault or the keys. Else it logs what changed.

What is being served goes on: a request keeps the timeout that it began with, and ends as usual
even if its key is gone.

## API keys

`server.api_keys_file` names a TOML file with a table `[[key]]` for each key. It holds hashes only.
A file that others than its owner and group may read, write or run is refused (`chmod o-rwx FILE`),
and so are two keys of one name or one hash.

{keys}
```toml
{keys_example}```

A key is to be random, so that a plain SHA-256 is as good as a slow hash. Make one, and its hash:

```sh
umask 077
openssl rand -hex 32 | tr -d '\\n' > dashboard.key  # what the client sends
sha256sum < dashboard.key | cut -d' ' -f1  # what the file has
```

Clients send `Authorization: Bearer KEY`; [the API](api.md) says what needs one. A key that is taken
out of the file is refused from the next SIGHUP on.
"""


@dataclass(frozen=True)
class Section:
    """A table of a TOML file, "" for what stands before the first; with what its keys may be."""

    name: str
    cls: type
    is_array: bool = False
    is_set: bool = True  # by default

    @property
    def header(self) -> str:
        """As in TOML."""
        return f"[[{self.name}]]" if self.is_array else f"[{self.name}]"

    def plain(self) -> list[tuple[Field[Any], Any]]:
        """Fields that are no sections of their own, with their types."""
        hints = typing.get_type_hints(self.cls)
        found = [(one, required(hints[one.name])) for one in fields(self.cls)]
        return [(one, kind) for one, kind in found if not is_dataclass(item(kind))]


def required(kind: Any) -> Any:
    """A type without its None."""
    if typing.get_origin(kind) in {types.UnionType, typing.Union}:
        return next(one for one in typing.get_args(kind) if one is not type(None))
    return kind


def item(kind: Any) -> Any:
    """What a list is of; any other type as it is."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind


def default(field: Field[Any]) -> Any:
    """A field's default; MISSING if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def sections(
    cls: type, name: str = "", *, is_array: bool = False, is_set: bool = True
) -> Iterator[Section]:
    """A dataclass's tables in the order of its fields, each before those within it."""
    section = Section(name, cls, is_array, is_set)
    if section.plain():
        yield section
    hints = typing.get_type_hints(cls)
    for field in fields(cls):
        kind = required(hints[field.name])
        if is_dataclass(item(kind)):
            yield from sections(
                item(kind),
                f"{name}.{field.name}".lstrip("."),
                is_array=item(kind) is not kind,
                is_set=is_set and default(field) not in (None, [], MISSING),
            )


def name_of(kind: Any) -> str:
    """A type in TOML's words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(f"`{literal(one)}`" for one in arguments)
    if origin is list:
        return f"list: {name_of(arguments[0])}"
    if origin is dict:
        return f"table: {name_of(arguments[1])}"
    return NAMES[kind]


def literal(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value >= 100_000:
        return f"{value:_}"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{json.dumps(key)} = {literal(one)}" for key, one in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def table(section: Section, *, reloads: frozenset[str] | None = None) -> str:
    """A section's keys in Markdown; which of them SIGHUP changes if `reloads` says so."""
    head = ["Key", "Type", "Default", *(["Changes at"] if reloads is not None else []), "Meaning"]
    rows = [head, ["---"] * len(head)]
    for field, kind in section.plain():
        row = [f"`{field.name}`", name_of(kind), _shown(default(field))]
        if reloads is not None:
            path = f"{section.name}.{field.name}".split(".")
            row.append("SIGHUP" if ".".join(path[:2]) in reloads else "restart")
        rows.append([*row, field.metadata["doc"].replace("|", "\\|")])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _shown(value: Any) -> str:
    if value is MISSING:
        return "required"
    return "not set" if value is None else f"`{literal(value)}`"


def example(cls: type) -> str:
    """A file of all defaults, each key behind its meaning; what has no default is commented out."""
    return "\n".join(_example(section) for section in sections(cls))


def _example(section: Section) -> str:
    lines = [f"# {line}" for line in _wrapped(_summary(section.cls))]
    lines += [section.header] if section.name else []
    for field, kind in section.plain():
        value = default(field)
        lines += ["", *(f"# {line}" for line in _wrapped(field.metadata["doc"]))]
        if value is None or value is MISSING:
            lines.append(f"# {field.name} = {_empty(kind)}")
        else:
            lines.append(f"{field.name} = {literal(value)}")
    if not section.is_set:
        lines = [line if line.startswith("#") or not line else f"# {line}" for line in lines]
    return "\n".join(lines) + "\n"


def _empty(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return literal(typing.get_args(kind)[0])
    return {list: "[]", dict: "{}"}.get(typing.get_origin(kind)) or EMPTY[kind]


def _summary(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS - 2)


def keys_example() -> str:
    """A file of two keys, one with every limit."""
    keys = [
        ApiKey("dashboard", hashlib.sha256(b"an example, no secret").hexdigest()),
        ApiKey("nightly", hashlib.sha256(b"another").hexdigest(), "batch", 4),
    ]
    return "\n".join("".join(_of_key(key)) for key in keys)


def _of_key(key: ApiKey) -> Iterator[str]:
    yield "[[key]]\n"
    for field in fields(key):
        value = getattr(key, field.name)
        if value != default(field):
            yield f"{field.name} = {literal(value)}\n"


def overrides() -> str:
    """Which options of `edge-rt serve` stand for which settings."""
    commands = argparse.ArgumentParser().add_subparsers()
    serve.add_parser(commands)
    options = vars(commands.choices["serve"].parse_args(["--bundle", "BUNDLE"]))
    named = [field.name for field in fields(ServerSettings) if field.name in options]
    return " and ".join(
        f"`--{name.replace('_', '-')}` goes before `server.{name}`" for name in named
    )


def page() -> str:
    """The page."""
    settings = [
        f"## `{section.header}`\n\n{_summary(section.cls)}\n\n{table(section, reloads=RELOADABLE)}"
        for section in sections(Settings)
    ]
    return TEXT.format(
        command=COMMAND,
        overrides=overrides(),
        settings="\n".join(settings),
        example=example(Settings),
        keys="\n".join(table(section) for section in sections(KeyFile)),
        keys_example=keys_example(),
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
