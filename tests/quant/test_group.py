"""Groups of linears under every kind of recipe, judged by their outputs in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edge_rt.errors import CheckpointError, ConfigError
from edge_rt.model.device import Device
from edge_rt.model.gptj import Linear, LinearSpec
from edge_rt.quant.calibration import Moments
from edge_rt.quant.group import GroupQuantizer, QuantizedGroup
from edge_rt.quant.pack import pack
from edge_rt.recipes import QuantRecipe

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
INPUTS, TOKENS, GROUP = 70, 400, 32
LARGE = [4, 33, 69]
FIRST, SECOND = LinearSpec("first", (), None, "ln_1"), LinearSpec("second", (), "bias", "ln_1")
BACK = LinearSpec("back", (), None, "gelu", residual=True)
RTN = QuantRecipe(method="rtn", awq=False, group_size=32, outlier_fraction=0.04)
GPTQ = QuantRecipe(method="gptq", awq=True, group_size=32, outlier_fraction=0.04)


@dataclass
class Case:
    """Linears, and what they read in the quantized model (q) and in the float one (f)."""

    specs: list[LinearSpec]
    linears: dict[str, Linear]
    q: F32
    f: F32
    r: F32

    def quantize(self, recipe: QuantRecipe, device: str = "cpu", seed: int = 0) -> QuantizedGroup:
        where = Device.open(device)  # type: ignore[arg-type]
        moved = {
            name: Linear(
                where.array(linear.weight),
                None if linear.bias is None else where.array(linear.bias),
            )
            for name, linear in self.linears.items()
        }
        moments = Moments.total([(where.array(self.q), where.array(self.f), where.array(self.r))])
        quantizer = GroupQuantizer(recipe, where, np.random.default_rng(seed), 15)
        return quantizer.quantize(self.specs, moved, moments)

    def wanted(self, name: str) -> F64:
        """The outputs of the float model, and what the residual stream lacks besides."""
        return self.outputs(self.f, self.linears[name]) + (self.r if self.r.size else 0.0)

    @staticmethod
    def outputs(x: F32, linear: Linear) -> F64:
        bias = 0.0 if linear.bias is None else np.asarray(linear.bias, np.float64)
        return x.astype(np.float64) @ np.asarray(linear.weight, np.float64).T + bias


def case(seed: int = 0, *, disturbed: bool = False, residual: bool = False) -> Case:
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(TOKENS, 3)) @ rng.normal(size=(3, INPUTS))
    f = common + rng.normal(size=(TOKENS, INPUTS)) + 0.5 * rng.normal(size=INPUTS)
    f[:, LARGE] *= 12
    q = 0.95 * f + 0.05 * rng.normal(size=f.shape) + 0.1 if disturbed else f
    specs = [BACK] if residual else [FIRST, SECOND]
    linears = {
        spec.name: Linear(
            rng.normal(size=(outputs, INPUTS)).astype(np.float32),
            rng.normal(size=outputs).astype(np.float32) if spec.bias else None,
        )
        for spec, outputs in zip(specs, (24, 16), strict=False)
    }
    r = rng.normal(size=(TOKENS, 24)) * disturbed + disturbed if residual else f[:, :0]
    return Case(specs, linears, *(x.astype(np.float32) for x in (q, f, r)))


def plain_rtn(weight: F64, salient: list[int]) -> F64:
    """[outputs, inputs] rounded to nearest in groups, salient channels to FP16."""
    result = weight.astype(np.float16).astype(np.float64)
    for row in range(len(weight)):
        for start in range(0, weight.shape[1], GROUP):
            stop = min(start + GROUP, weight.shape[1])
            members = [c for c in range(start, stop) if c not in salient]
            w = weight[row, members]
            low, high = min(w.min(), 0.0), max(w.max(), 0.0)
            scale = float(np.float16((high - low) / 15))
            zero = np.rint(-low / scale)
            result[row, members] = (np.clip(np.rint(w / scale) + zero, 0, 15) - zero) * scale
    return result


def share(added: F64, outputs: F64, *, centred: bool) -> float:
    """Mean square of `added` as a fraction of that of `outputs`, with or without their means."""
    if centred:
        added, outputs = added - added.mean(axis=0), outputs - outputs.mean(axis=0)
    return float(np.sum(added**2) / np.sum(outputs**2))


STEPS = {
    ("rtn", False, 0.0): ["rtn"],
    ("rtn", False, 0.04): ["rtn", "rtn_salient"],
    ("rtn", True, 0.0): ["rtn", "awq"],
    ("rtn", True, 0.04): ["rtn", "rtn_salient", "awq_salient"],
    ("gptq", False, 0.0): ["rtn", "rtn_gptq"],
    ("gptq", False, 0.04): ["rtn", "rtn_salient", "rtn_salient_gptq"],
    ("gptq", True, 0.0): ["rtn", "awq", "awq_gptq"],
    ("gptq", True, 0.04): ["rtn", "rtn_salient", "awq_salient", "awq_salient_gptq"],
}


@pytest.mark.parametrize(("method", "awq", "fraction"), STEPS)
@pytest.mark.parametrize("residual", [True, False])
def test_reported_errors_are_those_of_the_outputs(
    method: Any, awq: bool, fraction: float, residual: bool
) -> None:
    data = case(residual=residual)
    recipe = QuantRecipe(method=method, awq=awq, group_size=32, outlier_fraction=fraction)
    group = data.quantize(recipe)
    serving = group.serving()
    assert [report.name for report in group.reports] == [spec.name for spec in data.specs]
    for report in group.reports:
        errors = report.output_error
        assert list(errors) == STEPS[method, awq, fraction]
        linear, served = data.linears[report.name], serving[report.name]
        exact = linear.weight.astype(np.float64)
        x, plain = data.q.astype(np.float64), x_outputs(data, linear)
        measured = functools.partial(share, outputs=plain, centred=method == "gptq")
        assert errors["rtn"] == pytest.approx(
            measured(x @ (plain_rtn(exact, []) - exact).T), rel=1e-3
        )
        if fraction:
            assert group.salient.tolist() == report.salient == LARGE
            rounded = plain_rtn(exact, LARGE)
            assert errors["rtn_salient"] == pytest.approx(
                measured(x @ (rounded - exact).T), rel=1e-3
            )
            assert errors["rtn_salient"] < 0.5 * errors["rtn"]
        last = list(errors.values())[-1]
        difference = np.asarray(served.weight, np.float64) - exact
        assert last == pytest.approx(measured(x @ difference.T), rel=1e-3)
        if method == "gptq":
            # Its inputs are the float model's here: what it aims at is the weight itself.
            assert last < errors["rtn_salient" if fraction else "rtn"]
            mean = (data.outputs(data.q, served) - data.wanted(report.name)).mean(axis=0)
            np.testing.assert_allclose(mean, 0.0, atol=1e-4)
        assert report.weight_error == pytest.approx(
            np.linalg.norm(difference) / np.linalg.norm(exact), rel=1e-4
        )
        assert (report.awq_alpha is not None) == awq
        magnitude = np.abs(x).mean(axis=0)
        ratio = magnitude[LARGE].mean() / magnitude.mean() if fraction else 0.0
        assert report.magnitude_ratio == pytest.approx(ratio, rel=1e-4)


def x_outputs(data: Case, linear: Linear) -> F64:
    return data.q.astype(np.float64) @ linear.weight.astype(np.float64).T


@pytest.mark.parametrize("recipe", [RTN, replace(RTN, awq=True), GPTQ, replace(GPTQ, awq=False)])
def test_weights_lie_on_their_grid(recipe: QuantRecipe) -> None:
    """The stored form gives them back, to what float32 rounds."""
    assert_stored(case(1, disturbed=True).quantize(recipe))


def assert_stored(group: QuantizedGroup) -> None:
    assert np.isfinite(group.scales).all()
    assert (group.scales > 0).all()
    assert (group.scales[group.salient] == 1).all()
    for one in group.weights.values():
        assert np.isfinite(one.weight).all()
        assert (one.grid.scales > 0).all()
        np.testing.assert_array_equal(one.grid.scales, one.grid.scales.astype(np.float16))
        np.testing.assert_array_equal(one.grid.zeros, np.clip(np.rint(one.grid.zeros), 0, 15))
        stored = pack(one.weight.T, one.grid, group.salient, one.bias).dequantize(INPUTS)
        np.testing.assert_allclose(stored.T, one.weight, rtol=1e-6, atol=1e-9)
    for linear in group.serving().values():
        assert np.isfinite(linear.weight).all()
        assert linear.bias is None or np.isfinite(linear.bias).all()


@pytest.mark.parametrize("residual", [True, False])
def test_gptq_makes_up_for_what_its_inputs_have_lost(residual: bool) -> None:
    """Against the float model's outputs it beats rounding, and in the mean it loses nothing."""
    data = case(2, disturbed=True, residual=residual)
    ours, nearest = data.quantize(GPTQ).serving(), data.quantize(RTN).serving()
    for name, linear in ours.items():
        wanted = data.wanted(name)
        ours_off = data.outputs(data.q, linear) - wanted
        nearest_off = data.outputs(data.q, nearest[name]) - wanted
        assert np.mean(ours_off**2) < 0.5 * np.mean(nearest_off**2)
        np.testing.assert_allclose(ours_off.mean(axis=0), 0.0, atol=1e-3)
        # Not by the bias alone.
        assert ours_off.var(axis=0).sum() < 0.8 * nearest_off.var(axis=0).sum()


