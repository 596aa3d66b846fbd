"""Builds a decoder.onnx with TensorRT-RTX and placeholder plugins; needs no GPU.

Run as `python tests/fakes/tensorrt_plugins.py DECODER_ONNX`; prints one JSON object. A process of
its own, because TensorRT keeps the first logger of a process and ends it where it cannot go on.
LD_LIBRARY_PATH must lead to `libtensorrt_rtx.so`: the parser loads that name, the wheel ships
only `.so.1`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tensorrt_rtx_bindings as trt

PROFILES = (
    {"batch": (1, 4, 8), "tokens": (1, 1, 1), "capacity": (64, 128, 256)},  # decode
    {"batch": (1, 1, 8), "tokens": (1, 32, 64), "capacity": (64, 128, 256)},  # prefill
)
# The parser asks for a creator by the node's `plugin_namespace`, which the writer does not set, so
# by "". Newer parsers then try the node's domain; this name works in all of them.
NAMESPACE = ""

_F32, _F16, _I32, _I8 = {trt.float32}, {trt.float16}, {trt.int32}, {trt.int8}


@dataclass(slots=True)
class _Calls:
    """What TensorRT asked of the plugins."""

    created: list[tuple[str, str]] = field(default_factory=list)  # op, node
    configured: Counter[str] = field(default_factory=Counter)  # by op
    aliases: set[tuple[str, int, int]] = field(default_factory=set)  # node, output, input


CALLS = _Calls()


class _Log(trt.ILogger):
    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
            self.errors.append(message)


class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):
    """Everything but the arithmetic of one op; the builder never calls enqueue."""

    OP = ""
    ATTRIBUTES: tuple[str, ...] = ()
    TYPES: tuple[set[Any], ...] = ()  # the types that each input, then each output may have
    OUTPUTS = 1

    def __init__(self, node: str, attributes: dict[str, int]) -> None:
        # One super().__init__() would reach only the first of the bound C++ bases.
        for base in Plugin.__bases__:
            base.__init__(self)
        self.plugin_name = self.OP
        self.plugin_namespace = NAMESPACE
        self.plugin_version = "1"
        self.num_outputs = self.OUTPUTS
        self.timing_cache_id = ""
        self.node = node
        self.attributes = attributes

    def get_capability_interface(self, kind: Any) -> Plugin:
        return self

    def clone(self) -> Plugin:
        return type(self)(self.node, self.attributes)

    def get_output_data_types(self, inputs: list[Any]) -> list[Any]:
        return [trt.float32] * self.OUTPUTS

    def get_output_shapes(self, inputs: list[Any], shape_inputs: Any, build: Any) -> list[Any]:
        # A linear: [..., in] and a weight of `out` rows -> [..., out].
        y = trt.DimsExprs(inputs[0])
        y[len(y) - 1] = inputs[1][0]
        return [y]

    def get_aliased_input(self, output: int) -> int:
        return -1

    def supports_format_combination(self, position: int, tensors: list[Any], inputs: int) -> bool:
        tensor = tensors[position].desc
        if tensor.type not in self.TYPES[position]:
            # Said here, because TensorRT may abort on a refusal (seen for W4Linear) unexplained.
            sys.stderr.write(f"{self.node} refuses {tensor.type} at position {position}\n")
            return False
        return tensor.format == trt.TensorFormat.LINEAR

    def configure_plugin(self, inputs: list[Any], outputs: list[Any]) -> None:
        CALLS.configured[self.OP] += 1

    def get_fields_to_serialize(self) -> Any:
        return trt.PluginFieldCollection(
            [
                _int_field(name, np.array([value], np.int32))
                for name, value in self.attributes.items()
            ]
        )

    def get_valid_tactics(self) -> list[int]:
        return [1]

    def set_tactic(self, tactic: int) -> None:
        pass

    def get_workspace_size(self, inputs: list[Any], outputs: list[Any]) -> int:
        return 0

    def attach_to_context(self, context: Any) -> Plugin:
        # The builder calls this too, and dies of a segmentation fault where it raises.
        return self.clone()

    def on_shape_change(self, inputs: list[Any], outputs: list[Any]) -> None:
        raise NotImplementedError

    def enqueue(self, *arguments: Any) -> None:
        raise NotImplementedError


class W4Linear(Plugin):
    OP = "W4Linear"
    ATTRIBUTES = ("gelu_from",)
    # x, qweight, scales, zeros, w_salient, idx, bias, post_scale -> y
    TYPES = (_F32, _I8, _F16, _I8, _F16, _I32, _F32, _F32, _F32)


class HeadLogits(Plugin):
    OP = "HeadLogits"
    TYPES = (_F32, _F16 | _F32, _F32, _F32)  # x, weight, bias -> logits


class RopeAttention(Plugin):
    OP = "RopeAttention"
    ATTRIBUTES = ("num_heads",)
    # qkv, k_cache, v_cache, past_lens, cos, sin -> y, k_out, v_out
    TYPES = (_F32, _F32, _F32, _I32, _F32, _F32, _F32, _F32, _F32)
    OUTPUTS = 3

    def get_output_shapes(self, inputs: list[Any], shape_inputs: Any, build: Any) -> list[Any]:
        qkv, keys, values = inputs[:3]
        y = trt.DimsExprs(qkv)
        y[2] = build.operation(trt.DimensionOperation.PROD, keys[1], keys[3])
        return [y, trt.DimsExprs(keys), trt.DimsExprs(values)]

    def get_aliased_input(self, output: int) -> int:
        source = (-1, 1, 2)[output]
        CALLS.aliases.add((self.node, output, source))
        return source


class _Creator(trt.IPluginCreatorV3One):
    def __init__(self, plugin: type[Plugin]) -> None:
        super().__init__()
        self.plugin = plugin
        self.name = plugin.OP
        self.plugin_namespace = NAMESPACE
        self.plugin_version = "1"
        self.field_names = trt.PluginFieldCollection(
            [_int_field(name, np.array([], np.int32)) for name in plugin.ATTRIBUTES]
        )

    def create_plugin(self, node: str, fields: Any, phase: Any) -> Plugin:
        values = {x.name: int(np.asarray(x.data).reshape(-1)[0]) for x in fields}
        if set(values) != set(self.plugin.ATTRIBUTES):
            raise ValueError(f"{node}: attributes {sorted(values)}")
        CALLS.created.append((self.name, node))
        return self.plugin(node, values)


def _int_field(name: str, value: Any) -> Any:
    return trt.PluginField(name, value, trt.PluginFieldType.INT32)


def reinterpreted(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with its uint8 weights declared int8, over the same bytes.

    The parser widens every uint8 initializer to int32, four times the memory; it leaves int8 alone.
    """
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.UINT8:
            tensor.data_type = onnx.TensorProto.INT8
    return model


