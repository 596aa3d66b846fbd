"""Each op, run by ONNX's reference evaluator, against its plain float64 formulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from edge_rt.model import functions
from edge_rt.quant.pack import pack_nibbles

RNG = np.random.default_rng(0)


def evaluate(
    op: str, inputs: dict[str, np.ndarray], outputs: list[str], **attributes: Any
) -> list[np.ndarray]:
    node = helper.make_node(op, list(inputs), outputs, domain=functions.DOMAIN, **attributes)
    infos = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
        )
        for name, value in inputs.items()
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    model = helper.make_model(
        helper.make_graph([node], op, infos, results),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(functions.DOMAIN, 1)],
        ir_version=10,
    )
    found: list[np.ndarray] = ReferenceEvaluator(functions.attach(model)).run(None, inputs)
    return found


def gelu64(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("gelu_from", [-1, 0, 5])
@pytest.mark.parametrize("salient", [0, 3])
@pytest.mark.parametrize("k", [64, 44])
def test_w4_linear(gelu_from: int, salient: int, k: int) -> None:
    n, group = 11, 32
    groups = -(-k // group)
    q = RNG.integers(0, 16, (n, groups * group)).astype(np.uint8)
    zeros = RNG.integers(0, 16, (n, groups)).astype(np.uint8)
    scales = RNG.uniform(0.01, 0.1, (n, groups)).astype(np.float16)
    columns = 16 if salient else 0
    idx = np.full(columns, -1, np.int32)
    idx[:salient] = [2, 17, k - 1][:salient]
    w_salient = np.zeros((n, columns), np.float16)
    w_salient[:, :salient] = RNG.normal(size=(n, salient))
    bias, post_scale = RNG.normal(size=(2, n)).astype(np.float32)
    x = RNG.normal(size=(2, 3, k)).astype(np.float32)
    (found,) = evaluate(
        "W4Linear",
        {
            "x": x,
            "qweight": pack_nibbles(q),
            "scales": scales,
            "zeros": zeros,
            "w_salient": w_salient,
            "idx": idx,
            "bias": bias,
            "post_scale": post_scale,
        },
        ["y"],
        gelu_from=gelu_from,
    )
    weight = np.zeros((n, k))
    for column in range(k):
        g = column // group
        weight[:, column] = (q[:, column].astype(float) - zeros[:, g]) * scales[:, g].astype(float)
    for position in range(salient):
        weight[:, idx[position]] += w_salient[:, position]
    y = x.astype(np.float64) @ weight.T + bias
    if gelu_from >= 0:
        y[..., gelu_from:] = gelu64(y[..., gelu_from:])
    np.testing.assert_allclose(found, y * post_scale, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("head", "rotary"), [(8, 4), (8, 8), (6, 2)])
@pytest.mark.parametrize("past", [(0, 0), (3, 5)])
def test_rope_attention(head: int, rotary: int, past: tuple[int, int]) -> None:
    batch, tokens, heads, capacity = 2, 3, 2, 9
    past_lens = np.array(past, np.int32)
    qkv = RNG.normal(size=(batch, tokens, 3 * heads * head)).astype(np.float32)
    k_cache, v_cache = RNG.normal(size=(2, batch, heads, capacity, head)).astype(np.float32)
    angle = np.outer(np.arange(capacity), 10000.0 ** -(np.arange(0, rotary, 2) / rotary))
    y, k_out, v_out = evaluate(
        "RopeAttention",
        {
            "qkv": qkv,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "past_lens": past_lens,
            "cos": np.cos(angle).astype(np.float32),
            "sin": np.sin(angle).astype(np.float32),
        },
        ["y", "k_out", "v_out"],
        num_heads=heads,
    )

    def turned(vector: np.ndarray, position: int) -> np.ndarray:
        out = vector.astype(np.float64)
        for i in range(rotary // 2):
            c, s = np.cos(angle[position, i]), np.sin(angle[position, i])
            a, b = vector[2 * i], vector[2 * i + 1]
            out[2 * i], out[2 * i + 1] = a * c - b * s, b * c + a * s
        return out

    split = qkv.reshape(batch, tokens, 3, heads, head)
    for b in range(batch):
        for h in range(heads):
            keys, values = k_cache[b, h].astype(np.float64), v_cache[b, h].astype(np.float64)
            for t in range(tokens):
                keys[past[b] + t] = turned(split[b, t, 1, h], past[b] + t)
                values[past[b] + t] = split[b, t, 2, h]
            np.testing.assert_allclose(k_out[b, h], keys, atol=1e-5)
            np.testing.assert_allclose(v_out[b, h], values, atol=1e-5)
            for t in range(tokens):
                seen = past[b] + t + 1
                scores = keys[:seen] @ turned(split[b, t, 0, h], past[b] + t) / np.sqrt(head)
                weights = np.exp(scores - scores.max())
                expected = weights @ values[:seen] / weights.sum()
                found = y[b, t].reshape(heads, head)[h]
                np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("head", "rotary"), [(8, 4), (12, 12), (6, 2)])
def test_rotate_turns_complex_numbers(head: int, rotary: int) -> None:
    x = RNG.normal(size=(2, 3, 4, head)).astype(np.float32)
    angle = RNG.uniform(-9, 9, (2, 3, rotary // 2))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    (found,) = evaluate("Rotate", {"x": x, "cos": cos, "sin": sin}, ["y"])
    pairs = x[..., :rotary].astype(np.float64).reshape(2, 3, 4, -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)[:, :, None]
    expected = x.astype(np.float64)
    expected[..., 0:rotary:2], expected[..., 1:rotary:2] = turned.real, turned.imag
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_gelu_tanh() -> None:
    x = np.r_[np.linspace(-12, 12, 97), 0.0].astype(np.float32)
    (found,) = evaluate("GeluTanh", {"x": x}, ["y"])
    np.testing.assert_allclose(found, gelu64(x.astype(np.float64)), atol=1e-6, rtol=1e-6)


def test_head_logits() -> None:
    x, bias = RNG.normal(size=(3, 8)).astype(np.float32), RNG.normal(size=5).astype(np.float32)
    weight = RNG.normal(size=(5, 8)).astype(np.float16)
    (found,) = evaluate("HeadLogits", {"x": x, "weight": weight, "bias": bias}, ["logits"])
    expected = x.astype(np.float64) @ weight.astype(np.float64).T + bias
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_every_definition_uses_standard_operators_only() -> None:
    empty = helper.make_model(helper.make_graph([], "empty", [], []))
    own = {f.name for f in functions.attach(empty).functions}
    for function in functions.attach(empty).functions:
        for node in function.node:
            assert node.domain in {"", functions.DOMAIN}
            if node.domain == "":
                onnx.defs.get_schema(node.op_type, functions.OPSET)
            else:
                assert node.op_type in own
