"""Packed checkpoints that cannot be taken over: each says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.packed import ACT, FC_OUT, PACKS, Q_PROJ, Array, Make, leave_float
from safetensors.numpy import load_file

from edge_rt.errors import CheckpointError
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.quant.packed import PackedCheckpoint
from edge_rt.quant.scheme import is_packed


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
