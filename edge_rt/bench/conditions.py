"""What is going on on this machine that makes a measurement unfit to be compared.

Each condition is looked at by itself: what a machine does not tell is no warning.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from edge_rt.power.nvpmodel import parse_query

ROOT = Path("/")
SWAP_BYTES = 64 << 20  # less is what a system puts aside in idle hours
LOAD_SHARE, LOAD_LEAST = 0.1, 0.5  # of the cores, and at the least half of one

_COUNTERS = {
    "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count": "for heat",
    # Jetson's, of the driver tegra234-soctherm-edp
    "sys/class/hwmon/hwmon*/oc*_event_cnt": "by over-current or under-voltage",
}

Tool = Callable[[str, str], str | None]


def output(tool: str, argument: str) -> str | None:
    """What one of the board's tools prints; None if there is no such tool or it fails."""
    path = shutil.which(tool)
    if path is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - a tool of the system, with a fixed argument
            [path, argument],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            text=True,
            errors="replace",
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def warnings(root: Path = ROOT, tool: Tool = output) -> list[str]:
    """What speaks against measuring now; before the run, which is itself a load."""
    found = [
        background_load(root),
        jetson_clocks(tool("jetson_clocks", "--show")) or governor(root),
        power_mode(tool("nvpmodel", "-q")),
        swap(root),
    ]
    return [warning for warning in found if warning is not None]


def background_load(root: Path = ROOT, cores: int | None = None) -> str | None:
    """Whether others keep more than a tenth of the cores busy."""
    cores = cores or os.cpu_count() or 1
    text = _read(root / "proc/loadavg")
    match = re.match(r"\d+\.\d+", text or "")
    if match is None:
        return None
    load = float(match[0])
    if load < max(LOAD_LEAST, LOAD_SHARE * cores):
        return None
    return (
        f"the load average was {load:.1f} on {cores} cores before the run: something else is "
        f"running, or was within the last minute"
    )


def governor(root: Path = ROOT) -> str | None:
    """Whether the CPU's clocks follow the load."""
    policies = sorted(root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq"))
    varying = [
        name
        for policy in policies
        if (name := _read(policy / "scaling_governor")) not in {None, "performance"}
        and not _is_fixed(policy)
    ]
    if not varying:
        return None
    names = " and ".join(sorted({f"'{name}'" for name in varying}))
    return (
        f"the CPU's clocks vary: governor {names} on {len(varying)} of {len(policies)} cores, not "
        f"'performance'; fix them with: sudo cpupower frequency-set -g performance"
    )


def _is_fixed(policy: Path) -> bool:
    """One frequency alone is allowed: jetson_clocks leaves the governor as it is."""
    least, most = (_read(policy / f"scaling_{end}_freq") for end in ("min", "max"))
    return least is not None and least == most


def jetson_clocks(shown: str | None) -> str | None:
    """Whether the clocks that `jetson_clocks --show` lists are fixed; it may take root to ask."""
    varying = []
    for line in (shown or "").splitlines():
        unit = re.match(r"(cpu|GPU|EMC)\d*:?\s", line)
        limits = re.search(r"MinFreq=(\d+)\s+MaxFreq=(\d+)", line)
        if unit is None or limits is None or "Online=0" in line:
            continue
        override = re.search(r"FreqOverride=(\d)", line)
        fixed = override[1] == "1" if override else limits[1] == limits[2]
        if not fixed:
            varying.append(unit[1].upper())
    if not varying:
        return None
    return f"the clocks of {', '.join(dict.fromkeys(varying))} vary; fix them: sudo jetson_clocks"


def power_mode(queried: str | None) -> str | None:
    """Whether `nvpmodel -q` names another mode than the largest."""
    mode = parse_query(queried or "")
    if mode is None or mode.upper().startswith("MAXN"):
        return None
    return (
        f"the power mode is {mode}, not MAXN: the result is one of this mode only "
        f"(sudo nvpmodel -m N changes it, /etc/nvpmodel.conf lists the modes)"
    )


def swap(root: Path = ROOT) -> str | None:
    """Whether memory has been short."""
    sizes = dict(
        re.findall(r"(SwapTotal|SwapFree):\s+(\d+) kB", _read(root / "proc/meminfo") or "")
    )
    if len(sizes) < 2:
        return None
    used = 1024 * (int(sizes["SwapTotal"]) - int(sizes["SwapFree"]))
    if used < SWAP_BYTES:
        return None
    return f"{used / 1e6:.0f} MB of swap are in use: memory is short, or was"


def throttle_counts(root: Path = ROOT) -> dict[str, int]:
    """How often this machine has slowed itself down since it started, by reason."""
    counts: dict[str, int] = {}
    for pattern, reason in _COUNTERS.items():
        texts = [_read(path) for path in root.glob(pattern)]
        numbers = [int(text) for text in texts if text is not None and text.isdigit()]
        if numbers:
            counts[reason] = sum(numbers)
    return counts


def throttled(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What happened between two throttle_counts."""
    return [
        f"the machine was slowed down {reason} during the run ({count - before[reason]} events)"
        for reason, count in after.items()
        if count > before.get(reason, count)
    ]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
