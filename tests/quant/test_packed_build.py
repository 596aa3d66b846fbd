"""Packed checkpoints that leave some modules in float, through the CPU engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from fakes.checks import engine_logits
from fakes.packed import ACT, FC_OUT, Make, leave_float
from fakes.quantized import reference_logits

from edge_rt.build import ort
from edge_rt.core import Limits
from edge_rt.quant.pipeline import quantize
from edge_rt.quant.store import QuantizedCheckpoint
from edge_rt.recipes import OrtOptions
from edge_rt.runtime.ort import OrtRunner

FC_IN = "transformer.h.1.mlp.fc_in"
OUT_PROJ = "transformer.h.1.attn.out_proj"
LIMITS = Limits(4, 4, 64, 16, 4, 64, 64, 3072)


@pytest.mark.parametrize("left", [(FC_IN,), (FC_OUT,), (OUT_PROJ,), (OUT_PROJ, FC_OUT)], ids=str)
@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_the_engine_computes_a_layer_that_is_partly_float(
    make: Make, demo_checkpoint: Path, tmp_path: Path, kind: str, left: tuple[str, ...]
) -> None:
    packed = make(kind)
    shutil.copy(demo_checkpoint / "tokenizer.json", packed.directory)
    for module in left:
        leave_float(packed, module)
    if kind == "awq" and FC_IN not in left:  # what follows GELU is scaled
        packed.tensors[ACT] = np.linspace(0.5, 2, 256, dtype=np.float16)
    quantize(packed.write(), tmp_path / "q", "int4")
    (tmp_path / "b").mkdir()
    options = OrtOptions(accuracy_level=0)
    ort.write_model(tmp_path / "q", tmp_path / "b", options)
    engine = OrtRunner(tmp_path / "b" / ort.MODEL_FILE, LIMITS, options)
    tokens = np.random.default_rng(3).integers(0, 3072, (2, 20))
    expected = reference_logits(QuantizedCheckpoint.open(tmp_path / "q"), tokens)[:, 11:]
    assert np.abs(engine_logits(engine, tokens, 12) - expected).max() <= 1e-4
