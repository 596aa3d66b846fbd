"""decoder.onnx lives on TensorRT: TensorRT-RTX's parser and builder, which need no GPU, take it.

The plugins are placeholders (tests/fakes/tensorrt_plugins.py): this proves the graph, its types
and shapes and its external weights, and no arithmetic.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from fakes.quantized import quantize_rtn

from edge_rt.model import graph
from edge_rt.model.functions import DOMAIN
from edge_rt.model.gptj import LINEARS, Head, ModelConfig, layer_from_tensors, layer_tensors
from edge_rt.quant import store
from edge_rt.quant.layer import QuantizedLayer

SCRIPT = Path(__file__).parent.parent / "fakes" / "tensorrt_plugins.py"
TIMEOUT_S = 120

pytestmark = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("tensorrt_rtx_bindings", "tensorrt_rtx_libs")
    ),
    reason="TensorRT-RTX is not installed: pip install edge-rt[test-tensorrt]",
)

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "gptj",
        "n_embd": 96,
        "n_layer": 2,
        "n_head": 3,
        "rotary_dim": 8,
        "vocab_size": 101,
        "n_positions": 256,
    }
)

Built = tuple[Path, dict[str, Any]]
Weights = Literal["int4", "int4-without-salient", "float"]


def write_random(directory: Path, weights: Weights) -> Path:
    """A decoder.onnx of random weights; 96 inputs in groups of 128 also need padding."""
    rng = np.random.default_rng(0)

    def tensor(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    for index in range(CONFIG.n_layer):
        shapes = layer_tensors(CONFIG)
        layer = layer_from_tensors({name: tensor(*shape) for name, shape in shapes.items()})
        quantized = {}
        for name, linear in layer.linears.items():
            salient = np.arange(0 if weights == "int4-without-salient" else 3, dtype=np.int32)
            quantized[name] = quantize_rtn(linear.weight, salient, 128, linear.bias)
        made = QuantizedLayer(layer, {} if weights == "float" else quantized, [])
        store.save_layer(directory, index, made)
    width, vocab = CONFIG.n_embd, CONFIG.vocab_size
    head = Head(tensor(width), tensor(width), tensor(vocab, width), tensor(vocab))
    embedding = tensor(vocab, width)
    if weights != "float":
        embedding = embedding.astype(np.float16)
    head_weight = head.weight if weights == "float" else head.weight.astype(np.float16)
    store.save_outer(directory, embedding, head, head_weight, CONFIG)
    return graph.write_decoder(directory, CONFIG)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the parser finds `libtensorrt_rtx.so`: the wheel ships it as `.so.1` only."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    assert spec is not None
    assert spec.submodule_search_locations
    links = tmp_path_factory.mktemp("tensorrt")
    for library in Path(spec.submodule_search_locations[0]).glob("*.so.*"):
        (links / library.name.partition(".so.")[0]).with_suffix(".so").symlink_to(library)
    paths = [str(links), os.environ.get("LD_LIBRARY_PATH", "")]
    return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}


def run(decoder: Path, environment: dict[str, str]) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(decoder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
    )
    assert result.returncode == 0, f"ended with {result.returncode}: {result.stderr[-2000:]}"
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.fixture(scope="module", params=["int4", "int4-without-salient", "float", "demo"])
def built(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    environment: dict[str, str],
) -> Built:
    """A decoder.onnx and what TensorRT made of it."""
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "demo":
        decoder = request.getfixturevalue("demo_quantized") / graph.FILE
    else:
        decoder = write_random(directory, request.param)
    return decoder, run(decoder, environment)


def load(decoder: Path) -> onnx.ModelProto:
    return onnx.load(decoder, load_external_data=False)


def digests(decoder: Path) -> dict[str, str]:
    """Initializer -> SHA-256 of its bytes in the safetensors file."""
    files = {path.name: path.read_bytes() for path in decoder.parent.glob("*.safetensors")}
    found = {}
    for tensor in load(decoder).graph.initializer:
        where = {entry.key: entry.value for entry in tensor.external_data}
        if where:  # a linear without salient channels has weights of no bytes
            start = int(where["offset"])
            content = files[where["location"]][start : start + int(where["length"])]
            found[tensor.name] = hashlib.sha256(content).hexdigest()
    return found


def test_parses_and_builds_with_two_profiles(built: Built) -> None:
    _, report = built
    assert report["parser_errors"] == []
    assert report["parsed"]
    assert report["errors"] == []
    assert report["plan_bytes"] > 0
    assert report["profiles"] == 2


def test_every_op_of_ours_becomes_its_plugin(built: Built) -> None:
    decoder, report = built
    nodes = [node for node in load(decoder).graph.node if node.domain == DOMAIN]
    assert report["created"] == sorted([node.op_type, node.name] for node in nodes)
    # The builder offers each plugin the shapes of each profile.
    counts = Counter(node.op_type for node in nodes)
    assert set(report["configured"]) == set(counts)
    assert all(report["configured"][op] >= 2 * count for op, count in counts.items())


def test_the_graphs_hold_what_they_are_here_for(
    built: Built, request: pytest.FixtureRequest
) -> None:
    counts = Counter(op for op, _ in built[1]["created"])
    is_float = request.node.callspec.params["built"] == "float"
    assert counts["RopeAttention"] > 0
    assert counts["W4Linear"] == (0 if is_float else len(LINEARS) * counts["RopeAttention"])
    assert counts["HeadLogits"] == 1


def test_caches_are_updated_in_place(built: Built) -> None:
    decoder, report = built
    outputs = {x.name for x in load(decoder).graph.output} - {"logits"}
    assert report["aliases"] == {name: name.replace("_out.", "_cache.") for name in outputs}
    # The builder did take the declaration seriously: it refuses where the feature is off.
    assert report["without_aliasing"]["refused"]
    assert "ALIASED_PLUGIN_IO" in report["without_aliasing"]["errors"][0]


def test_inputs_and_outputs_are_the_graphs_own(built: Built) -> None:
    decoder, report = built
    model = load(decoder).graph
    expected = {}
    for value in [*model.input, *model.output]:
        tensor = value.type.tensor_type
        shape = [-1 if size.dim_param else size.dim_value for size in tensor.shape.dim]
        kind = onnx.TensorProto.DataType.Name(tensor.elem_type)
        expected[value.name] = {"type": kind, "shape": shape}
    assert report["tensors"] == expected


def test_weights_are_the_bytes_of_the_safetensors_files(built: Built) -> None:
    decoder, report = built
    expected = digests(decoder)
    actual = {name: digest for name, digest in report["constants"].items() if name in expected}
    assert actual == expected


def test_uint8_weights_must_be_declared_int8(built: Built) -> None:
    """Why the build rewrites their type: as written, the parser widens each byte to int32."""
    decoder, report = built
    linears = [node.name for node in load(decoder).graph.node if node.op_type == "W4Linear"]
    assert report["as_written"]["parsed"]
    for name in linears:
        for part in ("qweight", "zeros"):
            position = 1 + graph.W4_INPUTS.index(part)
            assert report["as_written"]["plugin_inputs"][name][position] == "INT32"
            assert report["plugin_inputs"][name][position] == "INT8"
