"""Stand-ins for what a Jetson has beside its nodes: tools on PATH, jetson-stats' module, NVML."""

from __future__ import annotations

import stat
import types
from pathlib import Path
from typing import Any

JETPACK5 = (
    "RAM 4722/62841MB (lfb 12852x4MB) SWAP 0/31420MB (cached 0MB) CPU [1%@1113,0%@1113,off,off] "
    "EMC_FREQ 0%@2133 GR3D_FREQ 0%@0 GR3D2_FREQ 7%@99 VIC_FREQ 729 APE 174 CV0@-256C CPU@42.593C "
    "Tboard@32C SOC2@39.25C Tdiode@33.75C SOC0@40.281C CV1@-256C GPU@-256C tj@42.593C "
    "SOC1@38.937C CV2@-256C VDD_GPU_SOC 2399mW/2399mW VDD_CPU_CV 400mW/400mW "
    "VIN_SYS_5V0 4032mW/4032mW NC 0mW/0mW VDDQ_VDD2_1V8AO 301mW/301mW NC 0mW/0mW"
)
JETPACK5_LATE = JETPACK5.replace("GR3D_FREQ 0%@0 GR3D2_FREQ 7%@99", "GR3D_FREQ 14%@[407,407]")
JETPACK6 = (
    "05-09-2026 18:42:06 RAM 18207/62841MB (lfb 466x4MB) SWAP 86/31420MB (cached 0MB) "
    "CPU [14%@2188,3%@2188] EMC_FREQ 3%@2133 GR3D_FREQ 0%@[0,0] NVENC 79%@166 NVDEC off NVJPG off "
    "APE 174 cpu@52.562C soc2@48.437C tj@52.562C VDD_GPU_SOC 2412mW/2412mW "
    "VDD_CPU_CV 1607mW/1607mW VIN_SYS_5V0 4707mW/4707mW"
)
JETPACK7 = (
    "07-25-2026 09:08:28 RAM 20642/62817MB (lfb 1x2MB) CPU [23%@2201,9%@2201] EMC_FREQ 3%@3199 "
    "GR3D_FREQ 12%@[1300,1300] NVENC0 off NVDEC0 off cpu@52.968C/52.968C gpu@47.625C/47.625C "
    "VDD_GPU_SOC 5139mW/5139mW/5139mW VDD_CPU_CV 3268mW/3268mW/3268mW "
    "VIN_SYS_5V0 5500mW/5500mW/5500mW"
)
THOR = (
    "07-25-2026 09:08:28 RAM 4711/125772MB (lfb 1x2MB) CPU [2%@972] EMC_FREQ 0%@4266 "
    "GR3D_FREQ @[314,314,314] NVENC0 off cpu@44.25C/44.25C VIN 19780mW/19780mW"
)


def add_tool(directory: Path, name: str, script: str) -> Path:
    """An executable of a few lines of shell."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IEXEC)
    return file


class JtopError(Exception):
    """jetson-stats' JtopException."""


def jtop_module(service: Any, fault: Exception | None = None) -> types.ModuleType:
    """A module `jtop` whose client gives `service`, or raises."""
    module = types.ModuleType("jtop")
    module.__spec__ = types.SimpleNamespace(name="jtop")  # type: ignore[assignment]

    class Client:
        def __init__(self, interval: float) -> None:
            assert interval == 1.0  # the first client's is everybody's

        def __enter__(self) -> Any:
            if fault is not None:
                raise fault
            return service

        def __exit__(self, *_: object) -> None:
            pass

    module.jtop = Client  # type: ignore[attr-defined]
    module.JtopException = JtopError  # type: ignore[attr-defined]
    return module


class NvmlFault(Exception):  # noqa: N818 - stands for pynvml.NVMLError
    """With a number, as NVML's."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def nvml_gpu(**values: Any) -> dict[str, Any]:
    """What a board of `nvml_module` says; an exception is raised."""
    return {
        "name": "NVIDIA H200",
        "power": 101250,
        "temperature": 41,
        "sm": 1980,
        "memory_clock": 3201,
        "busy": 37,
        "memory_busy": 12,
        "reasons": 0,
        **values,
    }


def nvml_module(*boards: dict[str, Any], fault: int | None = None) -> types.ModuleType:
    """A module `pynvml` whose boards have these values; one that is an exception is raised.

    Keys: name, power, temperature, sm, memory_clock, busy, memory_busy, reasons.
    """
    module = types.ModuleType("pynvml")

    def asked(board: dict[str, Any], name: str) -> Any:
        value = board[name]
        if isinstance(value, Exception):
            raise value
        return value

    def start() -> None:
        if fault is not None:
            raise NvmlFault(fault)

    functions: dict[str, Any] = {
        "nvmlInit": start,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(boards),
        "nvmlDeviceGetHandleByIndex": lambda number: boards[number],
        "nvmlDeviceGetName": lambda board: board["name"],
        "nvmlDeviceGetPowerUsage": lambda board: asked(board, "power"),
        "nvmlDeviceGetTemperature": lambda board, _: asked(board, "temperature"),
        "nvmlDeviceGetClockInfo": asked,
        "nvmlDeviceGetUtilizationRates": lambda board: types.SimpleNamespace(
            gpu=asked(board, "busy"), memory=asked(board, "memory_busy")
        ),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda board: asked(board, "reasons"),
        "NVMLError": NvmlFault,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_SM": "sm",
        "NVML_CLOCK_MEM": "memory_clock",
        "NVML_ERROR_NOT_SUPPORTED": 3,
        "NVML_ERROR_NO_DATA": 21,
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module
