"""Checkpoints packed by other programs: every weight is what the layout's definition says.

The packers here are written from the definitions, place by place, and share nothing with edge_rt.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import GPTJForCausalLM

from edge_rt.errors import CheckpointError
from edge_rt.model import gptj
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.quant.pack import QuantizedLinear, unpack_nibbles
from edge_rt.quant.packed import PackedCheckpoint, is_packed

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]

MODULES = {
    "attn_qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "mlp_fc_in": ("mlp.fc_in",),
    "attn_out": ("attn.out_proj",),
    "mlp_fc_out": ("mlp.fc_out",),
}
NAMES = [name for names in MODULES.values() for name in names]
Q_PROJ = "transformer.h.1.attn.q_proj"
FC_OUT = "transformer.h.1.mlp.fc_out"
ACT = "transformer.h.1.mlp.act.scales"
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}
V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
BY_GPTQMODEL = GPTQ | {"meta": {"quantizer": ["optimum:1.24.0", "gptqmodel:2.0.0"]}}
AWQ_SLOTS = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}


@dataclass
class Source:
    """One quantized linear: q [N, K], zeros and scales [N, G], the group of each input [K]."""

    q: Array
    zeros: Array
    scales: Array
    owner: Array

    @property
    def weight(self) -> F64:
        scales = self.scales.astype(np.float64)[:, self.owner]
        return (self.q.astype(np.float64) - self.zeros[:, self.owner]) * scales


def random_source(seed: int, n: int, k: int, group: int, lowest: int = 0) -> Source:
    rng = np.random.default_rng(seed)
    group = k if group == -1 else group
    groups = -(-k // group)
    return Source(
        q=rng.integers(0, 16, (n, k)),
        zeros=rng.integers(lowest, 16, (n, groups)),
        scales=rng.uniform(0.002, 0.02, (n, groups)).astype(np.float16),
        owner=np.arange(k) // group,
    )


def along_columns(values: Array, slots: dict[int, int]) -> Array:
    """[rows, 8 c] -> int32 [rows, c]; `slots` is the nibble of each of eight places."""
    words = np.zeros((values.shape[0], values.shape[1] // 8), np.int64)
    for column in range(values.shape[1]):
        words[:, column // 8] += values[:, column] * 16 ** slots[column % 8]
    return words.astype(np.uint32).view(np.int32)


def awq_tensors(source: Source) -> dict[str, Array]:
    return {
        "qweight": along_columns(source.q.T, AWQ_SLOTS),
        "qzeros": along_columns(source.zeros.T, AWQ_SLOTS),
        "scales": np.ascontiguousarray(source.scales.T),
    }


def gptq_tensors(source: Source, less: int) -> dict[str, Array]:
    places = {place: place for place in range(8)}
    return {
        "qweight": np.ascontiguousarray(along_columns(source.q, places).T),
        "qzeros": along_columns(source.zeros.T - less, places),
        "scales": np.ascontiguousarray(source.scales.T),
        "g_idx": source.owner.astype(np.int32),
    }


Pack = Callable[[Source], dict[str, Array]]
PACKS: dict[str, tuple[dict[str, Any], Pack, int]] = {
    "awq": (AWQ, awq_tensors, 0),
    "gptq": (GPTQ, lambda source: gptq_tensors(source, 1), 1),
    "gptq_v2": (V2, lambda source: gptq_tensors(source, 0), 0),
}


@dataclass
class Packed:
    """A packed directory in the making: what will be written, and what is in it."""

    directory: Path
    origin: Path
    tensors: dict[str, Array]
    sources: dict[str, Source]
    config: dict[str, Any]
    quantization: dict[str, Any]

    def write(self, file: str = "model.safetensors", *, own: str | None = None) -> Path:
        config = dict(self.config)
        if own is None:
            config["quantization_config"] = self.quantization
        else:
            (self.directory / own).write_text(json.dumps(self.quantization))
        (self.directory / "config.json").write_text(json.dumps(config))
        save_file(self.tensors, self.directory / file)
        return self.directory

    def replace(self, module: str, source: Source, pack: Pack) -> None:
        self.sources[module] = source
        self.tensors |= {f"{module}.{name}": value for name, value in pack(source).items()}


Make = Callable[..., Packed]


@pytest.fixture(scope="module")
def origin_of(random_gptj: Callable[..., Path]) -> Callable[..., Path]:
    """As random_gptj, made once for the same sizes; not to be written to."""
    return functools.cache(random_gptj)


@pytest.fixture
def make(tmp_path: Path, origin_of: Callable[..., Path]) -> Make:
    """A random GPT-J of two layers, packed by `kind`; nothing is written yet."""

    def build(
        kind: str, group: int = 32, sizes: tuple[Any, ...] = (64, 2, 16), origin: Path | None = None
    ) -> Packed:
        origin = origin or origin_of(*sizes)
        table, pack, lowest = PACKS[kind]
        config = json.loads((origin / "config.json").read_text())
        tensors = load_file(origin / "model.safetensors")
        packed = Packed(tmp_path, origin, tensors, {}, config, table | {"group_size": group})
        for index in range(config["n_layer"]):
            for seed, name in enumerate(NAMES):
                module = f"transformer.h.{index}.{name}"
                n, k = tensors.pop(f"{module}.weight").shape
                packed.replace(module, random_source(10 * index + seed, n, k, group, lowest), pack)
        return packed

    return build


def refused(directory: Path, *parts: str) -> None:
    """Opening it, or reading its layers, fails, and the message has every one of `parts`."""
    with pytest.raises(CheckpointError) as caught:
        read_all(directory)
    for part in parts:
        assert part in str(caught.value)


def read_all(directory: Path) -> None:
    checkpoint = PackedCheckpoint.open(directory)
    for index in range(checkpoint.config.n_layer):
        checkpoint.layer(index)


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
    assert checkpoint.directory == packed.directory
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


def leave_float(packed: Packed, module: str) -> Array:
    for name in [name for name in packed.tensors if name.startswith(f"{module}.")]:
        if not name.endswith(".bias"):
            del packed.tensors[name]
    weight = load_file(packed.origin / "model.safetensors")[f"{module}.weight"]
    packed.tensors[f"{module}.weight"] = weight
    return weight


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


def test_is_packed(make: Make) -> None:
    packed = make("gptq")
    assert not is_packed(packed.origin)
    assert not is_packed(packed.directory)
    assert is_packed(packed.write())


def test_the_float_reader_refuses_it(make: Make) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor .*q_proj\.weight"):
        Checkpoint.open(make("gptq").write())


@pytest.mark.parametrize(
    ("kind", "changes", "parts"),
    [
        ("awq", {"version": "gemv"}, ("awq", "'gemv'", '"version": "GEMM"')),
        ("awq", {"version": "gemv_fast"}, ("'gemv_fast'", "'gemm'")),
        ("awq", {"version": "marlin"}, ("'marlin'",)),
        ("awq", {"version": "exllama"}, ("'exllama'",)),
        ("awq", {"version": "ipex"}, ("'ipex'",)),
        ("gptq", {"checkpoint_format": "marlin"}, ("gptq", "'marlin'", "GPTQModel")),
        ("gptq", {"format": "bitblas"}, ("'bitblas'",)),
        ("gptq", {"is_marlin_format": True}, ("'marlin'",)),
        ("gptq", {"checkpoint_format": 3}, ("layout 3",)),
        ("gptq", {"bits": 8}, ("bits 8", "4 bits")),
        ("gptq", {"bits": "4"}, ("bits '4'",)),
        ("gptq", {"bits": None}, ("bits None",)),
        ("awq", {"bits": 3}, ("bits 3",)),
        ("gptq", {"quant_method": "bitsandbytes"}, ("'bitsandbytes'", "edge-rt quantize")),
        ("gptq", {"quant_method": None}, ("quant_method None",)),
        ("gptq", {"group_size": 16}, ("group_size 16", "multiples of 32")),
        ("gptq", {"group_size": 100}, ("group_size 100",)),
        ("gptq", {"group_size": 0}, ("group_size 0",)),
        ("gptq", {"group_size": "128"}, ("group_size '128'",)),
        ("gptq", {"group_size": 64}, ("qzeros", "shape [2, ", "expected [1, ")),
        ("awq", {"group_size": -1}, ("qzeros", "expected [1, ")),
        ("gptq", {"sym": True}, ("sym true", "qzeros", "gptq_v2")),
    ],
)  # fmt: skip
def test_foreign_schemes(
    make: Make, kind: str, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    packed = make(kind)
    packed.quantization |= changes
    refused(packed.write(), *parts)


@pytest.mark.parametrize("kind", PACKS)
@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda value: None, ("no tensor", "model.safetensors")),
        (lambda value: value[:-1], ("has shape", "expected", "model.safetensors")),
        (lambda value: value.astype(np.int64), ("is I64", "expected one of", "model.safetensors")),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_wrong_tensors(
    make: Make,
    kind: str,
    part: str,
    change: Callable[[Array], Array | None],
    parts: tuple[str, ...],
) -> None:
    packed = make(kind)
    name = f"{Q_PROJ}.{part}"
    value = change(packed.tensors.pop(name))
    if value is not None:
        packed.tensors[name] = value
    refused(packed.write(), name, *parts)


@pytest.mark.parametrize(
    ("kind", "name", "parts"),
    [
        ("gptq", f"{Q_PROJ}.lora_A.weight", ("2 layers",)),
        ("gptq", "transformer.h.2.attn.q_proj.qweight", ("2 layers",)),
        ("gptq", ACT, ("2 layers",)),
        ("awq", f"{Q_PROJ}.g_idx", ("2 layers",)),
        ("gptq", "transformer.wte.qweight", ("2 layers",)),
        ("gptq", f"{Q_PROJ}.weight", ("2 layers",)),
        ("gptq", "lm_head.qweight", ("head", "lm_head false", "edge-rt quantize")),
        ("awq", "lm_head.qweight", ("head",)),
    ],
)
def test_extra_tensors(make: Make, kind: str, name: str, parts: tuple[str, ...]) -> None:
    packed = make(kind)
    shape = (64, 64) if name.endswith(".weight") else (256,)
    packed.tensors[name] = np.ones(shape, np.float16)
    refused(packed.write(), name if name != f"{Q_PROJ}.weight" else Q_PROJ, *parts)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("awq", f"{Q_PROJ}.scales"),
        ("gptq", f"{FC_OUT}.scales"),
        ("awq", ACT),
        ("gptq", f"{FC_OUT}.bias"),
    ],
)
def test_values_that_are_not_finite(make: Make, kind: str, name: str, value: float) -> None:
    packed = make(kind)
    tensor = packed.tensors.setdefault(name, np.ones(256, np.float16))
    tensor.reshape(-1)[3] = value
    refused(packed.write(), name, "model.safetensors", "1 value")


def test_scales_that_float16_would_round(make: Make) -> None:
    packed = make("gptq")
    scales = packed.tensors[f"{Q_PROJ}.scales"].astype(np.float32)
    scales[0, 0] = 0.1
    packed.tensors[f"{Q_PROJ}.scales"] = scales
    refused(packed.write(), f"{Q_PROJ}.scales", "exactly", "float16")


def test_scale_of_zero_behind_gelu(make: Make) -> None:
    packed = make("awq")
    packed.tensors[ACT] = np.zeros(256, np.float16)
    refused(packed.write(), ACT, "a scale of 0")


def test_scales_behind_a_float_fc_in(make: Make) -> None:
    packed = make("awq")
    leave_float(packed, "transformer.h.1.mlp.fc_in")
    packed.tensors[ACT] = np.full(256, 2, np.float16)
    refused(packed.write(), ACT, "mlp.fc_in", "not quantized")
    packed.tensors[ACT] = np.ones(256, np.float16)
    layer, quantized = PackedCheckpoint.open(packed.write()).layer(1)
    assert layer.linears["mlp_fc_in"].post_scale is None
    assert "mlp_fc_in" not in quantized


@pytest.mark.parametrize("spread", ["all", "two"])
def test_desc_act_is_refused(make: Make, spread: str) -> None:
    packed = make("gptq")
    source = packed.sources[FC_OUT]
    if spread == "all":
        source.owner = np.random.default_rng(0).permutation(source.owner)
    else:
        source.owner[[0, 40]] = source.owner[[40, 0]]
    packed.replace(FC_OUT, source, PACKS["gptq"][1])
    packed.quantization["desc_act"] = True
    refused(packed.write(), f"{FC_OUT}.g_idx", "desc_act", "edge-rt quantize")


@pytest.mark.parametrize("value", [-1, 8, 7])
def test_g_idx_out_of_range(make: Make, value: int) -> None:
    packed = make("gptq")
    packed.tensors[f"{FC_OUT}.g_idx"][0:32] = value
    refused(packed.write(), f"{FC_OUT}.g_idx", "groups 0 to 7")


def test_desc_act_without_g_idx(make: Make) -> None:
    packed = make("gptq")
    packed.quantization["desc_act"] = True
    del packed.tensors[f"{FC_OUT}.g_idx"]
    refused(packed.write(), f"{FC_OUT}.g_idx", "no tensor")


def test_zero_point_fifteen_of_the_first_format(make: Make) -> None:
    packed = make("gptq")
    packed.tensors[f"{Q_PROJ}.qzeros"][0, 0] |= 15
    refused(packed.write(), f"{Q_PROJ}.qzeros", "1 zero points as 15", "gptq_v2", "sym true")


def test_symmetric_zeros_of_the_other_format(make: Make) -> None:
    """Some checkpoints store 8 exactly and say 'gptq': every weight would be off by a scale."""
    packed = make("gptq_v2")
    packed.quantization |= {"checkpoint_format": "gptq", "sym": True}
    for module in packed.sources:
        packed.tensors[f"{module}.qzeros"][:] = np.uint32(0x88888888).astype(np.int32)
    refused(packed.write(), "zero point 9", "gptq_v2")


def test_widths_that_do_not_fill_words(make: Make) -> None:
    packed = make("gptq", 32, (64, 2, 16))
    packed.config["n_inner"] = 84
    refused(packed.write(), "mlp.fc_in", "84")


def test_float_weights_that_say_packed(make: Make) -> None:
    packed = make("gptq")
    packed.tensors = load_file(packed.origin / "model.safetensors")
    refused(packed.write(), "no qweight", "quantization_config")


def test_not_packed_at_all(make: Make) -> None:
    refused(make("gptq").origin, "not quantized", "edge-rt quantize")


@pytest.mark.parametrize("table", [[1], "awq", 3])
def test_quantization_config_that_is_no_object(make: Make, table: object) -> None:
    packed = make("gptq")
    packed.quantization = table  # type: ignore[assignment]
    refused(packed.write(), "quantization_config", "object")


def test_damaged_files(make: Make, tmp_path: Path) -> None:
    packed = make("gptq")
    file = packed.write() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    refused(tmp_path, "model.safetensors", "damaged")
    file.unlink()
    refused(tmp_path, "no weights", "gptq_model-4bit-32g.safetensors")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "config.json")
    refused(tmp_path / "absent", "does not exist")
