"""decoder.onnx -> an ONNX Runtime model: edge_rt nodes become com.microsoft ones.

A product of W4Linears (see products.py) becomes MatMulNBits over all input channels but the salient
ones, plus a float32 product over those: under int8 activations a salient channel would stretch the
range of its whole block. The head becomes MatMulNBits of 8 bits, or a float32 product.
RopeAttention becomes GroupQueryAttention, which appends to the caches in place where the runner
binds input and output to the same memory.

Inputs of model.onnx: `input_ids` int32 [batch, tokens]; `seqlens_k` int32 [batch], each row's
filled positions after this step less one; `total_len` int32 [1], the largest of them plus one;
`last_idx` int64 [batch, 1]; the caches, as in decoder.onnx; `position_ids` int64 [batch, tokens]
only where GroupQueryAttention cannot rotate the heads itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from tqdm import tqdm

from edge_rt.build.blocks import repack, round_to_8_bits
from edge_rt.build.products import Product, Products, attribute
from edge_rt.build.weights import WEIGHTS_FILE, Weights
from edge_rt.bundle import Tolerance
from edge_rt.errors import ConfigError
from edge_rt.model import functions, graph
from edge_rt.quant.pack import QuantizedLinear
from edge_rt.recipes import OrtOptions
from edge_rt.runtime.ort import MODEL_FILE

MS = "com.microsoft"

# The oldest version that runs this graph in our tests: the newest there is for JetPack 6.
OLDEST_RUNTIME = "1.23.2"
# Products in float32 differ by rounding only, others by what int8 loses.
_EXACT, _INT8 = Tolerance(1e-3, 1e-6), Tolerance(1.0, 0.002)

# GroupQueryAttention's limits on the CPU: for any head, and for heads that it rotates itself.
_GQA_HEAD_MULTIPLE = 8
_GQA_ROTARY_MULTIPLE = 16

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]


def tolerance(options: OrtOptions) -> Tolerance:
    """How far the engine's logits may be off."""
    return _EXACT if options.is_float else _INT8


def write_model(quantized: Path, out: Path, options: OrtOptions) -> None:
    """Write model.onnx and weights.bin into `out` from the quantized checkpoint `quantized`."""
    decoder = onnx.load(str(quantized / graph.FILE), load_external_data=False)
    with (out / WEIGHTS_FILE).open("wb") as weights:
        model = _Rewriter(decoder, quantized, Weights(weights), options).model()
    (out / MODEL_FILE).write_bytes(model.SerializeToString())


@dataclass(frozen=True, slots=True)
class _Value:
    """The tensor that stands for an activation, and what it is still to be multiplied by.

    A product takes the factors along with those that single out its salient channels.
    """

    name: str
    scale: F32 | None = None


