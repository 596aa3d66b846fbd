"""Clocks of the processors, the GPU and the memory, and how busy the GPU is."""

from __future__ import annotations

import errno
import re
from functools import partial

from edge_rt.power.nodes import Family, NodeError, Nodes

POLICIES = "sys/devices/system/cpu/cpufreq/policy*"
MAX_POLICIES = 16  # a server has one for each core: enough to see whether they are throttled
DEVFREQS = (
    "sys/class/devfreq/*",
    "sys/devices/platform/*/devfreq/*",
    "sys/devices/platform/bus@0/*/devfreq/*",
    "sys/devices/*/devfreq/*",
)
EMC_RATE = "sys/kernel/debug/bpmp/debug/clk/emc/rate"  # root's, as all of debugfs
_GPU = re.compile(r"(?:[0-9a-f]+\.)?(?:gv11b|gp10b|ga10b|gb10b|gpu)|gpu-gpc-0")
MAX_HZ = 20_000_000_000


class Clocks(Family):
    """Clocks in Hz: `cpu0` is that of the policy whose first core it is, then `gpu`, `emc`."""

    def __init__(
        self, nodes: Nodes, expected: tuple[str, ...] = (), *, has_emc: bool = False
    ) -> None:
        super().__init__("clocks", expected)
        self._nodes = nodes
        self.gpu: str | None = None  # its devfreq directory
        if has_emc:
            self.found["emc"] = self._emc_hz

    def find(self) -> None:
        """Look for drivers that have come."""
        for policy in self._nodes.find(POLICIES)[:MAX_POLICIES]:
            core = policy.rpartition("policy")[2]
            self.found[f"cpu{core}"] = partial(self._policy_hz, policy, core)
        self.gpu = self._find_gpu() or self.gpu
        if self.gpu is not None:
            self.found["gpu"] = partial(self._nodes.number, f"{self.gpu}/cur_freq", 0, MAX_HZ)

    def _policy_hz(self, policy: str, core: str) -> float:
        try:
            return self._nodes.number(f"{policy}/scaling_cur_freq", 0, MAX_HZ // 1000) * 1e3
        except NodeError as error:
            if self._nodes.word(f"sys/devices/system/cpu/cpu{core}/online") == "0":
                raise NodeError(str(error), is_absent=True) from None
            raise

    def _emc_hz(self) -> float:
        try:
            return self._nodes.number(EMC_RATE, 1, MAX_HZ)
        except NodeError as error:
            cause = error.__cause__
            is_hidden = isinstance(cause, OSError) and cause.errno in {errno.ENOENT, errno.EACCES}
            raise NodeError(str(error), is_off=is_hidden) from None

    def _find_gpu(self) -> str | None:
        """One GPU may be found on several ways, and is one (JS#360)."""
        for pattern in DEVFREQS:
            for directory in self._nodes.find(pattern):
                name = self._nodes.word(f"{directory}/device/of_node/name") or ""
                if _GPU.fullmatch(name) or _GPU.fullmatch(directory.rpartition("/")[2]):
                    return directory
        return None


class Loads(Family):
    """Shares of 1."""

    def __init__(self, nodes: Nodes, clocks: Clocks, expected: tuple[str, ...]) -> None:
        super().__init__("loads", expected)
        self._nodes, self._clocks = nodes, clocks

    def find(self) -> None:
        """Take over the GPU that the clocks have found."""
        if self._clocks.gpu is not None:
            self.found["gpu"] = partial(self._gpu, f"{self._clocks.gpu}/device/load")

    def _gpu(self, path: str) -> float:
        try:
            return self._nodes.number(path, 0, 1000) / 1000
        except NodeError as error:
            cause = error.__cause__  # Thor's driver has no such node
            is_off = isinstance(cause, OSError) and cause.errno == errno.ENOENT
            raise NodeError(str(error), is_off=is_off) from None
