"""Trees of sysfs, procfs and etc as real boards have them.

Values are those that users' boards showed where one is public; a rail is measured on the side that
feeds it, so none has the voltage of a core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

Table = dict[str, str]

_HWMON = "sys/class/hwmon"
SERIAL = "1424021012345"
NVPMODEL_AGX = """\
< PARAM TYPE=FILE NAME=CPU_ONLINE >
< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=MODE_15W >
< POWER_MODEL ID=2 NAME=MODE_30W >
CPU_A78_0 MAX_FREQ 1728000
< POWER_MODEL ID=3 NAME=MODE_50W >
< PM_CONFIG DEFAULT=2 >
"""
NVPMODEL_NANO = """\
< POWER_MODEL ID=0 NAME=15W >
< POWER_MODEL ID=1 NAME=25W >
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
"""
MEMINFO = """\
MemTotal:       {total} kB
MemFree:         1204568 kB
MemAvailable:   {available} kB
Buffers:          291204 kB
Cached:         14020840 kB
SwapCached:            0 kB
"""


def write_tree(root: Path, table: Mapping[str, str], links: Mapping[str, str]) -> Path:
    """Nodes by path with what they hold, and links by path with where they lead below the root."""
    for path, held in table.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(held, newline="")
    for path, target in links.items():
        link = root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(root / target, link.parent))
    return root


class Tree:
    """A board's table while it is put together; class directories are links, as the kernel's."""

    def __init__(self, model: str, parts: str, release: str) -> None:
        self.table: Table = {
            "proc/device-tree/model": f"{model}\0",
            "proc/device-tree/serial-number": f"{SERIAL}\0",
            "proc/device-tree/compatible": parts.replace(" ", "\0") + "\0",
            "etc/nv_tegra_release": f"# R{release}, GCID: 38968081, EABI: aarch64\n",
        }
        self.links: Table = {}
        self._hwmons = 0

    def hwmon(self, device: str, name: str, **nodes: object) -> None:
        """A driver's hwmon directory, under the next number."""
        number = self._hwmons
        self._hwmons += 1
        directory = f"sys/devices/platform/{device}/hwmon/hwmon{number}"
        self.table |= {f"{directory}/{node}": f"{value}\n" for node, value in nodes.items()}
        self.table[f"{directory}/name"] = f"{name}\n"
        self.links[f"{_HWMON}/hwmon{number}"] = directory

    def ina3221(self, address: str, *channels: tuple[str | None, int, int], **more: object) -> None:
        """Channels from 1 on: label, millivolts, milliamperes."""
        nodes = dict(more)
        for number, (label, volts_mv, amps_ma) in enumerate(channels, start=1):
            nodes[f"in{number}_input"], nodes[f"curr{number}_input"] = volts_mv, amps_ma
            nodes[f"curr{number}_max"] = nodes[f"curr{number}_crit"] = 32760
            if label is not None:
                nodes[f"in{number}_label"] = label
        device = f"c240000.i2c/i2c-1/1-{address}"
        self.table[f"sys/devices/platform/{device}/name"] = "ina3221\n"
        self.links[f"sys/bus/i2c/devices/1-{address}"] = f"sys/devices/platform/{device}"
        self.links[f"sys/bus/i2c/drivers/ina3221/1-{address}"] = f"sys/devices/platform/{device}"
        self.hwmon(device, "ina3221", **nodes)

    def zones(self, **millidegrees: int) -> None:
        """Thermal zones by type, _ for -."""
        for number, (name, value) in enumerate(millidegrees.items()):
            zone = f"sys/devices/virtual/thermal/thermal_zone{number}"
            self.table[f"{zone}/type"] = name.replace("__", "-") + "\n"
            self.table[f"{zone}/temp"] = f"{value}\n"
            self.links[f"sys/class/thermal/thermal_zone{number}"] = zone

    def cores(self, first: int, khz: int, count: int = 4, *, online: bool = True) -> None:
        """A cluster with its cpufreq policy."""
        system = "sys/devices/system/cpu"
        for core in range(first, first + count):
            self.table[f"{system}/cpu{core}/online"] = f"{int(online)}\n"
        if online:  # the kernel's node of an offline policy answers EBUSY
            self.table[f"{system}/cpufreq/policy{first}/scaling_cur_freq"] = f"{khz}\n"
        else:
            self.table[f"{system}/cpufreq/policy{first}/affected_cpus"] = "\n"

    def gpu(self, device: str, node: str, hz: int, load: int | None) -> None:
        """Its devfreq; `load` is of a thousand."""
        base = f"sys/devices/platform/{device}"
        frequency = f"{base}/devfreq/{device.rpartition('/')[2]}"
        self.table[f"{frequency}/cur_freq"] = f"{hz}\n"
        self.table[f"{frequency}/governor"] = "nvhost_podgov\n"
        self.table[f"{base}/of_node/name"] = f"{node}\0"
        self.links[f"{frequency}/device"] = base
        self.links[f"sys/class/devfreq/{device.rpartition('/')[2]}"] = frequency
        if load is not None:
            self.table[f"{base}/load"] = f"{load}\n"

    def mode(self, number: int, names: str, file: str) -> None:
        """nvpmodel's files; what etc/ has is a link, as on the boards."""
        self.table["var/lib/nvpmodel/status"] = f"pmode:{number:04}\n"
        self.table[f"etc/nvpmodel/{file}"] = names
        self.links["etc/nvpmodel.conf"] = f"etc/nvpmodel/{file}"

    def memory(self, total: int, available: int) -> None:
        """In kB."""
        self.table["proc/meminfo"] = MEMINFO.format(total=total, available=available)

    def events(self, *counts: int) -> None:
        """soctherm's over-current counters."""
        nodes: dict[str, object] = {}
        for number, count in enumerate(counts, start=1):
            nodes[f"oc{number}_event_cnt"], nodes[f"oc{number}_throt_en"] = count, 1
        self.hwmon("soctherm-oc-event", "soctherm_oc", **nodes)

    def write(self, root: Path) -> Path:
        """It, below a directory."""
        return write_tree(root, self.table, self.links)


