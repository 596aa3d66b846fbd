"""What makes a measurement unfit, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.bench import conditions

CLOCKS_VARY = """\
SOC family:tegra234  Machine:NVIDIA Jetson AGX Orin Developer Kit
Online CPUs: 0-1
cpu0:  Online=1 Governor=schedutil MinFreq=729600 MaxFreq=2201600 CurrentFreq=729600 IdleStates: \
WFI=1 c7=1
cpu1:  Online=0 Governor=schedutil MinFreq=729600 MaxFreq=2201600 CurrentFreq=729600 IdleStates: \
WFI=1 c7=1
GPU MinFreq=306000000 MaxFreq=1300500000 CurrentFreq=306000000
Active GPU TPCs: 8
EMC MinFreq=204000000 MaxFreq=3199000000 CurrentFreq=2133000000 FreqOverride=0
FAN Dynamic Speed Control=nvfancontrol hwmon0_pwm1=69
NV Power Mode: MODE_30W
"""
CLOCKS_FIXED = """\
cpu0:  Online=1 Governor=schedutil MinFreq=2201600 MaxFreq=2201600 CurrentFreq=2201600 IdleStates: \
WFI=0 c7=0
cpu1:  Online=0 Governor=schedutil MinFreq=729600 MaxFreq=2201600 CurrentFreq=729600 IdleStates: \
WFI=1 c7=1
GPU MinFreq=1300500000 MaxFreq=1300500000 CurrentFreq=1300500000
EMC MinFreq=204000000 MaxFreq=3199000000 CurrentFreq=3199000000 FreqOverride=1
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def silent(_tool: str, _argument: str) -> str | None:
    return None


def cpufreq(core: int, governor: str, least: int = 800, most: int = 3000) -> dict[str, str]:
    folder = f"sys/devices/system/cpu/cpu{core}/cpufreq"
    return {
        f"{folder}/scaling_governor": governor,
        f"{folder}/scaling_min_freq": str(least),
        f"{folder}/scaling_max_freq": str(most),
    }


def test_a_machine_that_tells_nothing_brings_no_warning(tmp_path: Path) -> None:
    assert conditions.warnings(tmp_path, silent) == []
    assert conditions.throttle_counts(tmp_path) == {}


def test_each_condition_is_looked_at_by_itself(tmp_path: Path) -> None:
    """A file of garbage costs its own warning and no other."""
    write(tmp_path, {"proc/loadavg": "much"} | cpufreq(0, "powersave"))
    (tmp_path / "proc/meminfo").write_bytes(b"\xff\xfe")
    (warning,) = conditions.warnings(tmp_path, silent)
    assert "'powersave'" in warning


@pytest.mark.parametrize(
    ("load", "cores", "warned"),
    [("0.30", 2, False), ("0.70", 2, True), ("1.00", 12, False), ("1.30", 12, True)],
)
def test_background_load(load: str, cores: int, warned: bool, tmp_path: Path) -> None:
    write(tmp_path, {"proc/loadavg": f"{load} 0.10 0.05 1/467 12345"})
    warning = conditions.background_load(tmp_path, cores)
    assert (warning is not None) is warned
    if warning:
        assert f"on {cores} cores" in warning


def test_governor(tmp_path: Path) -> None:
    write(tmp_path, cpufreq(0, "performance") | cpufreq(1, "performance"))
    assert conditions.governor(tmp_path) is None
    write(tmp_path, cpufreq(1, "schedutil"))
    assert "'schedutil' on 1 of 2 cores" in (conditions.governor(tmp_path) or "")
    # As jetson_clocks leaves it: the governor has one frequency to choose from.
    write(tmp_path, cpufreq(1, "schedutil", 3000, 3000))
    assert conditions.governor(tmp_path) is None


def test_jetson_clocks() -> None:
    assert "the clocks of CPU, GPU, EMC vary" in (conditions.jetson_clocks(CLOCKS_VARY) or "")
    assert conditions.jetson_clocks(CLOCKS_FIXED) is None
    assert conditions.jetson_clocks("Error: run as root") is None
    assert conditions.jetson_clocks(None) is None


@pytest.mark.parametrize(
    ("queried", "named"),
    [
        ("NV Power Mode: MAXN\n0\n", None),
        ("NV Power Mode: MAXN_SUPER\n2\n", None),
        ("NV Fan Mode:quiet\nNV Power Mode: MODE_30W\n2\n", "MODE_30W"),
        ("NV Power Mode: 15W\n0\n", "15W"),
        ("nvpmodel: command failed", None),
        (None, None),
    ],
)
def test_power_mode(queried: str | None, named: str | None) -> None:
    warning = conditions.power_mode(queried)
    assert (warning is None) is (named is None)
    if named:
        assert f"the power mode is {named}, not MAXN" in (warning or "")


def test_a_jetson_as_its_tools_show_it(tmp_path: Path) -> None:
    said = {"jetson_clocks": CLOCKS_VARY, "nvpmodel": "NV Power Mode: MODE_30W\n2\n"}
    write(tmp_path, cpufreq(0, "schedutil"))
    found = conditions.warnings(tmp_path, lambda tool, _argument: said[tool])
    assert len(found) == 2  # the clocks once, not of both sources
    assert "sudo jetson_clocks" in found[0]
    assert "MODE_30W" in found[1]


@pytest.mark.parametrize(("free_kb", "warned"), [(4_000_000, False), (3_000_000, True)])
def test_swap(free_kb: int, warned: bool, tmp_path: Path) -> None:
    text = f"MemTotal: 8 kB\nSwapCached: 7 kB\nSwapTotal: 4000000 kB\nSwapFree: {free_kb} kB"
    write(tmp_path, {"proc/meminfo": text})
    warning = conditions.swap(tmp_path)
    assert (warning is not None) is warned
    if warning:
        assert "1024 MB of swap" in warning


def test_throttling_counts_what_happened_during_the_run(tmp_path: Path) -> None:
    core = "sys/devices/system/cpu/cpu{}/thermal_throttle/{}_throttle_count"
    board = "sys/class/hwmon"
    write(
        tmp_path,
        {
            core.format(0, "core"): "5",
            core.format(0, "package"): "7",
            core.format(1, "core"): "garbage",
            f"{board}/hwmon3/oc3_event_cnt": "37",
        },
    )
    before = conditions.throttle_counts(tmp_path)
    assert conditions.throttled(before, conditions.throttle_counts(tmp_path)) == []
    write(tmp_path, {core.format(0, "core"): "9", f"{board}/hwmon3/oc3_event_cnt": "38"})
    heat, current = conditions.throttled(before, conditions.throttle_counts(tmp_path))
    assert "for heat during the run (4 events)" in heat
    assert "over-current" in current
    assert "(1 events)" in current


def test_a_tool_that_is_missing_or_fails_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert conditions.output("nvpmodel", "-q") is None
    tool = tmp_path / "nvpmodel"
    tool.write_text('#!/bin/sh\n[ "$1" = -q ] && echo "NV Power Mode: 15W"\n', encoding="utf-8")
    tool.chmod(0o755)
    assert conditions.output("nvpmodel", "-q") == "NV Power Mode: 15W\n"
    assert conditions.output("nvpmodel", "--other") is None
