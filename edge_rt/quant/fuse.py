"""Several linears as one: an engine reads weights faster in fewer, larger products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_rt.quant.pack import SALIENT_MULTIPLE, QuantizedLinear


def can_stack(linears: Sequence[QuantizedLinear]) -> bool:
    """Whether `stack` takes them: they share the input's groups and its salient channels."""
    first = linears[0]
    return all(
        other.group_size == first.group_size
        and other.scales.shape[1] == first.scales.shape[1]
        and np.array_equal(other.idx, first.idx)
        for other in linears[1:]
    )


def stack(linears: Sequence[QuantizedLinear]) -> QuantizedLinear:
    """The linear whose outputs are those of `linears`, one after the other, of the same input."""
    assert can_stack(linears)
    names = ("qweight", "scales", "zeros", "w_salient", "bias", "post_scale")
    rows = {name: np.concatenate([getattr(one, name) for one in linears]) for name in names}
    return QuantizedLinear.from_tensors(rows | {"idx": linears[0].idx})


def can_join(linears: Sequence[QuantizedLinear], in_features: Sequence[int]) -> bool:
    """Whether `join` takes them: no group reaches across two inputs, and no output is scaled."""
    group_size = linears[0].group_size
    return all(
        linear.group_size == group_size
        and features % group_size == 0
        and bool((linear.post_scale == 1.0).all())
        for linear, features in zip(linears, in_features, strict=True)
    )


def join(linears: Sequence[QuantizedLinear], in_features: Sequence[int]) -> QuantizedLinear:
    """The linear of all inputs, one behind the other, whose outputs are the sums of `linears`.

    `in_features` are the inputs of each.
    """
    assert can_join(linears, in_features)
    starts = np.cumsum([0, *in_features[:-1]])
    idx = np.concatenate([one.salient + start for one, start in zip(linears, starts, strict=True)])
    padding = -len(idx) % SALIENT_MULTIPLE
    salient = np.concatenate([one.w_salient[:, : len(one.salient)] for one in linears], axis=1)
    return QuantizedLinear(
        qweight=np.concatenate([one.qweight for one in linears], axis=1),
        scales=np.concatenate([one.scales for one in linears], axis=1),
        zeros=np.concatenate([one.zeros for one in linears], axis=1),
        w_salient=np.pad(salient, ((0, 0), (0, padding))),
        idx=np.pad(idx, (0, padding), constant_values=-1).astype(np.int32),
        bias=np.sum([one.bias for one in linears], axis=0, dtype=np.float32),
        post_scale=linears[0].post_scale,
    )
