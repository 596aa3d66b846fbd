"""docs/api.md: its examples run, and say what the page says that they say.

Compared are keys, finish reasons, counts and errors, not what the model writes: another CPU may
choose other tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.waiting import eventually
from serve.conftest import started

from edge_rt.serve import openapi
from edge_rt.serve.errors import TYPES
from edge_rt.serve.schema import CompletionRequest

BundleFactory = Callable[[str], Path]

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
ADDRESS, SOCKET, KEY = "http://127.0.0.1:8000", "/run/edge-rt.sock", "a key of the tests"
COMMANDS = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
# What differs from run to run, or from one CPU to another.
VARIES = {
    "created", "id", "model", "text", "text_offset", "token_logprobs", "tokens", "top_logprobs",
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A block of the page, and the block of what it prints if one follows."""

    section: str
    line: int
    language: str
    code: str
    printed: str | None


def examples() -> list[Example]:
    text = PAGE.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```(\w+)\n(.*?)^```\n", text, re.DOTALL | re.MULTILINE))
    found = []
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block[1] not in COMMANDS:
            continue
        is_followed = (
            following is not None
            and following[1] not in COMMANDS
            and not text[block.end() : following.start()].strip()
        )
        printed = following[2] if is_followed and following is not None else None
        before = text[: block.start()]
        section = re.findall(r"^##? (.*)$", before, re.MULTILINE)[-1]
        found.append(Example(section, before.count("\n") + 1, block[1], block[2], printed))
    return found


@dataclass(frozen=True)
class Daemons:
    """One that anybody may use, one with a key, one at a socket."""

    address: str
    keyed: str
    path: Path
    log: Path

    def run(self, example: Example, directory: Path) -> str:
        """What an example prints."""
        address = self.keyed if example.section == "API keys" else self.address
        code = example.code.replace(ADDRESS, address).replace(SOCKET, str(self.path))
        done = subprocess.run(
            [*COMMANDS[example.language], code],
            cwd=directory,
            env=os.environ | {"EDGE_RT_KEY": KEY},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{PAGE}:{example.line}: {done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def daemons(
    demo_bundle: BundleFactory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemons]:
    bundle, directory = demo_bundle("demo.cpu"), tmp_path_factory.mktemp("page")
    path, log = directory / "s", directory / "log"
    keys, keyed, local = (directory / f"{name}.toml" for name in ("keys", "keyed", "local"))
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys.write_text(f'[[key]]\nname = "page"\nsha256 = "{digest}"\n')
    keys.chmod(0o600)
    keyed.write_text(f"[server]\napi_keys_file = '{keys}'\n")
    local.write_text(f"[server]\nunix_socket = '{path}'\n")
    with (
        log.open("wb") as stderr,
        started(bundle, stderr=stderr) as plain,
        started(bundle, "--config", str(keyed)) as with_keys,
        at_socket(bundle, local, path),
    ):
        yield Daemons(plain.url, with_keys.url, path, log)


@contextlib.contextmanager
def at_socket(bundle: Path, config: Path, path: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "edge_rt", "serve", "--bundle", str(bundle)]
    with subprocess.Popen([*command, "--config", str(config)]) as process:
        try:
            eventually(lambda: is_listening(path))
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                eventually(lambda: client.get("/health").status_code == 200)
            yield
        finally:
            process.kill()


def is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as tried:  # httpx leaks one that it could not connect
        return tried.connect_ex(str(path)) == 0


def outline(value: Any) -> Any:
    """What is the same of values that vary: their types and how many there are."""
    if isinstance(value, dict):
        return sorted(str(outline(one)) for one in value.values())
    if isinstance(value, list):
        return [outline(one) for one in value]
    return "number" if isinstance(value, int | float) else type(value).__name__


def shape(value: Any) -> Any:
    """JSON with the outline only of what varies."""
    if isinstance(value, dict):
        return {k: outline(one) if k in VARIES else shape(one) for k, one in value.items()}
    return [shape(one) for one in value] if isinstance(value, list) else value


def shapes(printed: str) -> list[Any]:
    """Of each line, or of the whole where that is JSON."""
    with contextlib.suppress(json.JSONDecodeError):
        return [shape(json.loads(printed))]
    found: list[Any] = []
    for line in filter(None, printed.splitlines()):
        event = re.fullmatch(r"(?:data: )?(\{.*\})", line)
        found.append((line[:5], shape(json.loads(event[1]))) if event else line)
    return found


@pytest.mark.parametrize("example", examples(), ids=lambda one: f"{one.section}:{one.line}")
def test_an_example_runs(example: Example, daemons: Daemons, tmp_path: Path) -> None:
    printed = daemons.run(example, tmp_path)
    assert printed
    if example.printed is not None:
        assert shapes(printed) == shapes(example.printed), printed


def test_the_cancelled_stream_ends_in_the_daemon(daemons: Daemons, tmp_path: Path) -> None:
    (example,) = [one for one in examples() if one.section == "Cancelling"]

    def tokens_of_cancelled() -> list[str]:
        return re.findall(r"status=499 .* completion_tokens=(\d+)", daemons.log.read_text())

    before = len(tokens_of_cancelled())
    daemons.run(example, tmp_path)
    eventually(lambda: len(tokens_of_cancelled()) > before)
    assert int(tokens_of_cancelled()[-1]) < 500  # of as many as were asked for


def test_every_block_of_the_page_is_run_or_compared() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = examples()
    outputs = [one.printed for one in found if one.printed is not None]
    assert text.count("```") == 2 * (len(found) + len(outputs))


def test_the_page_leaves_nothing_out() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in CompletionRequest.__struct_fields__ if f"`{name}`" not in text] == []
    assert [status for status in TYPES if f"| {status} | `{TYPES[status]}` |" not in text] == []
    routes = openapi.document(keys=False)["paths"]
    assert [path for path in routes if f" {path}`" not in text] == []
