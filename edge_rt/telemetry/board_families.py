"""The machine's sensors as families of metrics, in Prometheus' base units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)

from edge_rt.core import BoardInfo, BoardReading


def board_families(info: BoardInfo, reading: BoardReading, now_ns: int) -> Iterator[Metric]:
    """What `reading` has; what it does not have makes no family."""
    yield _info("edge_rt_board", "What the machine is.", _said(info))
    yield GaugeMetricFamily(
        "edge_rt_board_reading_age_seconds",
        "Since the sensors were last read.",
        (now_ns - reading.taken_ns) * 1e-9,
    )
    yield from _power(reading)
    if reading.power_mode is not None:
        yield _info(
            "edge_rt_board_power_mode",
            "The machine's power mode.",
            {"power_mode": reading.power_mode},
        )
    for name, what, label, values in (
        ("temperature_celsius", "Temperature of a thermal zone.", "zone", reading.temperatures_c),
        ("clock_hertz", "A clock's frequency.", "clock", reading.clocks_hz),
        ("load_ratio", "Share of the time in which a unit works.", "unit", reading.loads),
        ("fan_rpm", "A fan's turns per minute.", "fan", reading.fans_rpm),
    ):
        yield from _gauge(name, what, label, values)
    if reading.throttles:
        what = "How often the hardware slowed itself down."
        throttles = CounterMetricFamily("edge_rt_board_throttle_events", what, labels=["reason"])
        for reason, count in reading.throttles.items():
            throttles.add_metric([reason], count)
        yield throttles
    yield from _memory(reading)
    # Why would be a label without bounds.
    lost = "1 for what cannot be read though the machine has, or had, it."
    yield from _gauge("lost", lost, "metric", dict.fromkeys(reading.lost, 1.0))


def _said(info: BoardInfo) -> dict[str, str]:
    named = {
        "kind": info.kind,
        "model": info.model,
        "l4t": info.l4t,
        "jetpack": info.jetpack,
        "power_scope": info.power_scope,
    }
    return {label: value for label, value in named.items() if value is not None}


def _power(reading: BoardReading) -> Iterator[Metric]:
    if reading.power_mw is not None:
        what = "Power of what edge_rt_board_info calls power_scope."
        yield GaugeMetricFamily("edge_rt_board_power_watts", what, reading.power_mw / 1000)
    watts = {rail: mw / 1000 for rail, mw in reading.rails_mw.items()}
    what = "Power of a rail; rails may overlap."
    yield from _gauge("rail_power_watts", what, "rail", watts)
    for name, what, value in (
        ("energy_joules", "Integral of the power since the start.", reading.energy_j),
        ("metered_seconds", "Time over which that integral is.", reading.metered_s),
    ):
        if value is not None:
            yield CounterMetricFamily(f"edge_rt_board_{name}", what, value)


def _memory(reading: BoardReading) -> Iterator[Metric]:
    for name, what, value in (
        ("bytes", "The machine's memory.", reading.memory_total_bytes),
        ("available_bytes", "Memory that can still be had.", reading.memory_available_bytes),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"edge_rt_board_memory_{name}", what, value)


def _info(name: str, what: str, labels: dict[str, str]) -> InfoMetricFamily:
    family = InfoMetricFamily(name, what)
    family.add_metric([], labels)
    return family


def _gauge(
    name: str, what: str, label: str, values: Mapping[str, float]
) -> Iterator[GaugeMetricFamily]:
    if values:
        family = GaugeMetricFamily(f"edge_rt_board_{name}", what, labels=[label])
        for of, value in values.items():
            family.add_metric([of], value)
        yield family
