import numpy as np
import pytest

from edge_rt.runtime import rng
from edge_rt.runtime.rng import mix, uniform

LARGEST = 2**64 - 1


def test_mix_is_splitmix64() -> None:
    # The first outputs of the generator in Java's SplittableRandom and Vigna's C for seed 0.
    gamma = 0x9E3779B97F4A7C15
    assert [mix(i * gamma) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_each_argument_counts() -> None:
    numbers = {uniform(s, r, p) for s in range(20) for r in range(20) for p in range(20)}
    assert len(numbers) == 8000


@pytest.mark.parametrize("seed", [0, 1, 2**63, LARGEST])
def test_range(seed: int) -> None:
    assert all(0 <= uniform(seed, 0, position) < 1 for position in range(1000))


@pytest.mark.parametrize(("bits", "number"), [(0, 0.0), (LARGEST, 1 - 2.0**-53), (2**63, 0.5)])
def test_scale(bits: int, number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "mix", lambda value: bits)
    assert uniform(0, 0, 0) == number


@pytest.mark.parametrize("varied", [0, 1, 2])
def test_uniform_and_uncorrelated_along_each_argument(varied: int) -> None:
    arguments = [7, 7, 7]
    numbers = np.empty(20_000)
    for value in range(len(numbers)):
        arguments[varied] = value
        numbers[value] = uniform(*arguments)
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 149  # the 99.9 % quantile of chi-square, 99 degrees
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 3.3 / np.sqrt(len(numbers))
