"""Which release of NVIDIA's software runs, and on what."""

from __future__ import annotations

import re
from typing import NamedTuple

from edge_rt.power.nodes import NodeError, Nodes

TREES = ("proc/device-tree", "sys/firmware/devicetree/base")
RELEASE = "etc/nv_tegra_release"
# L4T by NVIDIA's archive of JetPack releases. One that is not here has no JetPack name, but is
# still named itself (JS#781).
JETPACKS = {
    "35.1.0": "5.0.2", "35.2.1": "5.1", "35.3.1": "5.1.1", "35.4.1": "5.1.2", "35.5.0": "5.1.3",
    "35.6.0": "5.1.4", "35.6.1": "5.1.5",
    "36.3.0": "6.0", "36.4.0": "6.1", "36.4.3": "6.2", "36.4.4": "6.2.1", "36.4.7": "6.2.1",
    "36.5.0": "6.2.2",
    "38.2.0": "7.0", "38.2.1": "7.0", "38.4.0": "7.1",
    "39.2.0": "7.2", "39.2.1": "7.2.1", "39.2.2": "7.2.2",
}  # fmt: skip


class Identity(NamedTuple):
    """What the device tree says: `compatible` has the names of the board and its chip."""

    model: str | None
    serial: str | None
    compatible: tuple[str, ...]

    @classmethod
    def read(cls, nodes: Nodes) -> Identity:
        """Whatever can be read of it."""
        model, serial = (_first(nodes, name) for name in ("model", "serial-number"))
        compatible = _first(nodes, "compatible")
        return cls(model, serial, tuple((compatible or "").split()))

    @property
    def is_jetson(self) -> bool:
        """Whether the chip is a Tegra; where it does not say, whether the model is one's."""
        return any(name.startswith("nvidia,tegra") for name in self.compatible) or (
            "Jetson" in (self.model or "")
        )

    def missing(self) -> dict[str, str]:
        """What every Jetson says of itself, and this one does not."""
        said = {"model": self.model, "serial": self.serial, "compatible": self.compatible}
        return {f"info.{name}": "not in the device tree" for name, one in said.items() if not one}

    def has(self, part: str) -> bool:
        """Whether a module or chip, as p3701, is in its names."""
        return any(part in name for name in self.compatible)


def l4t(nodes: Nodes) -> str:
    """As 36.4.3: of `# R36 (release), REVISION: 4.3, GCID: …`; NodeError if it is not to be had.

    A container does not see it, if nobody mounts it: is_absent.
    """
    try:
        text = nodes.text(RELEASE)
    except NodeError as error:
        is_absent = isinstance(error.__cause__, FileNotFoundError)
        raise NodeError(str(error), is_absent=is_absent) from None
    found = re.match(r"# R(\d{1,3}) \(release\), REVISION: (\d[\d.]{0,15})", text)
    if found is None:
        raise NodeError(f"{RELEASE}: names no release: {text[:32]!r}")
    return ".".join(found.groups())


def _first(nodes: Nodes, name: str) -> str | None:
    found = (nodes.word(f"{tree}/{name}") for tree in TREES)
    return next((text for text in found if text is not None), None)
