"""Checkpoints packed by other programs: every weight is what the layout's definition says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.packed import (
    ACT,
    BY_GPTQMODEL,
    F64,
    FC_OUT,
    MODULES,
    PACKS,
    Q_PROJ,
    Array,
    Make,
    Packed,
    gptq_tensors,
    leave_float,
)
from safetensors.numpy import save_file
from transformers import GPTJForCausalLM

from edge_rt.model import gptj
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.quant.pack import QuantizedLinear, unpack_nibbles
from edge_rt.quant.packed import PackedCheckpoint
from edge_rt.quant.scheme import is_packed


def assert_exact(packed: Packed, checkpoint: PackedCheckpoint) -> None:
    """Weights equal the definition bit for bit, in the dequantized and in the stored form."""
    for index in range(checkpoint.config.n_layer):
        layer, quantized = checkpoint.layer(index)
        assert quantized.keys() == MODULES.keys()
        for name, modules in MODULES.items():
            sources = [packed.sources[f"transformer.h.{index}.{module}"] for module in modules]
            weight = np.concatenate([source.weight for source in sources])
            assert layer.linears[name].weight.dtype == np.float32
            np.testing.assert_array_equal(layer.linears[name].weight, weight)
            assert_stored(quantized[name], weight, checkpoint.group_size)


def assert_stored(linear: QuantizedLinear, weight: F64, group_size: int) -> None:
    """Its tensors have the documented form, and give `weight` by the form's own definition."""
    n, k = weight.shape
    groups = -(-k // group_size)
    expected = {
        "qweight": (np.uint8, (n, groups * group_size // 2)),
        "scales": (np.float16, (n, groups)),
        "zeros": (np.uint8, (n, groups)),
        "w_salient": (np.float16, (n, 0)),
        "idx": (np.int32, (0,)),
        "bias": (np.float32, (n,)),
        "post_scale": (np.float32, (n,)),
    }
    for name, value in linear.tensors().items():
        assert (value.dtype, value.shape) == expected[name], name
    q = unpack_nibbles(linear.qweight).astype(np.float64)
    zeros = np.repeat(linear.zeros.astype(np.float64), group_size, axis=1)
    stored = (q - zeros) * np.repeat(linear.scales.astype(np.float64), group_size, axis=1)
    np.testing.assert_array_equal(stored[:, :k], weight)
    assert not stored[:, k:].any()  # padding holds the zero point


@pytest.mark.parametrize("kind", PACKS)
@pytest.mark.parametrize(
    ("group", "sizes", "stored"),
    [
        (32, (64, 2, 16), 32),
        (64, (64, 2, 16), 64),
        (128, (256, 2, 64), 128),
        (256, (256, 2, 64), 128),
        (96, (96, 3, 32), 32),
        (192, (192, 3, 32), 64),
        (-1, (64, 2, 16), 64),
        (-1, (96, 3, 32), 32),
        (-1, (256, 2, 64), 128),
        (-1, (64, 2, 16, 72), 32),  # neither group divides 72 inputs: padded
        (128, (96, 3, 32), 128),  # a last group that the source leaves short
        (1024, (96, 3, 32), 128),
    ],
    ids=str,
)
def test_weights_are_those_of_the_definition(
    make: Make, kind: str, group: int, sizes: tuple[int, ...], stored: int
) -> None:
    packed = make(kind, group, sizes)
    checkpoint = PackedCheckpoint.open(packed.write())
    assert checkpoint.method == kind.partition("_")[0]
    assert checkpoint.group_size == stored
    assert_exact(packed, checkpoint)


@pytest.mark.parametrize("kind", PACKS)
def test_sizes_of_the_demo(make: Make, kind: str, demo_checkpoint: Path) -> None:
    packed = make(kind, 128, origin=demo_checkpoint)
    assert_exact(packed, PackedCheckpoint.open(packed.write()))


@pytest.mark.parametrize("kind", PACKS)
def test_what_is_not_quantized_is_read_as_it_is(make: Make, kind: str) -> None:
    packed = make(kind)
    checkpoint = PackedCheckpoint.open(packed.write())
    original = Checkpoint.open(packed.origin)
    assert checkpoint.config == original.config
    for name in gptj.outer_tensors(original.config):
        np.testing.assert_array_equal(checkpoint.tensor(name), original.tensor(name))
    layer, quantized = checkpoint.layer(1)
    expected = gptj.layer_from_tensors(original.layer(1))
    np.testing.assert_array_equal(layer.ln_weight, expected.ln_weight)
    np.testing.assert_array_equal(layer.ln_bias, expected.ln_bias)
    for name, linear in expected.linears.items():
        bias = np.zeros(len(linear.weight)) if linear.bias is None else linear.bias
        np.testing.assert_array_equal(quantized[name].bias, bias)
        np.testing.assert_array_equal(quantized[name].post_scale, 1.0)


class Divided(torch.nn.Module):
    def __init__(self, act: torch.nn.Module, scales: Array) -> None:
        super().__init__()
        self.act = act
        self.scales = torch.from_numpy(scales.astype(np.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x) / self.scales


def transformers_logits(packed: Packed, tokens: Array) -> Array:
    """Of transformers' GPT-J with the definition's weights, and AutoAWQ's scales behind GELU."""
    model = GPTJForCausalLM.from_pretrained(packed.origin, dtype=torch.float32).eval()
    with torch.no_grad():
        for module, source in packed.sources.items():
            model.get_submodule(module).weight.copy_(torch.from_numpy(source.weight))
        for index, block in enumerate(model.transformer.h):
            scales = packed.tensors.get(f"transformer.h.{index}.mlp.act.scales")
            if scales is not None:
                block.mlp.act = Divided(block.mlp.act, scales)
        return model(torch.from_numpy(tokens)).logits.numpy()


def own_logits(checkpoint: PackedCheckpoint, tokens: Array) -> Array:
    x = checkpoint.tensor("transformer.wte.weight")[tokens]
    for index in range(checkpoint.config.n_layer):
        x = gptj.forward_layer(x, checkpoint.layer(index)[0], checkpoint.config)
    names = ("transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight", "lm_head.bias")
    return gptj.forward_head(x, gptj.Head(*map(checkpoint.tensor, names)), checkpoint.config)


@pytest.mark.parametrize("kind", PACKS)
def test_logits_are_those_of_transformers(make: Make, kind: str) -> None:
    packed = make(kind)
    if kind == "awq":
        for index in range(2):
            scales = np.random.default_rng(index).uniform(0.25, 4.0, 256).astype(np.float16)
            packed.tensors[f"transformer.h.{index}.mlp.act.scales"] = scales
    checkpoint = PackedCheckpoint.open(packed.write())
    tokens = np.random.default_rng(0).integers(0, 3072, (2, 24))
    difference = own_logits(checkpoint, tokens) - transformers_logits(packed, tokens)
    assert np.abs(difference).max() <= 1e-4


def test_scales_behind_gelu_are_post_scale(make: Make) -> None:
    packed = make("awq")
    scales = np.linspace(0.5, 4.0, 256).astype(np.float16)
    packed.tensors[ACT] = scales
    layer, quantized = PackedCheckpoint.open(packed.write()).layer(1)
    expected = 1.0 / scales.astype(np.float64)
    np.testing.assert_allclose(quantized["mlp_fc_in"].post_scale, expected, rtol=1e-7)
    np.testing.assert_array_equal(
        layer.linears["mlp_fc_in"].post_scale, quantized["mlp_fc_in"].post_scale
    )
    for name in ("attn_qkv", "attn_out", "mlp_fc_out"):
        assert (quantized[name].post_scale == 1.0).all()


def test_symmetric_zero_is_eight(make: Make) -> None:
    packed = make("gptq")
    packed.quantization["sym"] = True
    for module, source in list(packed.sources.items()):
        source.zeros[:] = 8
        packed.replace(module, source, lambda source: gptq_tensors(source, 1))
        assert (packed.tensors[f"{module}.qzeros"] == 0x77777777).all()
    checkpoint = PackedCheckpoint.open(packed.write())
    assert (checkpoint.layer(0)[1]["attn_qkv"].zeros == 8).all()
    assert_exact(packed, checkpoint)


def test_gptqmodel_borrows_come_back(make: Make) -> None:
    """GPTQModel subtracts 0x11111111 from whole words: a zero point of 0 borrows above itself."""
    packed = make("gptq_v2")
    packed.quantization = BY_GPTQMODEL | {"group_size": 32}
    for name in packed.tensors:
        if name.endswith(".qzeros"):
            exact = packed.tensors[name].view(np.uint32).astype(np.int64)
            less = (exact - 0x11111111) % 2**32
            packed.tensors[name] = less.astype(np.uint32).view(np.int32)
    assert any((source.zeros == 0).any() for source in packed.sources.values())
    assert_exact(packed, PackedCheckpoint.open(packed.write()))


@pytest.mark.parametrize("kind", ["gptq", "gptq_v2"])
def test_groups_in_another_order(make: Make, kind: str) -> None:
    packed = make(kind)
    source = packed.sources[FC_OUT]
    order = np.random.default_rng(0).permutation(source.owner.max() + 1)
    source.owner = order[source.owner]
    packed.replace(FC_OUT, source, PACKS[kind][1])
    packed.quantization["desc_act"] = True
    assert_exact(packed, PackedCheckpoint.open(packed.write()))


def test_g_idx_may_be_left_out(make: Make) -> None:
    packed = make("gptq")
    for module in packed.sources:
        del packed.tensors[f"{module}.g_idx"]
    assert_exact(packed, PackedCheckpoint.open(packed.write()))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_bias_where_gptj_has_none(make: Make, dtype: str) -> None:
    packed = make("gptq")
    bias = np.linspace(-1, 1, 64).astype(dtype)
    packed.tensors[f"{Q_PROJ}.bias"] = bias
    layer, quantized = PackedCheckpoint.open(packed.write()).layer(1)
    for value in (layer.linears["attn_qkv"].bias, quantized["attn_qkv"].bias):
        np.testing.assert_array_equal(value, np.concatenate([bias, np.zeros(128)]))


def test_scales_in_a_wider_type(make: Make) -> None:
    packed = make("gptq")
    for name, value in packed.tensors.items():
        if name.endswith(".scales"):
            packed.tensors[name] = value.astype(np.float32)
    assert_exact(packed, PackedCheckpoint.open(packed.write()))


@pytest.mark.parametrize("kind", PACKS)
def test_modules_left_in_float(make: Make, kind: str) -> None:
    packed = make(kind)
    fc_out, q_proj = leave_float(packed, FC_OUT), leave_float(packed, Q_PROJ)
    checkpoint = PackedCheckpoint.open(packed.write())
    assert checkpoint.layer(0)[1].keys() == MODULES.keys()
    layer, quantized = checkpoint.layer(1)
    assert quantized.keys() == {"mlp_fc_in", "attn_out"}
    np.testing.assert_array_equal(layer.linears["mlp_fc_out"].weight, fc_out)
    kept = [packed.sources[f"transformer.h.1.attn.{name}_proj"].weight for name in ("k", "v")]
    np.testing.assert_array_equal(layer.linears["attn_qkv"].weight, np.concatenate([q_proj, *kept]))


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("gptq", "quantize_config.json"),
        ("gptq_v2", "quantize_config.json"),
        ("awq", "quant_config.json"),
    ],
)
def test_config_in_its_own_file(make: Make, kind: str, own: str) -> None:
    packed = make(kind)
    del packed.quantization["quant_method"]
    if kind == "awq":
        packed.quantization = {
            "zero_point": True,
            "q_group_size": 32,
            "w_bit": 4,
            "version": "GEMM",
        }
    directory = packed.write(own=own)
    assert is_packed(directory)
    assert_exact(packed, PackedCheckpoint.open(directory))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("gptq_model-4bit-32g.safetensors", {}),
        ("mine.safetensors", {"model_file_base_name": "mine"}),
    ],
)
def test_file_names_of_autogptq(make: Make, file: str, changes: dict[str, Any]) -> None:
    packed = make("gptq")
    packed.quantization |= changes
    assert_exact(packed, PackedCheckpoint.open(packed.write(file, own="quantize_config.json")))


@pytest.mark.parametrize("kind", PACKS)
def test_shards(make: Make, kind: str) -> None:
    packed = make(kind)
    directory = packed.write()
    (directory / "model.safetensors").unlink()
    names = sorted(packed.tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: packed.tensors[name] for name in part}, directory / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_exact(packed, PackedCheckpoint.open(directory))


@pytest.mark.parametrize("kind", PACKS)
def test_torch_file_and_names_without_prefix(make: Make, kind: str) -> None:
    packed = make(kind)
    (packed.write() / "model.safetensors").unlink()
    state = {
        name.removeprefix("transformer."): torch.from_numpy(value)
        for name, value in packed.tensors.items()
    }
    state["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    torch.save(state, packed.directory / "pytorch_model.bin")
    assert_exact(packed, PackedCheckpoint.open(packed.directory))


def test_tied_head(make: Make) -> None:
    packed = make("gptq")
    packed.config["tie_word_embeddings"] = True
    del packed.tensors["lm_head.weight"]
    checkpoint = PackedCheckpoint.open(packed.write())
    np.testing.assert_array_equal(
        checkpoint.tensor("lm_head.weight"), packed.tensors["transformer.wte.weight"]
    )
