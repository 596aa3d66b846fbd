"""The integral of power."""

from __future__ import annotations

import pytest

from edge_rt.core import BoardReading
from edge_rt.power.energy import Energy


def integrate(*readings: tuple[float, float | None]) -> list[tuple[float | None, float | None]]:
    """Seconds and milliwatts; energy and the time of it after each."""
    energy = Energy(gap_s=3.0)
    added = [
        energy.add(BoardReading(round(at_s * 1e9), power_mw=power_mw))
        for at_s, power_mw in readings
    ]
    return [(reading.energy_j, reading.metered_s) for reading in added]


def test_trapezoids() -> None:
    assert integrate((10, 1000), (11, 3000), (13, 5000)) == [
        (0, 0),
        (pytest.approx(2.0), pytest.approx(1)),
        (pytest.approx(10.0), pytest.approx(3)),
    ]


def test_where_power_is_not_known_nothing_is_counted() -> None:
    assert integrate((0, 1000), (1, None), (2, 1000), (3, 1000)) == [
        (0, 0),
        (None, None),
        (0, 0),
        (pytest.approx(1), pytest.approx(1)),
    ]


def test_over_a_gap_nothing_is_counted() -> None:
    assert integrate((0, 1000), (3, 1000), (6.1, 9000), (7.1, 1000)) == [
        (0, 0),
        (pytest.approx(3), pytest.approx(3)),
        (pytest.approx(3), pytest.approx(3)),
        (pytest.approx(8), pytest.approx(4)),
    ]


def test_a_machine_without_power_has_no_energy() -> None:
    assert integrate((0, None), (1, None)) == [(None, None), (None, None)]
