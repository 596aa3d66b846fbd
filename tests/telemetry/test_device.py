"""What a device is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.telemetry.device import default_device


def tree(root: Path, serial: str = "", compatible: str = "", machine: str = "") -> Path:
    for name, content in (
        ("proc/device-tree/serial-number", serial),
        ("proc/device-tree/compatible", compatible),
        ("etc/machine-id", machine),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if content:
            (root / name).write_bytes(content.encode())
    return root


def test_device_is_named_by_its_serial_number(tmp_path: Path) -> None:
    jetson = tree(tmp_path, "1423822006532\0", "nvidia,p3737-0000+p3701-0000\0nvidia,tegra234\0")
    assert default_device(jetson) == "jetson-1423822006532"
    assert default_device(tree(tmp_path, "14/2 #+\0")) == "jetson-14-2-"


def test_device_elsewhere_is_named_by_host_and_machine(tmp_path: Path) -> None:
    machine = "0123456789abcdef0123456789abcdef"
    other = tree(tmp_path, "10000000abcd", "raspberrypi,4-model-b\0brcm,bcm2711\0", f"{machine}\n")
    name = default_device(other, "my host/1")
    assert name.startswith("my-host-1-")
    assert len(name) == len("my-host-1-") + 6
    assert name == default_device(other, "my host/1"), "it stays"
    assert name[-6:] not in machine
    assert len(default_device(other, "h" * 200)) == 64
    (other / "etc/machine-id").write_text("f" * 32)
    assert default_device(other, "my host/1") != name


def test_device_without_an_identity_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bare = tree(tmp_path, machine="uninitialized\n")
    assert default_device(bare, "host") != default_device(bare, "host")
    assert "set device in [mqtt]" in caplog.text
