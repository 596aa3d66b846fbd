"""The stored form of one quantized linear: INT4 in groups, with some input channels in FP16.

Row-major in logical order [out, in]; every engine repacks it when it builds. Columns are padded to
whole groups with the group's zero point. A salient channel keeps its INT4 slot, which holds the
zero point and so adds nothing; its weights stand in `w_salient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from edge_rt.model.gptj import Linear
from edge_rt.quant.grid import SCALE_FLOOR, Grid, as_half

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]

QMAX = 15
SALIENT_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """One W4Linear's tensors, in the order of the op's inputs.

    With N outputs, K inputs, G groups of `group_size` and S salient channels padded to a multiple
    of 16: `qweight` uint8 [N, G * group_size / 2] (the even column in the low nibble), `scales`
    float16 [N, G], `zeros` uint8 [N, G], `w_salient` float16 [N, S], `idx` int32 [S] (-1 where
    padded), `bias` float32 [N], `post_scale` float32 [N].
    """

    qweight: U8
    scales: F16
    zeros: U8
    w_salient: F16
    idx: I32
    bias: F32
    post_scale: F32

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[np.generic]]) -> QuantizedLinear:
        """Collect the fields from tensors of the same names."""
        return cls(**{f.name: tensors[f.name] for f in fields(cls)})  # type: ignore[arg-type]

    def tensors(self) -> dict[str, npt.NDArray[np.generic]]:
        """The fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def group_size(self) -> int:
        """Input channels that share a scale."""
        return 2 * self.qweight.shape[1] // self.scales.shape[1]

    @property
    def salient(self) -> I32:
        """The real salient channels, without padding."""
        return self.idx[self.idx >= 0]

    def linear(self, in_features: int) -> Linear:
        """The float32 linear that an engine computes."""
        return Linear(self.dequantize(in_features), self.bias, self.post_scale)

    def dequantize(self, in_features: int) -> F32:
        """The float32 weight [N, in_features] that this linear multiplies with."""
        n, groups = self.scales.shape
        q = unpack_nibbles(self.qweight).reshape(n, groups, -1).astype(np.float32)
        w = (q - self.zeros[:, :, None]) * self.scales[:, :, None].astype(np.float32)
        weight = w.reshape(n, -1)[:, :in_features]
        salient = self.salient
        weight[:, salient] = self.w_salient[:, : len(salient)].astype(np.float32)
        return weight


def to_half(x: npt.NDArray[np.floating], what: str) -> F16:
    """`x` as float16; CheckpointError where a value is beyond its range."""
    half: F16 = as_half(x, what).astype(np.float16)
    return half


def pack_nibbles(q: U8) -> U8:
    """Values 0..15 [N, K] with even K -> bytes [N, K / 2], the even column in the low nibble."""
    return q[:, 0::2] | (q[:, 1::2] << np.uint8(4))


def unpack_nibbles(packed: U8) -> U8:
    """Bytes [N, K / 2] -> values 0..15 [N, K]."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(
        packed.shape[0], -1
    )


def pack(weight: F32, grid: Grid, salient: I32, bias: F32 | None = None) -> QuantizedLinear:
    """Store `weight` [N, K], whose values outside `salient` lie on `grid`, in host memory."""
    n, k = weight.shape
    group_size, scales, zeros = grid.group_size, grid.scales.T, grid.zeros.T
    groups = scales.shape[1]
    padded = np.zeros((n, groups * group_size), np.float32)
    padded[:, :k] = weight
    padded[:, salient] = 0.0
    levels = np.rint(padded.reshape(n, groups, group_size) / scales[:, :, None]) + zeros[:, :, None]
    columns = -(-len(salient) // SALIENT_MULTIPLE) * SALIENT_MULTIPLE
    w_salient = np.zeros((n, columns), np.float16)
    w_salient[:, : len(salient)] = to_half(weight[:, salient], "a salient channel")
    idx = np.full(columns, -1, np.int32)
    idx[: len(salient)] = salient
    return QuantizedLinear(
        qweight=pack_nibbles(levels.astype(np.uint8).reshape(n, -1)),
        scales=to_half(scales, "the scale of a group"),
        zeros=zeros.astype(np.uint8),
        w_salient=w_salient,
        idx=idx,
        bias=np.zeros(n, np.float32) if bias is None else bias,
        post_scale=np.ones(n, np.float32),
    )


def scale_outputs(linear: QuantizedLinear, factors: F32) -> QuantizedLinear:
    """`linear` with its outputs multiplied by `factors` [N]: levels stay, scales are rounded anew.

    A normal FP16 scale is off by at most 1 in 2,048, which beside a level's width is nothing; one
    below 6e-5, which takes weights that small or factors that large, by more.
    """
    if (factors == 1.0).all():
        return linear
    column = factors[:, None]
    scales = to_half(linear.scales.astype(np.float32) * column, "the scale of a group")
    return replace(
        linear,
        scales=np.maximum(scales, np.float16(SCALE_FLOOR)),
        w_salient=to_half(linear.w_salient.astype(np.float32) * column, "a salient channel"),
        bias=linear.bias * factors,
    )
