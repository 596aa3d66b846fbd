"""decoder.onnx, run by ONNX's reference evaluator, against the NumPy reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from fakes.quantized import reference_logits
from onnx.reference import ReferenceEvaluator

from edge_rt.model import functions, graph
from edge_rt.quant.pipeline import quantize
from edge_rt.quant.store import QuantizedCheckpoint


@pytest.mark.parametrize("method", ["float", "rtn"])
@pytest.mark.parametrize("sizes", [(64, 2, 16), (80, 2, 12)], ids=str)
def test_equals_the_numpy_reference(
    random_gptj: Callable[..., Path],
    recipe: Callable[..., str],
    tmp_path: Path,
    method: str,
    sizes: tuple[int, int, int],
) -> None:
    out = tmp_path / "quantized"
    quantize(random_gptj(*sizes), out, recipe(method))
    tokens = np.random.default_rng(1).integers(0, 3072, (2, 20))
    expected = reference_logits(QuantizedCheckpoint.open(out), tokens)

    model = functions.attach(onnx.load(str(out / graph.FILE)))
    evaluator = ReferenceEvaluator(model)
    names = [output.name for output in model.graph.output]
    n_embd, heads, _ = sizes
    empty = np.full((2, heads, 24, n_embd // heads), 7.0, np.float32)  # stale, never to be seen
    caches = {f"{kind}_cache.{layer}": empty for layer in range(2) for kind in "kv"}
    # The rows are of different lengths: row 0 has 5 tokens cached, row 1 has 9.
    past = np.zeros(2, np.int32)
    for upto in ((5, 9), (12, 16), (13, 17)):
        count = upto[0] - past[0]
        step = np.stack([tokens[row, past[row] : upto[row]][:count] for row in range(2)])
        if not past.any():  # the first call: row 1's extra tokens go alone
            feeds = {"input_ids": tokens[:, :9].astype(np.int32), "past_lens": past}
            feeds["last_idx"] = np.array([[4], [8]], np.int64)
        else:
            feeds = {"input_ids": step.astype(np.int32), "past_lens": past}
            feeds["last_idx"] = np.full((2, 1), count - 1, np.int64)
        found = dict(zip(names, evaluator.run(None, feeds | caches), strict=True))
        for row in range(2):
            difference = found["logits"][row] - expected[row, upto[row] - 1]
            assert np.abs(difference).max() <= 1e-4
        caches = {n.replace("_out", "_cache"): v for n, v in found.items() if n != "logits"}
        past = np.array(upto, np.int32)


def test_the_demo_equals_the_numpy_reference(demo_quantized: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 3072, (1, 9))
    evaluator = ReferenceEvaluator(functions.attach(onnx.load(str(demo_quantized / graph.FILE))))
    empty = np.zeros((1, 6, 9, 64), np.float32)
    feeds = {f"{kind}_cache.{layer}": empty for layer in range(4) for kind in "kv"}
    feeds |= {"input_ids": tokens.astype(np.int32), "past_lens": np.zeros(1, np.int32)}
    feeds["last_idx"] = np.array([[8]], np.int64)
    found = evaluator.run(["logits"], feeds)[0]
    expected = reference_logits(QuantizedCheckpoint.open(demo_quantized), tokens)[:, -1]
    assert np.abs(found - expected).max() <= 1e-4


def test_the_file_is_small_and_defines_nothing(demo_quantized: Path) -> None:
    path = demo_quantized / graph.FILE
    model = onnx.load(str(path), load_external_data=False)
    onnx.checker.check_model(str(path))
    assert path.stat().st_size < 100_000
    assert not model.functions
    own = {node.op_type for node in model.graph.node if node.domain == functions.DOMAIN}
    assert own == {"W4Linear", "RopeAttention", "HeadLogits"}


def test_every_initializer_is_what_the_safetensors_hold(demo_quantized: Path) -> None:
    from safetensors.numpy import load_file

    stored = {}
    for file in demo_quantized.glob("*.safetensors"):
        stored.update(load_file(file))
    model = onnx.load(str(demo_quantized / graph.FILE))
    for tensor in model.graph.initializer:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), stored[tensor.name])
