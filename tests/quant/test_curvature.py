"""Against NumPy in float64: inverses and whole factorizations, no blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from edge_rt.model.device import Device
from edge_rt.quant import curvature as module
from edge_rt.quant.curvature import Curvature, split, upper_factor

F64 = npt.NDArray[np.float64]
DEVICES = ["cpu", "torch-cpu"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, the last of them not full, in matrices of a test's size."""
    monkeypatch.setattr(module, "BLOCK", 16)


def moment(inputs: int, seed: int = 0) -> F64:
    """Of correlated channels, one of them dead."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4 * inputs, inputs)) + rng.normal(size=(4 * inputs, 1))
    x *= np.exp(rng.normal(size=inputs))
    x[:, inputs // 3] = 0.0
    return x.T @ x / len(x)


def damped(hessian: F64, salient: list[int]) -> F64:
    """With 10 % of the mean diagonal of the channels that are rounded, if there are any."""
    rest = [c for c in range(len(hessian)) if c not in salient] or [*range(len(hessian))]
    mean = np.diagonal(hessian)[rest].mean()
    return hessian + (0.1 * mean or 1.0) * np.eye(len(hessian))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inputs", [1, 2, 16, 17, 60])
def test_upper_factor(inputs: int, device: str) -> None:
    matrix = damped(moment(inputs), [])
    moved = Device.open(device).array(matrix.copy())  # type: ignore[arg-type]
    upper_factor(moved)
    found = np.asarray(moved)
    np.testing.assert_array_equal(found, np.triu(found))
    assert (np.diagonal(found) > 0).all()
    np.testing.assert_allclose(found @ found.T, matrix, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("salient", [[], [3], [0, 18, 59], [*range(60)]])
@pytest.mark.parametrize("scale", [False, True])
def test_factors_are_those_of_the_ordered_hessian(
    salient: list[int], scale: bool, device: str
) -> None:
    hessian = moment(60)
    scales = np.exp(np.random.default_rng(1).normal(size=60)).astype(np.float32)
    where = Device.open(device)  # type: ignore[arg-type]
    found = Curvature.of(where.array(hessian), salient, 16, where.array(scales) if scale else None)
    wanted = hessian / np.outer(scales, scales) if scale else hessian
    np.testing.assert_allclose(np.asarray(found.hessian), wanted, rtol=1e-6)
    order = [c for c in range(60) if c not in salient] + salient
    assert found.order == order
    ordered = damped(wanted, salient)[np.ix_(order, order)]
    unit, pivots = (np.asarray(x, np.float64) for x in (found.unit, found.pivots))
    np.testing.assert_array_equal(np.tril(unit), np.eye(60))
    np.testing.assert_allclose(unit @ np.diag(pivots) @ unit.T, ordered, rtol=1e-5, atol=1e-5)
    # GPTQ's own code takes rows of the upper factor of the inverse, over their diagonal.
    factor = np.linalg.cholesky(np.linalg.inv(ordered)).T
    expected = np.linalg.inv(factor / np.diagonal(factor)[:, None])
    np.testing.assert_allclose(unit, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("salient", [[], [0, 18, 59]])
def test_solve(salient: list[int], device: str) -> None:
    where = Device.open(device)  # type: ignore[arg-type]
    hessian = moment(60)
    wanted = np.random.default_rng(2).normal(size=(60, 5)).astype(np.float32)
    moved = where.array(wanted)
    found = Curvature.of(where.array(hessian), salient, 16).solve(moved)
    expected = np.linalg.solve(damped(hessian, salient), wanted.astype(np.float64))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(moved), wanted)


@pytest.mark.parametrize("salient", [[], [5]])
def test_rows_are_damped(salient: list[int]) -> None:
    hessian = moment(20)
    found = Curvature.of(hessian, salient, 16).rows([2, 19])
    np.testing.assert_allclose(found, damped(hessian, salient)[[2, 19]], rtol=1e-6)


def test_the_hessian_is_left_alone() -> None:
    hessian = moment(40)
    before = hessian.copy()
    Curvature.of(hessian, [3], 16, np.full(40, 2.0, np.float32)).rows([1])
    np.testing.assert_array_equal(hessian, before)


def test_no_activations() -> None:
    found = Curvature.of(np.zeros((20, 20)), [2], 16)
    assert (found.hessian == 0).all()
    assert found.damping == 1.0
    np.testing.assert_array_equal(found.unit, np.eye(20))


@pytest.mark.parametrize("salient", [[], [0, 5], [4, 5, 6, 7]])
def test_groups_leave_salient_channels_out(salient: list[int]) -> None:
    groups = split(10, salient, 4)
    assert [len(group) for group in groups] == [
        sum(c not in salient for c in range(start, min(start + 4, 10))) for start in (0, 4, 8)
    ]
    assert sorted(c for group in groups for c in group) == [
        c for c in range(10) if c not in salient
    ]