class _Rewriter:
    def __init__(
        self, decoder: onnx.ModelProto, source: Path, weights: Weights, options: OrtOptions
    ) -> None:
        self._decoder = decoder.graph
        self._source = source
        self._weights = weights
        self._options = options
        self._stored = {tensor.name: tensor for tensor in decoder.graph.initializer}
        self._widths = {
            value.name: value.type.tensor_type.shape.dim[-1].dim_value
            for value in decoder.graph.value_info
        }
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._products = Products(decoder.graph, self._linear, self._widths)
        self._values: dict[str, _Value] = {}
        self._needs_positions = False

    def model(self) -> onnx.ModelProto:
        rewrite = {"RopeAttention": self._rope_attention, "HeadLogits": self._head_logits}
        for node in tqdm(self._decoder.node, desc="build", unit=" node", leave=False, disable=None):
            if self._products.covers(node):
                if (product := self._products.at(node)) is not None:
                    self._product(product)
            elif node.domain == functions.DOMAIN:
                rewrite[node.op_type](node)
            else:
                self._keep(node)
        rewritten = helper.make_graph(
            self._nodes,
            self._decoder.name,
            list(self._inputs()),
            self._decoder.output,
            list(self._initializers.values()),
        )
        opsets = [helper.make_opsetid("", functions.OPSET), helper.make_opsetid(MS, 1)]
        return helper.make_model(
            rewritten, opset_imports=opsets, ir_version=10, producer_name="edge_rt"
        )

    def _inputs(self) -> Iterator[onnx.ValueInfoProto]:
        info = helper.make_tensor_value_info
        for value in self._decoder.input:
            if value.name != "past_lens":
                yield value
        yield info("seqlens_k", TensorProto.INT32, ["batch"])
        yield info("total_len", TensorProto.INT32, [1])
        if self._needs_positions:
            yield info("position_ids", TensorProto.INT64, ["batch", "tokens"])

    def _keep(self, node: onnx.NodeProto) -> None:
        kept = onnx.NodeProto()
        kept.CopyFrom(node)
        for place, name in enumerate(node.input):
            if name in self._stored:
                self._constant(name, self._array(name))
            else:
                kept.input[place] = self._value(name)
        self._nodes.append(kept)

    def _linear(self, node: onnx.NodeProto) -> QuantizedLinear:
        return QuantizedLinear.from_tensors(
            dict(zip(graph.W4_INPUTS, map(self._array, node.input[1:]), strict=True))
        )

    def _product(self, product: Product) -> None:
        linear, nodes = product.load(self._linear), product.nodes
        if product.total is not None:
            output = product.total.output[0]
            self._values[output] = _Value(self._sum(product, linear, output))
            return
        names = [node.output[0] for node in nodes]
        sums = [self._sum(product, linear, "+".join(names))]
        rows = [self._stored[node.input[1]].dims[0] for node in nodes]
        if len(nodes) > 1:
            sizes = self._constant(f"{sums[0]}.sizes", np.array(rows, np.int64))
            parts = [f"{name}.sum" for name in names]
            self._nodes.append(helper.make_node("Split", [sums[0], sizes], parts, axis=-1))
            sums = parts
        ends = np.cumsum(rows)
        for node, y, count, end in zip(nodes, sums, rows, ends, strict=True):
            name = node.output[0]
            is_gelu = attribute(node, "gelu_from") == 0  # all outputs or none, in decoder.onnx
            made = self._emit("FastGelu", [y], f"{name}.gelu", domain=MS) if is_gelu else y
            self._values[name] = _Value(made, linear.post_scale[end - count : end])

    def _inputs_of(self, product: Product) -> _Value:
        """What the product reads; the inputs of a sum stand one behind the other."""
        names = [node.input[0] for node in product.nodes]
        values = [self._values.get(name, _Value(name)) for name in names]
        if product.total is None:
            return values[0]
        x = self._emit("Concat", [value.name for value in values], f"{names[-1]}.all", axis=-1)
        scales = [
            np.ones(features, np.float32) if value.scale is None else value.scale
            for value, features in zip(values, product.in_features, strict=True)
        ]
        return _Value(x, np.concatenate(scales))

    def _sum(self, product: Product, linear: QuantizedLinear, name: str) -> str:
        """The sum of the product with INT4 weights and that of the salient channels in float32.

        A salient channel is zero in the first, where the activations are quantized.
        """
        x = self._inputs_of(product)
        salient, k = linear.salient, sum(product.in_features)
        factors = np.ones(k, np.float32) if x.scale is None else x.scale.copy()
        w_salient = linear.w_salient[:, : len(salient)].astype(np.float32) * factors[salient]
        factors[salient] = 0.0
        main = x.name
        if (factors != 1.0).any():
            keep = self._constant(f"{name}.factors", factors)
            main = self._emit("Mul", [x.name, keep], f"{name}.main")
        y = self._int4(main, linear, k, name)
        if len(salient):
            idx = self._constant(f"{name}.idx", salient.astype(np.int64))
            outliers = self._emit("Gather", [x.name, idx], f"{name}.outliers", axis=-1)
            weight = self._constant(f"{name}.w_salient", w_salient.T)
            tail = self._emit("MatMul", [outliers, weight], f"{name}.fp16")
            y = self._emit("Add", [y, tail], f"{name}.sum")
        return y

    def _int4(self, x: str, linear: QuantizedLinear, in_features: int, name: str) -> str:
        levels, scales, zeros = repack(linear, in_features, self._options.block_size)
        inputs = [
            x,
            self._constant(f"{name}.levels", levels),
            self._constant(f"{name}.scales", scales),
            self._constant(f"{name}.zeros", zeros),
        ]
        if linear.bias.any():
            inputs += ["", self._constant(f"{name}.bias", linear.bias)]
        return self._nbits(inputs, f"{name}.int4", in_features, len(scales), bits=4)

    def _nbits(self, inputs: list[str], output: str, k: int, n: int, bits: int) -> str:
        return self._emit(
            "MatMulNBits",
            inputs,
            output,
            domain=MS,
            K=k,
            N=n,
            bits=bits,
            block_size=self._options.block_size,
            accuracy_level=self._options.accuracy_level,
        )

    def _value(self, name: str) -> str:
        """The tensor that is the activation `name` of decoder.onnx."""
        found = self._values.get(name, _Value(name))
        if found.scale is None or (found.scale == 1.0).all():
            return found.name
        scale = self._constant(f"{name}.post_scale", found.scale)
        self._values[name] = _Value(self._emit("Mul", [found.name, scale], f"{name}.scaled"))
        return self._values[name].name

    def _rope_attention(self, node: onnx.NodeProto) -> None:
        qkv, k_cache, v_cache, _past_lens, cos, sin = node.input
        qkv = self._value(qkv)
        heads = attribute(node, "num_heads")
        head = self._widths[node.output[0]] // heads
        rotary = 2 * int(self._stored[cos].dims[1])
        tables = [self._constant(name, self._array(name)) for name in (cos, sin)]
        if head % _GQA_HEAD_MULTIPLE:
            raise ConfigError(
                f"the ort engine takes head sizes that are a multiple of {_GQA_HEAD_MULTIPLE}, "
                f"this checkpoint's heads have {head}"
            )
        if head % _GQA_ROTARY_MULTIPLE or rotary % _GQA_ROTARY_MULTIPLE:
            inputs = [*self._rotated(qkv, tables, heads, rotary), "", ""]
            do_rotary = 0
        else:
            inputs = [qkv, "", "", *tables]
            do_rotary = 1
        q, k, v, *tables = inputs
        self._nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [q, k, v, k_cache, v_cache, "seqlens_k", "total_len", *tables],
                node.output,
                name=node.name,
                domain=MS,
                num_heads=heads,
                kv_num_heads=heads,
                do_rotary=do_rotary,
                rotary_interleaved=do_rotary,
            )
        )

    def _rotated(self, qkv: str, tables: list[str], heads: int, rotary: int) -> list[str]:
        """Queries, keys and values apart, the first two rotated by an op without size limits."""
        self._needs_positions = True
        parts = [f"{qkv}.{part}" for part in "qkv"]
        self._nodes.append(
            helper.make_node("Split", [qkv], parts, name=f"{qkv}.split", axis=-1, num_outputs=3)
        )
        for i in (0, 1):
            parts[i] = self._emit(
                "RotaryEmbedding",
                [parts[i], "position_ids", *tables],
                f"{parts[i]}.rotated",
                domain=MS,
                interleaved=1,
                num_heads=heads,
                rotary_embedding_dim=rotary,
            )
        return parts

    def _head_logits(self, node: onnx.NodeProto) -> None:
        x, weight, bias = node.input
        x, weights = self._value(x), self._array(weight).astype(np.float32)
        bias = self._constant(bias, self._array(bias))
        if self._options.rounds_head:
            levels, scales = round_to_8_bits(weights, self._options.block_size)
            inputs = [x, self._constant(f"{weight}.levels", levels)]
            inputs += [self._constant(f"{weight}.scales", scales), "", "", bias]
            self._nbits(inputs, node.output[0], weights.shape[1], weights.shape[0], bits=8)
        else:
            product = [x, self._constant(weight, weights.T)]
            y = self._emit("MatMul", product, f"{node.name}.product")
            self._emit("Add", [y, bias], node.output[0])

    def _emit(
        self, op: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any
    ) -> str:
        self._nodes.append(
            helper.make_node(op, inputs, [output], name=output, domain=domain, **attributes)
        )
        return output

    def _constant(self, name: str, array: Array) -> str:
        if name not in self._initializers:
            self._initializers[name] = self._weights.tensor(name, array)
        return name

    def _array(self, name: str) -> Array:
        """The tensor that decoder.onnx calls `name`, mapped from its safetensors file."""
        tensor = self._stored[name]
        if not external_data_helper.uses_external_data(tensor):
            return numpy_helper.to_array(tensor)
        where = external_data_helper.ExternalDataInfo(tensor)
        return np.memmap(
            self._source / where.location,
            dtype=helper.tensor_dtype_to_np_dtype(tensor.data_type),
            mode="r",
            offset=where.offset,
            shape=tuple(tensor.dims),
        )
