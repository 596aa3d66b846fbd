"""`edge-rt doctor`: what this machine has, what is missing, and the command that mends it."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from edge_rt import __version__, recipes
from edge_rt.cli.cache import cache_dir
from edge_rt.cli.output import Commands, add_command, finish, say
from edge_rt.errors import ConfigError, EngineError, MissingLibraryError


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that keeps edge_rt from working here, and what mends it."""

    what: str
    mend: str


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    add_command(commands, "doctor", "Say what this machine has and what is missing.", run)


def run(options: argparse.Namespace) -> int:
    """Report; exit code 1 if there is a problem."""
    facts, problems = examine()
    for name, value in facts.items():
        say(options, f"{name.removesuffix('_bytes').replace('_', ' '):<22} {_text(name, value)}")
    for problem in problems:
        say(options, f"PROBLEM: {problem.what}\n   mend: {problem.mend}")
    if not problems:
        say(options, "no problem found")
    finish(
        options,
        {**facts, "problems": [{"what": p.what, "mend": p.mend} for p in problems]},
    )
    return 1 if problems else 0


def examine() -> tuple[dict[str, Any], list[Problem]]:
    """Facts by name, and problems."""
    from edge_rt.runtime.engines import installed_libraries

    problems: list[Problem] = []
    libraries = installed_libraries()
    facts: dict[str, Any] = {
        "edge_rt": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "memory_available_bytes": memory_available_bytes(),
        "onnx": _version("onnx"),
        "onnxruntime": libraries.get("onnxruntime"),
        "onnxruntime_providers": [],
        "loadgen": _version("mlcommons-loadgen"),
        "aiohttp": _version("aiohttp"),
        "uvicorn": _version("uvicorn"),
        "matplotlib": _version("matplotlib"),
        "torch": _version("torch"),
    }
    try:
        facts["onnxruntime_providers"] = _providers()
    except EngineError as error:
        problems.append(
            Problem(str(error), f"{sys.executable} -m pip install --force-reinstall onnxruntime")
        )
    if "onnxruntime" not in libraries:
        problems.append(
            Problem(
                "onnxruntime is not installed: no CPU engine",
                f"{sys.executable} -m pip install onnxruntime",
            )
        )
    if facts["onnx"] is None:
        problems.append(
            Problem(
                "onnx is not installed: no quantizing or building here",
                f"{sys.executable} -m pip install onnx",
            )
        )
    for kind in get_args(recipes.Kind):
        try:
            facts[f"recipes_{kind}"] = recipes.names(kind)
        except ConfigError as error:
            problems.append(Problem(str(error), "install edge_rt again from its wheel or checkout"))
    cache = cache_dir()
    facts["cache_dir"] = str(cache)
    if not _writable(cache):
        problems.append(
            Problem(f"{cache} cannot be written", "set XDG_CACHE_HOME to a directory of yours")
        )
    return facts, problems


def memory_available_bytes() -> int | None:
    """What can be allocated without swapping; None where /proc does not tell."""
    from edge_rt.power.memory import Memory
    from edge_rt.power.nodes import NodeError, Nodes
    from edge_rt.power.watch import Watch

    try:
        return Memory.read(Nodes("/", Watch())).available_bytes
    except NodeError:
        return None


def _providers() -> list[str]:
    from edge_rt.runtime.ort import import_onnxruntime

    try:
        providers: list[str] = import_onnxruntime().get_available_providers()
    except MissingLibraryError:
        return []
    return providers


def _text(name: str, value: Any) -> str:
    """A fact for people."""
    if name.endswith("_bytes"):
        return "unknown" if value is None else f"{value / 1e9:.1f} GB"
    if value is None:
        return "not installed"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _writable(directory: Path) -> bool:
    """Whether the directory, or the nearest that exists above it, can be written."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory.is_dir() and os.access(directory, os.W_OK)
