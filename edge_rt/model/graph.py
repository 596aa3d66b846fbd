"""Writes decoder.onnx: the decoder step as standard ONNX plus the edge_rt ops.

Its weights stay where they are: every initializer points into the safetensors files beside it, so
the graph itself is a few kilobytes at any model size. Activations are float32 at every edge.

Inputs: `input_ids` int32 [batch, tokens]; `past_lens` int32 [batch], the filled positions of each
row's cache; `last_idx` int64 [batch, 1], the token of each row whose logits are wanted; for each
layer l `k_cache.l` and `v_cache.l` float32 [batch, heads, capacity, head]. Outputs: `logits`
float32 [batch, vocab] and the caches with the new tokens appended, `k_out.l` and `v_out.l`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from edge_rt.model.functions import DOMAIN, OPSET
from edge_rt.model.gptj import LINEARS, LinearSpec, ModelConfig
from edge_rt.model.stored import StoredTensor, stored_tensors

FILE = "decoder.onnx"
OUTER_FILE = "outer.safetensors"
W4_INPUTS = ("qweight", "scales", "zeros", "w_salient", "idx", "bias", "post_scale")

_ONNX_TYPES = {
    "F32": TensorProto.FLOAT,
    "F16": TensorProto.FLOAT16,
    "U8": TensorProto.UINT8,
    "I32": TensorProto.INT32,
}


def layer_file(layer: int) -> str:
    """The safetensors file of one decoder layer."""
    return f"layer.{layer:03d}.safetensors"


def write_decoder(directory: Path, config: ModelConfig) -> Path:
    """Write `directory`/decoder.onnx over the layer and outer files that lie there."""
    stored = stored_tensors(directory / OUTER_FILE)
    for layer in range(config.n_layer):
        stored.update(stored_tensors(directory / layer_file(layer)))
    model = _Writer(config, stored).model()
    path = directory / FILE
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(path))
    return path


class _Writer:
    """Collects nodes, initializers and widths; `_emit` returns the name of a node's only output."""

    def __init__(self, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
        self.config = config
        self.stored = stored
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.widths: dict[str, int] = {}

    def model(self) -> onnx.ModelProto:
        x = self._emit("embedding", "Gather", [self._weight("wte.weight"), "input_ids"], axis=0)
        x = self._float(x, "wte.weight")
        for layer in range(self.config.n_layer):
            x = self._layer(x, layer)
        # Only one position of each row needs logits: pick it before the vocabulary product.
        x = self._emit("last", "GatherND", [x, "last_idx"], batch_dims=1)
        x = self._layer_norm(x, "ln_f")
        head = [x, self._weight("lm_head.weight"), self._weight("lm_head.bias")]
        self._node("lm_head", "HeadLogits", head, ["logits"], domain=DOMAIN)
        graph = helper.make_graph(
            self.nodes,
            "decoder",
            self._inputs(),
            self._outputs(),
            list(self.initializers.values()),
            value_info=[_activations(name, width) for name, width in self.widths.items()],
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=10, producer_name="edge_rt"
        )

    def _layer(self, x: str, layer: int) -> str:
        prefix = f"h.{layer}"
        attn_qkv, fc_in, attn_out, fc_out = LINEARS
        h = self._layer_norm(x, f"{prefix}.ln_1")
        self.widths[h] = self.config.n_embd
        qkv = self._linear(h, prefix, attn_qkv)
        attention = f"{prefix}.attention"
        self._node(
            attention,
            "RopeAttention",
            [
                qkv,
                f"k_cache.{layer}",
                f"v_cache.{layer}",
                "past_lens",
                self._weight("rotary.cos"),
                self._weight("rotary.sin"),
            ],
            [attention, f"k_out.{layer}", f"v_out.{layer}"],
            domain=DOMAIN,
            num_heads=self.config.n_head,
        )
        self.widths[attention] = self.config.n_embd
        a = self._linear(attention, prefix, attn_out)
        m = self._linear(self._linear(h, prefix, fc_in), prefix, fc_out)
        branch = self._emit(f"{prefix}.branches", "Add", [a, m])
        return self._emit(f"{prefix}.residual", "Add", [x, branch])

    def _linear(self, x: str, prefix: str, spec: LinearSpec) -> str:
        name = f"{prefix}.{spec.name}"
        if f"{name}.qweight" in self.stored:
            inputs = [x, *(self._weight(f"{name}.{part}") for part in W4_INPUTS)]
            gelu_from = 0 if spec.gelu else -1
            self.widths[name] = self.stored[f"{name}.qweight"].shape[0]
            return self._emit(name, "W4Linear", inputs, domain=DOMAIN, gelu_from=gelu_from)
        weight = self._float(self._weight(f"{name}.weight"), f"{name}.weight")
        weight = self._emit(f"{name}.transposed", "Transpose", [weight], perm=[1, 0])
        y = self._emit(f"{name}.product", "MatMul", [x, weight])
        if spec.bias:
            y = self._emit(f"{name}.biased", "Add", [y, self._weight(f"{name}.bias")])
        if spec.gelu:
            y = self._emit(f"{name}.gelu", "Gelu", [y], approximate="tanh")
        self.widths[y] = self.stored[f"{name}.weight"].shape[0]
        return y

    def _layer_norm(self, x: str, name: str) -> str:
        inputs = [x, self._weight(f"{name}.weight"), self._weight(f"{name}.bias")]
        epsilon = self.config.layer_norm_epsilon
        return self._emit(name, "LayerNormalization", inputs, axis=-1, epsilon=epsilon)

    def _float(self, value: str, weight: str) -> str:
        """`value` as float32, given that it has the type of the stored `weight`."""
        if self.stored[weight].dtype == "F32":
            return value
        return self._emit(f"{value}.float", "Cast", [value], to=TensorProto.FLOAT)

    def _emit(
        self, name: str, op: str, inputs: Sequence[str], domain: str = "", **attributes: object
    ) -> str:
        self._node(name, op, inputs, [name], domain, **attributes)
        return name

    def _node(
        self,
        name: str,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        domain: str = "",
        **attributes: object,
    ) -> None:
        node = helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes)
        self.nodes.append(node)

    def _weight(self, name: str) -> str:
        if name not in self.initializers:
            where = self.stored[name]
            tensor = TensorProto(name=name, dims=where.shape, data_type=_ONNX_TYPES[where.dtype])
            if where.length_bytes:  # nothing to point at: a linear without salient channels
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in (
                    ("location", where.file),
                    ("offset", where.offset),
                    ("length", where.length_bytes),
                ):
                    tensor.external_data.add(key=key, value=str(value))
            self.initializers[name] = tensor
        return name

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        info = helper.make_tensor_value_info
        return [
            info("input_ids", TensorProto.INT32, ["batch", "tokens"]),
            info("past_lens", TensorProto.INT32, ["batch"]),
            info("last_idx", TensorProto.INT64, ["batch", 1]),
            *self._caches("cache"),
        ]

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        logits = helper.make_tensor_value_info(
            "logits", TensorProto.FLOAT, ["batch", self.config.vocab_size]
        )
        return [logits, *self._caches("out")]

    def _caches(self, role: str) -> list[onnx.ValueInfoProto]:
        shape = ["batch", self.config.n_head, "capacity", self.config.head_size]
        return [
            helper.make_tensor_value_info(f"{kind}_{role}.{layer}", TensorProto.FLOAT, shape)
            for layer in range(self.config.n_layer)
            for kind in "kv"
        ]


def _activations(name: str, width: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "tokens", width])
