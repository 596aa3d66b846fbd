"""What a device is called when its settings do not say."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import socket
from pathlib import Path

logger = logging.getLogger(__name__)

_MOST_CHARACTERS = 64


def default_device(root: Path = Path("/"), hostname: str | None = None) -> str:
    """A name that is unique and stays: `jetson-` and the serial number, where there is one.

    Elsewhere the host's name and six digits of what the machine id gives: cloned disks have equal
    host names. The id itself is confidential (machine-id(5)), so that it only is the key of a hash.
    """
    serial = _read(root / "proc/device-tree/serial-number")
    compatible = _read(root / "proc/device-tree/compatible")
    if serial.strip("0") and (not compatible or "nvidia,tegra" in compatible):
        return _topic_part(f"jetson-{serial}")
    host = hostname or socket.gethostname() or "host"
    machine = _read(root / "etc/machine-id")
    if re.fullmatch("[0-9a-f]{32}", machine):
        digest = hmac.new(bytes.fromhex(machine), b"edge_rt device", hashlib.sha256).hexdigest()
        return _topic_part(host, digest[:6])
    name = _topic_part(host, secrets.token_hex(3))
    logger.warning(
        "this machine has no serial number and no /etc/machine-id: it is %s until the daemon is "
        "started again; set device in [mqtt]",
        name,
    )
    return name


def _read(path: Path) -> str:
    """A node of the device tree ends in NUL; a file that cannot be read is empty."""
    try:
        return path.read_bytes().decode("ascii", "replace").replace("\0", " ").strip()
    except OSError:
        return ""


def _topic_part(name: str, suffix: str = "") -> str:
    end = f"-{suffix}" if suffix else ""
    clean = re.sub("[^A-Za-z0-9_.-]+", "-", name)
    return clean[: _MOST_CHARACTERS - len(end)] + end