def test_rounding_keeps_the_bias() -> None:
    data = case(3)
    weights = data.quantize(RTN).weights
    assert weights["first"].bias is None
    np.testing.assert_array_equal(weights["second"].bias, data.linears["second"].bias)


@pytest.mark.parametrize("recipe", [RTN, GPTQ])
def test_salient_channels_by_activation_and_by_weight(recipe: QuantRecipe) -> None:
    data = case(4)
    for linear in data.linears.values():
        linear.weight[:, [7, 50]] *= 5
    data.linears["second"].weight[:, 60] *= 20  # of both linears together the largest
    assert data.quantize(recipe).salient.tolist() == LARGE
    group = data.quantize(replace(recipe, salient="weight"))
    sizes = np.abs(np.vstack([linear.weight for linear in data.linears.values()])).mean(axis=0)
    assert group.salient.tolist() == sorted(np.argsort(sizes)[-3:]) == [7, 50, 60]
    serving = group.serving()
    for name, one in group.weights.items():
        half = one.weight[group.salient].astype(np.float16)
        np.testing.assert_array_equal(one.weight[group.salient], half)
        if recipe.method == "rtn":
            exact = data.linears[name].weight[:, group.salient].astype(np.float16)
            np.testing.assert_array_equal(serving[name].weight[:, group.salient], exact)