class _Network:
    """A network parsed from decoder.onnx."""

    def __init__(self, log: _Log, builder: Any) -> None:
        strongly_typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.network = builder.create_network(strongly_typed)
        self.parser = trt.OnnxParser(self.network, log)

    def errors(self) -> list[str]:
        return [self.parser.get_error(i).desc() for i in range(self.parser.num_errors)]

    def layers(self, kind: Any, as_class: Any) -> list[Any]:
        layers = [self.network.get_layer(i) for i in range(self.network.num_layers)]
        found = [layer for layer in layers if layer.type == kind]
        for layer in found:
            layer.__class__ = as_class  # the bindings' downcast
        return found

    def constants(self) -> dict[str, str]:
        """SHA-256 of every weight by its initializer's name; empty weights lose theirs."""
        return {
            layer.name: hashlib.sha256(np.asarray(layer.weights).tobytes()).hexdigest()
            for layer in self.layers(trt.LayerType.CONSTANT, trt.IConstantLayer)
        }

    def plugins(self) -> dict[str, Any]:
        """The layers of the edge_rt nodes by name."""
        layers = self.layers(trt.LayerType.PLUGIN_V3, trt.IPluginV3Layer)
        return {layer.name: layer for layer in layers}

    def plugin_inputs(self) -> dict[str, list[str]]:
        """The types of each edge_rt node's inputs."""
        return {
            name: [layer.get_input(i).dtype.name for i in range(layer.num_inputs)]
            for name, layer in self.plugins().items()
        }

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Type and shape of every input and output, -1 where it is dynamic."""
        inputs = [self.network.get_input(i) for i in range(self.network.num_inputs)]
        outputs = [self.network.get_output(i) for i in range(self.network.num_outputs)]
        return {x.name: {"type": x.dtype.name, "shape": list(x.shape)} for x in inputs + outputs}

    def aliases(self) -> dict[str, str]:
        """Output -> input for the pairs that the plugins declared when the builder asked."""
        plugins = self.plugins()
        return {
            plugins[node].get_output(output).name: plugins[node].get_input(source).name
            for node, output, source in CALLS.aliases
            if source >= 0
        }


def _config(builder: Any, network: Any, aliasing: bool) -> Any:
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, aliasing)
    # Without a GPU the target has to be said; RTX knows no SM 8.7 (Orin), 8.6 is its sibling.
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM86, 0)
    for ranges in PROFILES:
        profile = builder.create_optimization_profile()
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            shapes = [
                [
                    size if size >= 0 else ranges[tensor.get_dimension_name(axis)][bound]
                    for axis, size in enumerate(tensor.shape)
                ]
                for bound in range(3)
            ]
            profile.set_shape(tensor.name, *shapes)
        config.add_optimization_profile(profile)
    return config


def build(path: Path) -> dict[str, Any]:
    """Parse and build decoder.onnx; what TensorRT made of it."""
    log = _Log()
    builder = trt.Builder(log)

    written = _Network(log, builder)
    parsed_written = written.parser.parse_from_file(str(path))
    report: dict[str, Any] = {
        "as_written": {
            "parsed": parsed_written,
            "parser_errors": written.errors(),
            "plugin_inputs": written.plugin_inputs(),
        }
    }
    CALLS.created.clear()

    graph = _Network(log, builder)
    model = reinterpreted(onnx.load(path, load_external_data=False))
    # The path is where the parser looks for the weights.
    parsed = graph.parser.parse(model.SerializeToString(), str(path))
    report |= {
        "parsed": parsed,
        "parser_errors": graph.errors(),
        "created": sorted(CALLS.created),
        "constants": graph.constants(),
        "plugin_inputs": graph.plugin_inputs(),
        "tensors": graph.tensors(),
    }
    if parsed:
        config = _config(builder, graph.network, aliasing=True)
        started = time.perf_counter()
        plan = builder.build_serialized_network(graph.network, config)
        report |= {
            "seconds": time.perf_counter() - started,
            "plan_bytes": plan.nbytes if plan else 0,
            "profiles": config.num_optimization_profiles,
            "configured": dict(CALLS.configured),
            "aliases": graph.aliases(),
            "errors": list(log.errors),
        }
        log.errors.clear()
        config = _config(builder, graph.network, aliasing=False)
        refused = builder.build_serialized_network(graph.network, config)
        report["without_aliasing"] = {"refused": refused is None, "errors": log.errors}
    return report


def main() -> None:
    """Register the placeholders, build, report."""
    creators = [_Creator(plugin) for plugin in (W4Linear, HeadLogits, RopeAttention)]
    for creator in creators:
        trt.get_plugin_registry().register_creator(creator, NAMESPACE)
    sys.stdout.write(json.dumps(build(Path(sys.argv[1]))) + "\n")


if __name__ == "__main__":
    main()
