"""The stored form of one quantized linear: INT4 in groups, with some input channels in FP16.

Row-major in logical order [out, in]; every engine repacks it when it builds. Columns are padded to
whole groups with the group's zero point. A salient channel keeps its INT4 slot, which holds the
zero point and so adds nothing; its weights stand in `w_salient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from edge_rt.errors import CheckpointError

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]

QMAX = 15
SALIENT_MULTIPLE = 16
# The smallest FP16: a group of zeros would otherwise get a scale of zero.
SCALE_FLOOR = float(np.finfo(np.float16).smallest_subnormal)


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
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    if not np.isfinite(half).all():
        raise CheckpointError(
            f"{what} holds {np.abs(x).max():.3g}, more than FP16's 65504, so INT4 with FP16 parts "
            f"cannot store it; use the recipe 'float', which keeps such weights in float32"
        )
    return half


def pack_nibbles(q: U8) -> U8:
    """Values 0..15 [N, K] with even K -> bytes [N, K / 2], the even column in the low nibble."""
    return q[:, 0::2] | (q[:, 1::2] << np.uint8(4))


def unpack_nibbles(packed: U8) -> U8:
    """Bytes [N, K / 2] -> values 0..15 [N, K]."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(
        packed.shape[0], -1
    )


def quantize_rtn(
    weight: F32,
    salient: I32,
    group_size: int,
    bias: F32 | None = None,
    post_scale: F32 | None = None,
) -> QuantizedLinear:
    """Round `weight` [N, K] to the nearest INT4 level, asymmetric in groups along the input.

    The columns `salient` stay in FP16. A group's range always includes zero, so that its zero
    point is a level of its own and is never clamped.
    """
    n, k = weight.shape
    groups = -(-k // group_size)
    padded = np.zeros((n, groups * group_size), np.float32)
    padded[:, :k] = weight
    padded[:, salient] = 0.0
    w = padded.reshape(n, groups, group_size)
    low, high = np.minimum(w.min(-1), 0.0), np.maximum(w.max(-1), 0.0)
    scales = to_half(np.maximum((high - low) / QMAX, SCALE_FLOOR), "the scale of a group")
    s = scales.astype(np.float32)[:, :, None]
    zeros = np.clip(np.rint(-low[:, :, None] / s), 0, QMAX)
    q = np.clip(np.rint(w / s) + zeros, 0, QMAX).astype(np.uint8)
    columns = -(-len(salient) // SALIENT_MULTIPLE) * SALIENT_MULTIPLE
    w_salient = np.zeros((n, columns), np.float16)
    w_salient[:, : len(salient)] = to_half(weight[:, salient], "a salient channel")
    idx = np.full(columns, -1, np.int32)
    idx[: len(salient)] = salient
    return QuantizedLinear(
        qweight=pack_nibbles(q.reshape(n, -1)),
        scales=scales,
        zeros=zeros[:, :, 0].astype(np.uint8),
        w_salient=w_salient,
        idx=idx,
        bias=np.zeros(n, np.float32) if bias is None else bias,
        post_scale=np.ones(n, np.float32) if post_scale is None else post_scale,
    )
