"""Which linears of a decoder are computed together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from edge_rt.build.ort import write_model
from edge_rt.build.products import Products
from edge_rt.model import graph
from edge_rt.quant.pack import QuantizedLinear
from edge_rt.quant.pipeline import quantize
from edge_rt.recipes import OrtOptions


def products_of(quantized: Path, out: Path) -> list[str]:
    """The INT4 products of the engine's model, by the names of their outputs."""
    out.mkdir()
    write_model(quantized, out, OrtOptions(head_bits=16))
    model = onnx.load(str(out / "model.onnx"), load_external_data=False)
    return [node.output[0] for node in model.graph.node if node.op_type == "MatMulNBits"]


def test_a_layer_is_two_products(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path
) -> None:
    quantize(random_gptj(64, 2, 16), tmp_path / "q", recipe("rtn", 64))
    assert products_of(tmp_path / "q", tmp_path / "b") == [
        "h.0.attn_qkv+h.0.mlp_fc_in.int4",
        "h.0.branches.int4",
        "h.1.attn_qkv+h.1.mlp_fc_in.int4",
        "h.1.branches.int4",
    ]


def test_groups_that_reach_across_inputs_are_left_apart(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path
) -> None:
    quantize(random_gptj(80, 2, 12), tmp_path / "q", recipe("rtn", 64))
    assert products_of(tmp_path / "q", tmp_path / "b")[:3] == [
        "h.0.attn_qkv+h.0.mlp_fc_in.int4",
        "h.0.attn_out.int4",
        "h.0.mlp_fc_out.int4",
    ]


def linear(rows: int, groups: int) -> QuantizedLinear:
    return QuantizedLinear(
        qweight=np.zeros((rows, 16 * groups), np.uint8),
        scales=np.ones((rows, groups), np.float16),
        zeros=np.zeros((rows, groups), np.uint8),
        w_salient=np.zeros((rows, 0), np.float16),
        idx=np.zeros(0, np.int32),
        bias=np.zeros(rows, np.float32),
        post_scale=np.ones(rows, np.float32),
    )


@pytest.mark.parametrize(
    ("gelu_from", "also_read", "is_total"),
    [(-1, False, True), (0, False, False), (-1, True, False)],
)
def test_only_what_nothing_else_reads_is_added_in_the_product(
    gelu_from: int, also_read: bool, is_total: bool
) -> None:
    def w4(x: str, y: str, gelu_from: int) -> onnx.NodeProto:
        names = [x, *(f"{y}.{part}" for part in graph.W4_INPUTS)]
        node = helper.make_node("W4Linear", names, [y], name=y, domain="edge_rt")
        node.attribute.append(helper.make_attribute("gelu_from", gelu_from))
        return node

    nodes = [w4("a", "x", -1), w4("b", "y", gelu_from), helper.make_node("Add", ["x", "y"], ["z"])]
    nodes[-1].name = "sum"
    if also_read:
        nodes.append(helper.make_node("Neg", ["x"], ["w"], name="other"))
    found = Products(
        helper.make_graph(nodes, "g", [], []), lambda _node: linear(8, 2), {"a": 64, "b": 64}
    )
    assert found.covers(nodes[2]) == is_total
    places = [node.name for node in nodes if found.at(node) is not None]
    assert places == (["sum"] if is_total else ["x", "y"])
