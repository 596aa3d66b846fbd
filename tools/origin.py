"""Where a measurement comes from: date, commit, machine, versions."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import edge_rt
from edge_rt.runtime.ort import usable_cores

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "i8mm", "sve")


def cpu_facts() -> dict[str, str]:
    """What Linux says of the first core; nothing elsewhere."""
    file = Path("/proc/cpuinfo")
    first = file.read_text("utf-8").split("\n\n")[0] if file.is_file() else ""
    return dict(re.findall(r"^(.*?)\s*:\s*(.*)$", first, re.MULTILINE))


def origin(facts: Mapping[str, str], libraries: Iterable[str] = ()) -> dict[str, Any]:
    """Date, machine, versions of edge_rt and `libraries`, and the commit if this is a checkout."""
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    versions: dict[str, str | None] = {"edge_rt": edge_rt.__version__}
    for name in libraries:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    describe = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"]
    commit = None
    if shutil.which("git"):
        done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or None
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit,
        "machine": {
            "cpu": facts.get("model name") or platform.processor() or platform.machine(),
            "cores": usable_cores(),
            "flags": [flag for flag in FLAGS if flag in flags],
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": versions | {"python": platform.python_version()},
    }
