"""Rails that the module's power monitors measure: INA3221, on Thor INA238.

A monitor is found by its driver's name and a rail by its label: the number of a hwmon directory
changes from boot to boot, and the bus from board to board. USB ports' meters have other drivers.
"""

from __future__ import annotations

import errno
from functools import partial

from edge_rt.power.nodes import Family, NodeError, Nodes

DIRECTORIES = (
    "sys/class/hwmon/hwmon*",
    "sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*",
    "sys/bus/i2c/devices/*/hwmon/hwmon*",
)
CHANNELS = (1, 2, 3)  # 4 to 6 are shunts, 7 is "sum of shunt voltages"
MAX_MV, MAX_MA = 100_000, 100_000


class Rails(Family):
    """Power of each labelled channel, in mW: what it carries at the voltage it is fed with."""

    def __init__(self, nodes: Nodes, expected: tuple[str, ...]) -> None:
        super().__init__("rails", expected)
        self._nodes = nodes

    def find(self) -> None:
        """Look for monitors that have come, or that have moved."""
        for pattern in DIRECTORIES:  # ways to the same devices: one is enough
            monitors = [one for one in self._nodes.find(pattern) if self._add(one)]
            if monitors:
                return

    def _add(self, directory: str) -> bool:
        """Whether it is a monitor's."""
        driver = self._nodes.word(f"{directory}/name")
        if driver == "ina3221":
            for channel in CHANNELS:
                label = self._nodes.word(f"{directory}/in{channel}_label")
                if label is not None and label != "NC":  # not connected
                    self.found[label] = partial(self._channel_mw, directory, channel)
        elif driver == "ina238":  # has one channel; the driver knows no label
            label = self._nodes.word(f"{directory}/in1_label") or "VIN"
            self.found[label] = partial(self._power_mw, directory)
        return driver in {"ina3221", "ina238"}

    def _channel_mw(self, directory: str, channel: int) -> float:
        try:
            volts_mv = self._nodes.number(f"{directory}/in{channel}_input", 0, MAX_MV)
            return (
                volts_mv * self._nodes.number(f"{directory}/curr{channel}_input", 0, MAX_MA) / 1e3
            )
        except NodeError as error:
            raise self._of_channel(error, directory, channel) from None

    def _of_channel(self, error: NodeError, directory: str, channel: int) -> NodeError:
        """A disabled channel has its nodes, and reads of them fail (alumet#212)."""
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in {errno.EIO, errno.ENODATA}:
            return error
        is_disabled = self._nodes.word(f"{directory}/in{channel}_enable") == "0"
        return NodeError(str(error), is_off=True, is_absent=is_disabled)

    def _power_mw(self, directory: str) -> float:
        return self._nodes.number(f"{directory}/power1_input", 0, MAX_MV * MAX_MA) / 1e3


class Total:
    """The rails whose sum is what the module takes; None as long as they are not known."""

    def __init__(self, rails: tuple[str, ...] | None) -> None:
        self.rails = rails

    def choose(self, found: set[str]) -> None:
        """Take the sum of `found` that is known to be the whole, if none is taken yet."""
        if self.rails is None:
            self.rails = next((one for one in SUMS if found.issuperset(one)), None)

    @property
    def scope(self) -> str | None:
        """What BoardInfo.power_scope says of it."""
        return None if self.rails is None else f"{' + '.join(self.rails)}; module rails, not wall"

    def read(self, rails_mw: dict[str, float], lost: dict[str, str]) -> float | None:
        """The sum, or None: never that of a part."""
        if self.rails is None:
            return None
        missing = [rail for rail in self.rails if rail not in rails_mw]
        if missing:
            lost["power"] = f"not known without {', '.join(missing)}"
            return None
        return sum(rails_mw[rail] for rail in self.rails)


# An input rail is the sum of all that it feeds: nothing is added to it (JS#51).
AGX_ORIN = ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")
SUMS = (("VDD_IN",), ("POM_5V_IN",), ("VIN",), AGX_ORIN)
