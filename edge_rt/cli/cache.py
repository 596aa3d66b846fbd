"""Where commands leave what they make when the user names no place."""

from __future__ import annotations

import os
import tempfile
from datetime import datetime, timezone
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache of edge_rt."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "edge-rt"


def loadgen_logs(name: str) -> Path:
    """A new directory for LoadGen's files of a scenario."""
    parent = cache_dir() / "loadgen"
    parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return Path(tempfile.mkdtemp(prefix=f"{now}-{name}-", dir=parent))