AGX_PARTS = "nvidia,p3737-0000+p3701-0005 nvidia,p3701-0005 nvidia,tegra234"


def _usb_port(tree: Tree) -> None:
    """A USB-C port's meter, whose power is no rail's (JS PR#900)."""
    tree.hwmon("ucsi", "ucsi_source_psy_usbc1", in0_input=5000, curr1_input=3000, in1_label="VBUS")
    supply = "sys/class/power_supply/ucsi-source-psy-usbc1"
    tree.table |= {f"{supply}/voltage_now": "5000000\n", f"{supply}/current_now": "3000000\n"}


def jetpack5() -> Tree:
    """AGX Orin, L4T R35.4.1: disabled channels are labelled NC, gated zones read -256."""
    tree = Tree("Jetson AGX Orin Developer Kit", AGX_PARTS, "35 (release), REVISION: 4.1")
    tree.hwmon("39c0000.tachometer", "tachometer", rpm=2140)
    tree.hwmon("pwm-fan", "pwmfan", pwm1=88)
    tree.ina3221("0041", ("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 4968, 80), ("NC", 0, 0))
    tree.ina3221(
        "0040",
        ("VDD_GPU_SOC", 19864, 180),
        ("VDD_CPU_CV", 19848, 40),
        ("VIN_SYS_5V0", 4968, 980),
        in7_label="sum of shunt voltages",
        in7_input=760,
        curr4_input=360,
    )
    tree.events(0, 15, 37)
    tree.zones(
        CPU__therm=42593, GPU__therm=-256000, CV0__therm=-256000, CV1__therm=-256000,
        CV2__therm=-256000, SOC0__therm=40281, SOC1__therm=38937, SOC2__therm=39250,
        Tboard_tegra=32000, Tdiode_tegra=33750, tj__therm=42593,
    )  # fmt: skip
    for first, khz in ((0, 1113600), (4, 729600), (8, 2201600)):
        tree.cores(first, khz)
    tree.gpu("17000000.ga10b", "ga10b", 306000000, 142)
    tree.mode(0, NVPMODEL_AGX, "nvpmodel_p3701_0000.conf")
    tree.memory(64349288, 45714408)
    return tree


def jetpack6() -> Tree:
    """AGX Orin, L4T R36.4.3: the GPU is under bus@0, and a USB port has a meter."""
    tree = Tree("NVIDIA Jetson AGX Orin Developer Kit", AGX_PARTS, "36 (release), REVISION: 4.3")
    tree.hwmon("pwm-fan", "pwmfan", pwm1=61)
    _usb_port(tree)
    tree.ina3221(
        "0040",
        ("VDD_GPU_SOC", 12008, 280),
        ("VDD_CPU_CV", 12000, 120),
        ("VIN_SYS_5V0", 4976, 940),
        in7_label="sum of shunt voltages",
        in7_input=800,
        curr4_input=400,
    )
    # The channels that nothing is connected to have no label, and the kernel answers EIO for them.
    tree.ina3221("0041", (None, 0, 0), ("VDDQ_VDD2_1V8AO", 4976, 90), (None, 0, 0), in1_enable=0)
    tree.events(0, 0, 2)
    tree.hwmon("39c0000.tachometer", "pwm_tach", rpm=1893)
    tree.zones(
        cpu__thermal=52562, gpu__thermal=49125, soc0__thermal=47906, soc1__thermal=46531,
        soc2__thermal=48437, tj__thermal=52562, tboard__thermal=39500, tdiode__thermal=41250,
    )  # fmt: skip
    for first, khz in ((0, 2188800), (4, 729600)):
        tree.cores(first, khz)
    tree.cores(8, 0, online=False)  # MODE_30W has eight
    tree.gpu("bus@0/17000000.gpu", "gpu", 612000000, 0)
    tree.mode(2, NVPMODEL_AGX, "nvpmodel_p3701_0000.conf")
    tree.memory(64349288, 45714408)
    tree.table["sys/kernel/debug/bpmp/debug/clk/emc/rate"] = "2133000000\n"  # a daemon that is root
    return tree


def jetpack7() -> Tree:
    """AGX Orin, L4T R39.2.0: no enable_3d_scaling, no debugfs."""
    tree = Tree("NVIDIA Jetson AGX Orin Developer Kit", AGX_PARTS, "39 (release), REVISION: 2.0")
    tree.ina3221(
        "0040",
        ("VDD_GPU_SOC", 19800, 260),
        ("VDD_CPU_CV", 19808, 165),
        ("VIN_SYS_5V0", 4960, 1108),
        in7_label="sum of shunt voltages",
        in7_input=850,
    )
    tree.ina3221("0041", (None, 0, 0), ("VDDQ_VDD2_1V8AO", 4960, 210), (None, 0, 0))
    tree.hwmon("pwm-fan", "pwmfan", pwm1=77, fan1_input=2310)
    tree.events(1, 0, 0)
    tree.zones(
        cpu__thermal=52968, gpu__thermal=47625, soc0__thermal=48125, soc1__thermal=47000,
        soc2__thermal=47781, tj__thermal=52968,
    )  # fmt: skip
    for first in (0, 4, 8):
        tree.cores(first, 2201600)
    tree.gpu("17000000.gpu", "gpu", 1300500000, 120)
    tree.mode(3, NVPMODEL_AGX, "nvpmodel_p3701_0005.conf")
    tree.memory(64325432, 43186176)
    return tree


def orin_nano() -> Tree:
    """Orin Nano, L4T R36.4.4: VDD_IN is the whole module's, and the mode has a new name."""
    parts = "nvidia,p3768-0000+p3767-0005-super nvidia,p3767-0005 nvidia,tegra234"
    tree = Tree("NVIDIA Jetson Orin Nano Developer Kit", parts, "36 (release), REVISION: 4.4")
    tree.hwmon("pwm-fan", "pwmfan", pwm1=70)
    tree.ina3221(
        "0040",
        ("VDD_IN", 4984, 1856),
        ("VDD_CPU_GPU_CV", 4984, 456),
        ("VDD_SOC", 4984, 392),
        in7_label="sum of shunt voltages",
        in7_input=4240,
    )
    tree.events(0, 0, 0)
    tree.zones(cpu__thermal=63625, gpu__thermal=61500, soc0__thermal=60250, tj__thermal=63625)
    for first in (0, 4):
        tree.cores(first, 1510400, count=4 if first == 0 else 2)
    tree.gpu("bus@0/17000000.gpu", "gpu", 1020000000, 997)
    tree.mode(2, NVPMODEL_NANO, "nvpmodel_p3767_0003_super.conf")
    tree.memory(7802476, 3014208)
    return tree


def thor() -> Tree:
    """Thor, L4T R38.4.0: one INA238 whose driver knows no label, a GPU without a load."""
    parts = "nvidia,p4071-0000+p3834-0008 nvidia,p3834-0008 nvidia,tegra264"
    tree = Tree("NVIDIA Jetson AGX Thor Developer Kit", parts, "38 (release), REVISION: 4.0")
    tree.hwmon(
        "c600000.i2c/i2c-2/2-0044",
        "ina238",
        in1_input=19780,
        curr1_input=1000,
        power1_input=19780000,
    )
    tree.zones(cpu__thermal=44250, gpu__thermal=43500, tj__thermal=44250)
    tree.cores(0, 2601000, count=14)
    tree.gpu("gpu-gpc-0", "gpu", 314000000, None)
    tree.memory(128706560, 101203456)
    return tree


BOARDS: dict[str, Callable[[], Tree]] = {
    "jetpack5": jetpack5,
    "jetpack6": jetpack6,
    "jetpack7": jetpack7,
    "orin_nano": orin_nano,
    "thor": thor,
}
