"""decoder.onnx -> an ONNX Runtime model: edge_rt nodes become com.microsoft ones.

W4Linear becomes MatMulNBits over all input channels but the salient ones, plus a float32 product
over those: under int8 activations a salient channel would stretch the range of its whole block.
RopeAttention becomes GroupQueryAttention, which appends to the caches in place where the runner
binds input and output to the same memory.

Inputs of model.onnx: `input_ids` int32 [batch, tokens]; `seqlens_k` int32 [batch], each row's
filled positions after this step less one; `total_len` int32 [1], the largest of them plus one;
`last_idx` int64 [batch, 1]; the caches, as in decoder.onnx; `position_ids` int64 [batch, tokens]
only where GroupQueryAttention cannot rotate the heads itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from tqdm import tqdm

from edge_rt.bundle import Tolerance
from edge_rt.errors import ConfigError
from edge_rt.model import functions, graph
from edge_rt.quant.pack import QuantizedLinear, pack_nibbles
from edge_rt.recipes import OrtOptions
from edge_rt.runtime.ort import MODEL_FILE

WEIGHTS_FILE = "weights.bin"
MS = "com.microsoft"

# The oldest version that runs this graph in our tests: the newest there is for JetPack 6.
OLDEST_RUNTIME = "1.23.2"
# By accuracy level: float32 products differ by rounding only, int8 activations by what they lose.
TOLERANCES = {0: Tolerance(1e-3, 1e-6), 4: Tolerance(1.0, 0.002)}

_ALIGN_BYTES = 4096  # pages: ONNX Runtime maps external weights instead of reading them
_INLINE_BYTES = 1024
# GroupQueryAttention's limits on the CPU: for any head, and for heads that it rotates itself.
_GQA_HEAD_MULTIPLE = 8
_GQA_ROTARY_MULTIPLE = 16

Array = npt.NDArray[Any]


def write_model(quantized: Path, out: Path, options: OrtOptions) -> None:
    """Write model.onnx and weights.bin into `out` from the quantized checkpoint `quantized`."""
    decoder = onnx.load(str(quantized / graph.FILE), load_external_data=False)
    with (out / WEIGHTS_FILE).open("wb") as weights:
        model = _Rewriter(decoder, quantized, _Weights(weights), options).model()
    (out / MODEL_FILE).write_bytes(model.SerializeToString())


def repack(
    linear: QuantizedLinear, in_features: int, block_size: int
) -> tuple[Array, Array, Array]:
    """INT4 groups as MatMulNBits blocks, the same weights to the bit.

    Returns levels uint8 [N, blocks, block_size / 2], scales float32 [N, blocks] and zero points
    uint8 [N, ceil(blocks / 2)], two to a byte.
    """
    if linear.group_size % block_size:
        raise ConfigError(
            f"ort.block_size {block_size} does not divide the checkpoint's group size "
            f"{linear.group_size}; set it to a divisor in the engine recipe"
        )
    n = linear.scales.shape[0]
    blocks = -(-in_features // block_size)
    levels = linear.qweight.reshape(n, -1, block_size // 2)[:, :blocks]
    per_group = linear.group_size // block_size
    scales = np.repeat(linear.scales.astype(np.float32), per_group, axis=1)[:, :blocks]
    zeros = np.repeat(linear.zeros, per_group, axis=1)[:, :blocks]
    zeros = np.pad(zeros, ((0, 0), (0, blocks % 2)))
    return levels, scales, pack_nibbles(zeros)


class _Weights:
    """weights.bin, written front to back; each tensor is released once it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def tensor(self, name: str, array: Array) -> TensorProto:
        """An initializer: small ones inline, others in the file."""
        array = np.ascontiguousarray(array)
        if array.nbytes < _INLINE_BYTES:
            return numpy_helper.from_array(array, name)
        self._file.write(b"\0" * (-self._file.tell() % _ALIGN_BYTES))
        tensor = TensorProto(
            name=name,
            dims=array.shape,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (
            ("location", WEIGHTS_FILE),
            ("offset", self._file.tell()),
            ("length", array.nbytes),
        ):
            tensor.external_data.add(key=key, value=str(value))
        array.tofile(self._file)
        return tensor


class _Rewriter:
    def __init__(
        self, decoder: onnx.ModelProto, source: Path, weights: _Weights, options: OrtOptions
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
        self._split: dict[str, tuple[str, str]] = {}
        self._needs_positions = False

    def model(self) -> onnx.ModelProto:
        rewrite = {
            "W4Linear": self._w4_linear,
            "RopeAttention": self._rope_attention,
            "HeadLogits": self._head_logits,
        }
        for node in tqdm(self._decoder.node, desc="build", unit=" node", leave=False, disable=None):
            if node.domain == functions.DOMAIN:
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
        for name in node.input:
            if name in self._stored:
                self._constant(name, self._array(name))
        self._nodes.append(node)

    def _w4_linear(self, node: onnx.NodeProto) -> None:
        x, *weights = node.input
        linear = QuantizedLinear.from_tensors(
            dict(zip(graph.W4_INPUTS, map(self._array, weights), strict=True))
        )
        name, salient = node.output[0], linear.salient
        in_features = self._widths[x]
        x_main, x_salient = self._split_salient(x, linear, in_features)
        levels, scales, zeros = repack(linear, in_features, self._options.block_size)
        inputs = [
            x_main,
            self._constant(f"{name}.levels", levels),
            self._constant(f"{name}.scales", scales),
            self._constant(f"{name}.zeros", zeros),
        ]
        if linear.bias.any():
            inputs += ["", self._constant(f"{name}.bias", linear.bias)]
        y = self._emit(
            "MatMulNBits",
            inputs,
            f"{name}.int4",
            domain=MS,
            K=in_features,
            N=len(linear.scales),
            bits=4,
            block_size=self._options.block_size,
            accuracy_level=self._options.accuracy_level,
        )
        if len(salient):
            columns = linear.w_salient[:, : len(salient)].astype(np.float32).T
            weight = self._constant(f"{name}.w_salient", columns)
            tail = self._emit("MatMul", [x_salient, weight], f"{name}.fp16")
            y = self._emit("Add", [y, tail], f"{name}.sum")
        if _attribute(node, "gelu_from") == 0:
            y = self._emit("FastGelu", [y], f"{name}.gelu", domain=MS)
        if (linear.post_scale != 1.0).any():
            scale = self._constant(f"{name}.post_scale", linear.post_scale)
            y = self._emit("Mul", [y, scale], f"{name}.scaled")
        self._nodes[-1].output[0] = name

    def _split_salient(self, x: str, linear: QuantizedLinear, in_features: int) -> tuple[str, str]:
        """`x` with its salient channels zeroed, and those channels alone; once for each `x`."""
        if not len(linear.salient):
            return x, ""
        if x not in self._split:
            keep = np.ones(in_features, np.float32)
            keep[linear.salient] = 0.0
            main = self._emit("Mul", [x, self._constant(f"{x}.keep", keep)], f"{x}.main")
            idx = self._constant(f"{x}.idx", linear.salient.astype(np.int64))
            self._split[x] = main, self._emit("Gather", [x, idx], f"{x}.salient", axis=-1)
        return self._split[x]

    def _rope_attention(self, node: onnx.NodeProto) -> None:
        qkv, k_cache, v_cache, _past_lens, cos, sin = node.input
        heads = _attribute(node, "num_heads")
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
        transposed = self._array(weight).astype(np.float32).T
        product = [x, self._constant(weight, transposed)]
        y = self._emit("MatMul", product, f"{node.name}.product")
        self._emit("Add", [y, self._constant(bias, self._array(bias))], node.output[0])

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


def _attribute(node: onnx.NodeProto, name: str) -> Any:
    return next(helper.get_attribute_value(a) for a in node.attribute if a.name == name)