def test_random_channels_are_the_seeds() -> None:
    data, recipe = case(5), replace(RTN, salient="random", outlier_fraction=0.05)
    drawn = [data.quantize(recipe, seed=seed).salient.tolist() for seed in range(20)]
    assert drawn == [data.quantize(recipe, seed=seed).salient.tolist() for seed in range(20)]
    assert all(len(set(channels)) == 4 and channels == sorted(channels) for channels in drawn)
    assert len({tuple(channels) for channels in drawn}) == 20
    # 80 draws out of 70 channels: no channel can be favoured much.
    assert np.bincount(np.concatenate(drawn), minlength=INPUTS).max() <= 6
    quantizer = GroupQuantizer(recipe, Device.open(), np.random.default_rng(0), 15)
    moments = Moments.total([(data.q, data.f, data.r)])
    pair = [quantizer.quantize(data.specs, data.linears, moments).salient for _ in range(2)]
    assert pair[0].tolist() == drawn[0] != pair[1].tolist(), "the next group has its own"


def zero_group(data: Case) -> None:
    for linear in data.linears.values():
        linear.weight[:, 32:64] = 0.0


def zero_weights(data: Case) -> None:
    for linear in data.linears.values():
        linear.weight[:] = 0.0


def weight_outlier(data: Case) -> None:
    data.linears["first"].weight[3, 40] = 1e4


def both_outliers(data: Case) -> None:
    weight_outlier(data)
    activations(slice(40, 41), 1e4)(data)
    activations(slice(5, 6), 0.0)(data)


def activations(channels: slice, factor: float, added: float = 0.0) -> Callable[[Case], None]:
    def change(data: Case) -> None:
        for x in (data.q, data.f):
            x[:, channels] = x[:, channels] * factor + added

    return change


