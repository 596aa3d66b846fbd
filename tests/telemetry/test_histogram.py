"""Against prometheus_client's own histogram."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from edge_rt.telemetry.histogram import Histogram, decades

BOUNDS = (0.25, 1.0, 2.5)
VALUES = st.sampled_from(BOUNDS) | st.floats(0, 4)


def test_decades() -> None:
    assert decades(1e-3, 0.1) == (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
    assert decades(0.002, 1) == (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@settings(deadline=None)
@given(st.lists(VALUES))
def test_counts_are_those_of_prometheus(values: list[float]) -> None:
    ours, registry = Histogram(BOUNDS), CollectorRegistry()
    reference = Reference("x", "x", buckets=BOUNDS, registry=registry)
    for value in values:
        ours.observe(value)
        reference.observe(value)
    for bound, count in ours.cumulative():
        assert registry.get_sample_value("x_bucket", {"le": bound}) == count
    assert registry.get_sample_value("x_sum") == ours.sum
