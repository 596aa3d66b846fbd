"""What only tests need of the quantizer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_rt.model.gptj import F32, forward_head, forward_layer
from edge_rt.quant.grid import fit
from edge_rt.quant.pack import I32, QMAX, QuantizedLinear, pack
from edge_rt.quant.store import QuantizedCheckpoint


def quantize_rtn(
    weight: F32,
    salient: I32,
    group_size: int,
    bias: F32 | None = None,
) -> QuantizedLinear:
    """Round `weight` [N, K] to the nearest INT4 level, asymmetric in groups along the input.

    The columns `salient` stay in FP16.
    """
    channels = salient.tolist()
    grid = fit(weight.T, channels, group_size, QMAX)
    rounded = grid.rounded(weight.T, channels)
    return pack(rounded.T, grid, salient, bias)


def reference_logits(checkpoint: QuantizedCheckpoint, tokens: npt.NDArray[np.int64]) -> F32:
    """Logits [sequences, tokens, vocab] of the dequantized float32 reference."""
    config = checkpoint.info.model
    hidden = checkpoint.embedding()[tokens]
    for index in range(config.n_layer):
        hidden = forward_layer(hidden, checkpoint.layer(index), config)
    logits: F32 = forward_head(hidden, checkpoint.head(), config)
    return logits