DEGENERATE: Mapping[str, Callable[[Case], None]] = {
    "zero group": zero_group,
    "zero weights": zero_weights,
    "weight outlier": weight_outlier,
    "both outliers": both_outliers,
    "dead channel": activations(slice(5, 6), 0.0),
    "dead group": activations(slice(32, 64), 0.0),
    "all dead": activations(slice(0, INPUTS), 0.0),
    "constant channel": activations(slice(5, 6), 0.0, 3.0),
    "large constant": activations(slice(5, 6), 0.0, 1e4),
    "all constant": activations(slice(0, INPUTS), 0.0, 3.0),
    "activation outlier": activations(slice(40, 41), 1e4),
    "tiny": activations(slice(0, INPUTS), 1e-12),
}


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("recipe", [RTN, replace(RTN, awq=True), GPTQ])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_input(name: str, recipe: QuantRecipe, fraction: float) -> None:
    data = case(6, disturbed=True)
    DEGENERATE[name](data)
    group = data.quantize(replace(recipe, outlier_fraction=fraction))
    assert_stored(group)
    for report in group.reports:
        assert np.isfinite([*report.output_error.values(), report.weight_error]).all()
        assert report.output_error["rtn"] >= 0
    if recipe.method != "gptq":
        return
    served, plain = group.serving(), data.quantize(replace(RTN, outlier_fraction=fraction))
    for linear, rounded, wanted in (
        (served[spec.name], plain.serving()[spec.name], data.wanted(spec.name))
        for spec in data.specs
    ):
        off, allowed = (np.mean((data.outputs(data.q, x) - wanted) ** 2) for x in (linear, rounded))
        assert off <= allowed * (1 + 1e-4) + 1e-6 * np.mean(wanted**2)


def test_a_whole_group_may_be_salient() -> None:
    data = case(7)
    activations(slice(32, 64), 100.0)(data)
    group = data.quantize(replace(GPTQ, outlier_fraction=0.5))
    assert set(range(32, 64)) <= set(group.salient.tolist())
    assert_stored(group)


@pytest.mark.parametrize("recipe", [RTN, GPTQ])
@pytest.mark.parametrize(
    ("column", "value", "what"),
    [(LARGE[0], 1e5, "a salient channel"), (40, 2e6, "the scale of a group")],
)
def test_weights_beyond_fp16_are_refused(
    recipe: QuantRecipe, column: int, value: float, what: str
) -> None:
    data = case(8)
    data.linears["second"].weight[2, column] = value
    with pytest.raises(CheckpointError, match=f"{what} holds .*more than FP16's 65504.*'float'"):
        data.quantize(recipe)


@pytest.mark.parametrize("fraction", [1.5, 0.51, -0.01, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=rf"outlier_fraction must be 0 to 0\.5, found {fraction}"):
        QuantRecipe(outlier_fraction=fraction)


@pytest.mark.parametrize("recipe", [RTN, replace(RTN, awq=True), GPTQ])
@pytest.mark.parametrize("residual", [True, False])
def test_torch_does_the_same(recipe: QuantRecipe, residual: bool) -> None:
    """The same salient channels and exponent, 99 % of the levels, output errors to 1 %.

    The levels over several groups together: a tie that float32 decides changes a whole output,
    which is 2 % of one small matrix.
    """
    equal: list[np.ndarray] = []
    for seed in range(9, 15):
        data = case(seed, disturbed=True, residual=residual)
        found, theirs = data.quantize(recipe), data.quantize(recipe, "torch-cpu")
        np.testing.assert_array_equal(theirs.salient, found.salient)
        np.testing.assert_allclose(np.asarray(theirs.scales), found.scales, rtol=1e-5)
        for name, one in found.weights.items():
            other = theirs.weights[name]
            same = np.isclose(np.asarray(other.weight), one.weight, rtol=1e-4, atol=1e-6)
            equal.append(same.ravel())
            if one.bias is not None:
                alike = same.all(axis=0)  # what else a bias makes up for, it should not
                found_bias, their_bias = one.bias[alike], np.asarray(other.bias)[alike]
                np.testing.assert_allclose(their_bias, found_bias, atol=1e-3)
        for report, other_report in zip(found.reports, theirs.reports, strict=True):
            assert other_report.awq_alpha == report.awq_alpha
            assert other_report.output_error == pytest.approx(report.output_error, rel=0.01)
    assert np.concatenate(equal).mean() >= 0.99
