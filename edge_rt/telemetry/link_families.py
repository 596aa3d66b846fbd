"""The connection to the MQTT broker as families of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from edge_rt.telemetry.status import LinkState, LinkStatus


def link_families(link: LinkStatus) -> Iterator[Metric]:
    """How the link fares; a link that is off has nothing but its state."""
    state = GaugeMetricFamily(
        "edge_rt_mqtt_state", "1 for how the link to the MQTT broker is.", labels=["state"]
    )
    for one in get_args(LinkState):
        state.add_metric([one], float(link.state == one))
    yield state
    if link.state == "off":
        return
    for name, what, value in (
        ("spool_records", "Records that no broker has acknowledged yet.", link.spool_records),
        ("spool_bytes", "Their text; on disk it may take twice as much.", link.spool_bytes),
        ("spool_fault", "1 while records are kept in memory alone.", bool(link.spool_fault)),
    ):
        yield GaugeMetricFamily(f"edge_rt_mqtt_{name}", what, float(value))
    for name, what, count in (
        ("published_records", "Records that a broker has acknowledged.", link.published_records),
        ("dropped_records", "Records lost for want of room.", link.dropped_records),
        ("refused_records", "Records that the broker does not take.", link.refused_records),
        ("reconnects", "Connections after the first.", link.reconnects),
    ):
        yield CounterMetricFamily(f"edge_rt_mqtt_{name}", what, count)
