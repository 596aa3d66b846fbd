"""Quantizing the linears that read one activation: salient channels, AWQ, then GPTQ or rounding.

Weights are transposed here, [inputs, outputs], as grid.py says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace

from edge_rt.model.device import Array, Device
from edge_rt.model.gptj import Linear, LinearSpec
from edge_rt.quant import awq
from edge_rt.quant.calibration import Moments
from edge_rt.quant.curvature import Curvature, scaled
from edge_rt.quant.gptq import errors, gptq, sample_outputs
from edge_rt.quant.grid import Grid, fit
from edge_rt.quant.report import LinearReport
from edge_rt.quant.salient import salient_channels
from edge_rt.recipes import QuantRecipe


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight float32 [inputs, outputs] on its grid, and its bias [outputs], if it has one.

    The weight multiplies activations that are divided by the group's scales.
    """

    weight: Array
    grid: Grid
    bias: Array | None


@dataclass(frozen=True, slots=True)
class QuantizedGroup:
    """The linears by name; `salient` channels and AWQ's `scales` float32 [inputs] are shared."""

    weights: dict[str, QuantizedWeight]
    salient: npt.NDArray[np.int32]
    scales: Array
    reports: list[LinearReport]

    def serving(self) -> dict[str, Linear]:
        """The linears for activations that are not scaled."""
        return {
            name: Linear((one.weight / self.scales[:, None]).T, one.bias)
            for name, one in self.weights.items()
        }


@dataclass(frozen=True, slots=True)
class GroupQuantizer:
    """One recipe, for one layer; `qmax` is the highest level.

    Random channels, for comparison, are `rng`'s.
    """

    recipe: QuantRecipe
    device: Device
    rng: np.random.Generator
    qmax: int

    def quantize(
        self, specs: list[LinearSpec], linears: Mapping[str, Linear], moments: Moments
    ) -> QuantizedGroup:
        """Quantize the linears `specs`, which read what `moments` were taken of."""
        recipe, size = self.recipe, self.recipe.group_size
        originals = {spec.name: linears[spec.name].weight.T for spec in specs}
        salient = self._salient(list(originals.values()), moments)
        channels = salient.tolist()
        corrects_bias = recipe.method == "gptq"
        hessian = moments.scatter if corrects_bias else moments.about_zero()
        xp = array_namespace(hessian)
        scaling = awq.Scaling(0.0, xp.ones_like(xp.astype(moments.q, xp.float32)))
        if recipe.awq:
            weights = list(originals.values())
            magnitude = moments.mean_magnitude
            scaling = awq.search(
                weights, hessian, magnitude, channels, group_size=size, qmax=self.qmax
            )
        scales = scaling.scales[:, None]
        targets = _targets(specs, originals, moments) if corrects_bias else originals
        curvature = Curvature.of(hessian, channels, size, scaling.scales) if corrects_bias else None
        scaled_hessian = curvature.hessian if curvature else scaled(hessian, scaling.scales)
        importance = xp.linalg.diagonal(scaled_hessian)
        quantized, reports = {}, []
        for spec in specs:
            original, bias = originals[spec.name], linears[spec.name].bias
            target = targets[spec.name] * scales
            steps = self._steps(original, scaled_hessian, channels, scales)
            if curvature:
                weight, grid = gptq(target, curvature, qmax=self.qmax)
                shift = moments.bias(original, weight / scales, residual=spec.residual)
                bias = shift if bias is None else bias + shift
                last = list(steps)[-1]
                steps[f"{last}_gptq"] = _error(target - weight, original * scales, scaled_hessian)
            else:
                grid = fit(target, channels, size, self.qmax, importance if recipe.awq else None)
                weight = grid.rounded(target, channels)
            quantized[spec.name] = QuantizedWeight(weight, grid, bias)
            reports.append(
                LinearReport(
                    name=spec.name,
                    output_error=steps,
                    weight_error=_norm(original - weight / scales) / (_norm(original) or 1.0),
                    awq_alpha=scaling.alpha if recipe.awq else None,
                    salient=channels,
                    magnitude_ratio=_ratio(moments.mean_magnitude, channels),
                )
            )
        return QuantizedGroup(quantized, salient, scaling.scales, reports)

    def _salient(self, weights: list[Array], moments: Moments) -> npt.NDArray[np.int32]:
        if self.recipe.salient == "activation":
            measure = self.device.numpy(moments.mean_magnitude)
        elif self.recipe.salient == "weight":
            sizes = [np.abs(self.device.numpy(weight)) for weight in weights]
            measure = np.concatenate(sizes, axis=1).mean(1, dtype=np.float64)
        else:
            measure = self.rng.random(weights[0].shape[0])
        return salient_channels(measure, self.recipe.outlier_fraction)

    def _steps(
        self, weight: Array, hessian: Array, salient: list[int], scales: Array
    ) -> dict[str, float]:
        """The output error after each step before GPTQ, on a sample of the outputs.

        `hessian` is of inputs divided by `scales` [inputs, 1].
        """
        xp = array_namespace(weight)
        weight = sample_outputs(weight)
        importance = xp.linalg.diagonal(hessian)
        ones = xp.ones_like(scales)

        def error(factors: Array, kept: list[int], importance: Array | None) -> float:
            scaled = weight * factors
            grid = fit(scaled, kept, self.recipe.group_size, self.qmax, importance)
            difference = weight - grid.rounded(scaled, kept) / factors
            return _error(difference * scales, weight * scales, hessian)

        steps = {"rtn": error(ones, [], None)}
        if salient:
            steps["rtn_salient"] = error(ones, salient, None)
        if self.recipe.awq:
            steps["awq_salient" if salient else "awq"] = error(scales, salient, importance)
        return steps


def _targets(
    specs: list[LinearSpec], weights: Mapping[str, Array], moments: Moments
) -> dict[str, Array]:
    """The weights that serve the quantized model best, were they not to be rounded.

    Salient channels count in what holds them back, unlike in GPTQ: a few noisy ones would else
    be made up for by all others.
    """
    curvature = Curvature.of(moments.scatter)
    return {
        spec.name: weights[spec.name]
        + curvature.solve(moments.owed_by(weights[spec.name], residual=spec.residual))
        for spec in specs
    }


def _error(difference: Array, weight: Array, hessian: Array) -> float:
    """What `difference` adds to a sample of `weight`'s outputs, as a fraction of their variance."""
    difference, weight = sample_outputs(difference), sample_outputs(weight)
    xp = array_namespace(weight)
    added = float(xp.sum(errors(difference, hessian)))
    return added / (float(xp.sum(errors(weight, hessian))) or 1.0)


def _norm(x: Array) -> float:
    return float(array_namespace(x).linalg.vector_norm(x))


def _ratio(magnitude: Array, channels: list[int]) -> float:
    """Mean magnitude of `channels` over that of all channels; 0 where there are none."""
    xp = array_namespace(magnitude)
    mean = float(xp.mean(magnitude))
    return float(xp.mean(magnitude[channels])) / mean if channels and mean else 0.0
