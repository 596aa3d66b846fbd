"""The command line: `edge-rt COMMAND`.

Each command is a module with `add_parser` and `run`; what a command needs is imported when it runs,
so that `--help` is quick and a missing extra breaks only the commands that need it.
Exit codes: 0 the work was done, 1 it failed, 2 the command line or a setting cannot work.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from edge_rt import __version__
from edge_rt.cli import (
    bench,
    build,
    demo,
    doctor,
    evaluate,
    generate,
    parity,
    quantize,
    serve,
    verify,
)
from edge_rt.cli.output import check_json_target
from edge_rt.errors import ConfigError, EdgeRTError, MissingLibraryError

# Libraries that a command may miss, and the extra that brings each.
_EXTRAS = {
    "aiohttp": "bench",
    "onnx": "ort",
    "onnxruntime": "ort",
    "msgspec": "serve",
    "paho": "serve",
    "prometheus_client": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
}
_INSTALLED_AS = {"paho": "paho-mqtt"}  # where that is another name

COMMANDS = (quantize, build, verify, generate, serve, evaluate, bench, parity, doctor, demo)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="edge-rt",
        description="INT4 inference for GPT-J on NVIDIA Jetson, and on any CPU.",
    )
    parser.add_argument("--version", action="version", version=f"edge-rt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    if sys.stdout is None:  # closed by the caller
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):
        # A path or prompt may hold what the terminal's encoding cannot say.
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if threading.current_thread() is threading.main_thread():
        # As an exception, so that a half-written directory is removed on the way out.
        signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))
    try:
        check_json_target(options)
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        # What is still buffered must not raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _EXTRAS:
            raise
        return _fail(MissingLibraryError(_missing_with(library), _EXTRAS[library]), 1)
    except (EdgeRTError, OSError) as error:
        return _fail(error, 2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        return 130
    return code


def _missing_with(library: str) -> str:
    """A library that is not there, and the others of its extra that are not there either."""
    return " ".join(
        _INSTALLED_AS.get(other, other)
        for other, extra in _EXTRAS.items()
        if extra == _EXTRAS[library]
        and (other == library or importlib.util.find_spec(other) is None)
    )


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"edge-rt: {error}\n")
    return code
