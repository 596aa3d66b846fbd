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
        if has_emc:
            self.found["emc"] = self._emc_hz

    def find(self) -> None:
        """Look for drivers that have come."""
        for policy in self._nodes.find(POLICIES)[:MAX_POLICIES]:
            core = policy.rpartition("policy")[2]
            self.found[f"cpu{core}"] = partial(self._policy_hz, policy, core)
        gpu = find_gpu(self._nodes)
        if gpu is not None:
            self.found["gpu"] = partial(self._nodes.number, f"{gpu}/cur_freq", 0, MAX_HZ)

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


class Loads(Family):
    """Shares of 1."""

    def __init__(self, nodes: Nodes, expected: tuple[str, ...]) -> None:
        super().__init__("loads", expected)
        self._nodes = nodes

    def find(self) -> None:
        """Look for the driver; one that loads after us is found then (JS PR#889)."""
        gpu = find_gpu(self._nodes)
        if gpu is not None:
            self.found["gpu"] = partial(self._gpu, f"{gpu}/device/load")

    def _gpu(self, path: str) -> float:
        try:
            return self._nodes.number(path, 0, 1000) / 1000
        except NodeError as error:
            cause = error.__cause__  # Thor's driver has no such node
            is_off = isinstance(cause, OSError) and cause.errno == errno.ENOENT
            raise NodeError(str(error), is_off=is_off) from None


def find_gpu(nodes: Nodes) -> str | None:
    """The GPU's devfreq directory; one GPU may be found on several ways (JS#360)."""
    for directory in nodes.find(*DEVFREQS):
        name = nodes.word(f"{directory}/device/of_node/name") or ""
        if _GPU.fullmatch(name) or _GPU.fullmatch(directory.rpartition("/")[2]):
            return directory
    return None
