"""What quantizing did to each linear, measured on the calibration text while it was done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearReport:
    """One linear.

    `output_error`: after each step that the recipe took (rtn, rtn_salient, awq_salient and the
    last one), the mean square error that rounding added to the linear's outputs, as a fraction of
    their variance (of their mean square where no bias is corrected, without GPTQ).
    `weight_error`: the Frobenius norm of the weights' change over that of the weights.
    `awq_alpha`: AWQ's exponent, None without AWQ. `salient`: the FP16 channels, and
    `magnitude_ratio`: the mean |activation| of those over that of all channels.
    """

    name: str
    output_error: dict[str, float]
    weight_error: float
    awq_alpha: float | None
    salient: list[int]
    magnitude_ratio: float
