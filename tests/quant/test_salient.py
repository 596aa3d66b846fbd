from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from edge_rt.quant.salient import salient_channels, salient_count


def test_one_percent_rounded_up_for_every_width() -> None:
    for channels in range(1, 20_001):
        exact = -(-channels * Fraction(1, 100) // 1)
        assert salient_count(channels, 0.01) == max(1, exact)


@pytest.mark.parametrize(
    ("channels", "fraction", "count"),
    [
        (4096, 0.01, 41),
        (16384, 0.01, 164),
        (384, 0.01, 4),
        (384, 0.0, 0),
        (100, 0.05, 5),
        (100, 0.07, 7),  # 0.07 * 100 is 7.000000000000001
        (384, 1e-12, 1),
    ],
)
def test_known_counts(channels: int, fraction: float, count: int) -> None:
    assert salient_count(channels, fraction) == count


def test_the_largest_activations_are_chosen_in_order() -> None:
    magnitude = np.array([1.0, 9.0, 3.0, 9.0, 0.0, 7.0])
    assert salient_channels(magnitude, 0.5).tolist() == [1, 3, 5]
    assert salient_channels(magnitude, 0.01).tolist() == [1]  # of equals, the lower channel
    assert salient_channels(magnitude, 0.0).tolist() == []
