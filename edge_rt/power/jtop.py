"""jetson-stats, where it is installed and its service runs: what sysfs does not show.

It is AGPL-3.0, and so an extra that is imported when it is there. Its service reads nodes that are
root's alone (the memory's clock and load). Everything of it runs in a thread of its own, because a
service that hangs must not hold up a reading.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from edge_rt.power.draft import Draft, Extra
from edge_rt.power.thermal import zone_label

SOCKET = "run/jtop.sock"
INTERVAL_S = 1.0  # the first client sets that of all: the service's default
STALE_S = 5.0
RETRY_S = 30.0


class Jtop:
    """The service's last answer, or why there is none."""

    def __init__(self, root: str, retry_s: float = RETRY_S) -> None:
        self._socket = os.path.join(root, SOCKET)  # noqa: PTH118
        self._retry_s = retry_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._latest: tuple[float, Extra] | None = None
        self._fault = "has not answered yet"
        try:
            self._is_installed = importlib.util.find_spec("jtop") is not None
        except (ImportError, ValueError):
            self._is_installed = False

    @property
    def latest(self) -> Extra | None:
        """What it says, if that is not old."""
        latest = self._latest
        return None if latest is None or time.monotonic() - latest[0] > STALE_S else latest[1]

    def fill(self, draft: Draft) -> None:
        """Add what it says; nothing is lost where it is not installed."""
        if not self._is_installed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jtop", daemon=True)
            self._thread.start()
        latest = self.latest
        if latest is None:
            draft.lost["jtop"] = self._fault
        else:
            draft.fill(latest)

    def close(self) -> None:
        """Stop asking."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(0.3)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._follow()
                self._fault = "the service ended the connection"
            except Exception as error:  # whatever a foreign library raises
                self._fault = fault(error)
            self._stop.wait(self._retry_s)

    def _follow(self) -> None:
        if not os.path.exists(self._socket):  # noqa: PTH110
            raise FileNotFoundError(self._socket)
        library = importlib.import_module("jtop")
        with library.jtop(interval=INTERVAL_S) as service:
            self._fault = "does not answer"
            while not self._stop.is_set() and service.ok():
                self._latest = (time.monotonic(), snapshot(service))


def fault(error: Exception) -> str:
    """Why it does not answer, and what to do."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, FileNotFoundError):
        return "no /run/jtop.sock: start it with `systemctl start jtop`, or mount it here"
    if isinstance(error, PermissionError) or "permission" in text.lower():
        return "/run/jtop.sock may not be opened: join the group `jtop`"
    versions = list(dict.fromkeys(re.findall(r"\b\d+\.\d+\.\d+\b", text)))
    if len(versions) > 1:
        return f"its versions differ ({' and '.join(versions)}): install one on both sides"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def snapshot(service: Any) -> Extra:
    """What a client of any version says; each part of it may be missing (JS#390, JS#243)."""
    found = Extra()
    rails = _at(service, "power", "rail")
    for label, rail in _items(rails):
        _put(found.rails_mw, label, _at(rail, "power"))  # `tot` may be a sum that counts twice
    found.rails_mw.pop("NC", None)
    for name, sensor in _items(_at(service, "temperature")):
        if _at(sensor, "online") is not False:
            _put(found.temperatures_c, zone_label(str(name)), _at(sensor, "temp"), lowest=-100)
    for _, gpu in list(_items(_at(service, "gpu")))[:1]:
        _put(found.loads, "gpu", _at(gpu, "status", "load"), 0.01)
        _put(found.clocks_hz, "gpu", _at(gpu, "freq", "cur"), 1e3)
    emc = _at(service, "memory", "EMC")
    _put(found.loads, "emc", _at(emc, "val"), 0.01)
    _put(found.clocks_hz, "emc", _at(emc, "cur"), 1e3)
    found.power_mode = _text(_at(service, "nvpmodel", "name"))
    hardware = _at(service, "board", "hardware")
    found.l4t, found.jetpack = _text(_at(hardware, "L4T")), _text(_at(hardware, "Jetpack"))
    found.serial = _text(_at(hardware, "Serial Number"))
    return found


def _at(value: Any, *path: str) -> Any:
    for name in path:
        try:
            value = value[name] if isinstance(value, Mapping) else getattr(value, name, None)
        except Exception:  # a property that asks the service
            return None
    return value


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else []


def _put(
    values: dict[str, float], label: str, value: Any, factor: float = 1.0, lowest: float = 0.0
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if math.isfinite(value) and lowest <= value < 1e8:
        values[label] = value * factor


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value and value != "MISSING" else None
