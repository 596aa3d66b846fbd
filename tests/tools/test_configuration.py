"""The page of settings: what the types say, and nothing else."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

from edge_rt import config
from edge_rt.serve import settings
from edge_rt.serve.keys import Keys
from edge_rt.serve.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.fixture
def library(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("configuration")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def keys(library: ModuleType) -> set[str]:
    return {
        f"{section.name}.{field.name}"
        for section in library.sections(Settings)
        for field, _ in section.plain()
    }


def test_the_page_is_what_the_types_say(library: ModuleType) -> None:
    is_current = PAGE.read_text(encoding="utf-8") == library.page()
    assert is_current, f"docs/configuration.md is not what the types say; run: {library.COMMAND}"


def test_the_example_is_the_defaults(library: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "edge-rt.toml"
    file.write_text(blocks("toml")[0])
    assert settings.load(file) == Settings()
    found = {f"{name}.{key}" for name, table in config.read(file).items() for key in table}
    unset = {
        f"{name}.{key}"
        for name, table in asdict(Settings()).items()
        for key, value in table.items()
        if value is None
    }
    assert found == keys(library) - unset
    for name in unset:
        assert f"\n# {name.partition('.')[2]} = " in file.read_text()


def test_every_key_that_reloads_is_on_the_page(library: ModuleType) -> None:
    assert keys(library) >= settings.RELOADABLE
    rows = re.findall(r"^\| `(\w+)` \|.*\| (?:SIGHUP|restart) \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(key.rpartition(".")[2] for key in keys(library))


def test_keys_are_made_as_the_page_says(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(blocks("toml")[1])
    file.chmod(0o640)
    known = Keys.load(file)
    assert known.find("Bearer another") is not None
    assert known.find("Bearer what nobody has") is None
    (block,) = blocks("sh")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    key = (tmp_path / "dashboard.key").read_text()
    assert len(key) == 64
    assert (tmp_path / "dashboard.key").stat().st_mode & 0o077 == 0
    assert done.stdout.split()[0] == hashlib.sha256(key.encode()).hexdigest()
    file.write_text(f'[[key]]\nname = "dashboard"\nsha256 = "{done.stdout.split()[0]}"\n')
    assert Keys.load(file).find(f"Bearer {key}") is not None


@dataclass(frozen=True)
class Tls:
    """Certificates."""

    ca_file: str = field(metadata={"doc": "Whom to trust."})


@dataclass(frozen=True)
class Broker:
    """Where records go."""

    url: str | None = field(default=None, metadata={"doc": "Of the broker."})
    topics: list[str] = field(default_factory=lambda: ["a|b"], metadata={"doc": "This | that."})
    rates: dict[str, float] = field(default_factory=dict, metadata={"doc": "By topic."})
    tls: Tls | None = None
    mirrors: list[Tls] = field(default_factory=list)


@dataclass(frozen=True)
class Later:
    """Settings as they may come to be."""

    broker: Broker = field(default_factory=Broker)


def test_sections_and_keys_of_any_kind_are_shown(library: ModuleType, tmp_path: Path) -> None:
    found = list(library.sections(Later))
    assert [one.header for one in found] == ["[broker]", "[broker.tls]", "[[broker.mirrors]]"]
    table = library.table(found[0], reloads=frozenset({"broker.url"}))
    assert '| `topics` | list: string | `["a|b"]` | restart | This \\| that. |' in table
    assert "| `url` | string | not set | SIGHUP | Of the broker. |" in table
    assert "| `rates` | table: number | `{}` | restart | By topic. |" in table
    assert "| `ca_file` | string | required | Whom to trust. |" in library.table(found[1])
    file = tmp_path / "later.toml"
    file.write_text(library.example(Later))
    assert config.load(Later, file) == Later()
    assert '# [broker.tls]\n\n# Whom to trust.\n# ca_file = ""\n' in file.read_text()
