from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.packed import MODULES, Make
from fakes.quantized import reference_logits
from safetensors.numpy import load_file, save_file
from transformers import GPTJForCausalLM

from edge_rt.bench.perplexity import of_checkpoint, of_quantized, score_model
from edge_rt.cli import main
from edge_rt.errors import CheckpointError, ConfigError, EdgeRTError
from edge_rt.golden import GOLDEN_FILE, Golden
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.device import Device, DeviceName
from edge_rt.model.gptj import LINEARS
from edge_rt.quant.pipeline import quantize
from edge_rt.quant.store import QuantizedCheckpoint


def test_two_runs_write_the_same_bytes(
    demo_checkpoint: Path, demo_quantized: Path, small_recipe: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    quantize(demo_checkpoint, again, str(small_recipe))
    names = sorted(path.name for path in again.iterdir())
    assert names == sorted(path.name for path in demo_quantized.iterdir())
    for name in names:
        assert (again / name).read_bytes() == (demo_quantized / name).read_bytes(), name


class Scaled(torch.nn.Module):
    """An activation whose outputs are multiplied by a scale."""

    def __init__(self, act: torch.nn.Module, scale: torch.Tensor) -> None:
        super().__init__()
        self.act, self.scale = act, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x) * self.scale


@pytest.mark.parametrize("is_demo", [True, False], ids=["demo", "random"])
def test_golden_logits_are_those_of_transformers_with_the_dequantized_weights(
    random_gptj: Callable[..., Path],
    demo_checkpoint: Path,
    demo_quantized: Path,
    recipe: Callable[..., str],
    tmp_path: Path,
    is_demo: bool,
) -> None:
    checkpoint, directory = demo_checkpoint, demo_quantized
    if not is_demo:  # float32 weights, none of which FP16 holds exactly
        checkpoint, directory = random_gptj(80, 2, 12), tmp_path / "q"
        quantize(checkpoint, directory, recipe("gptq", awq="true"))
    model = GPTJForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    quantized = QuantizedCheckpoint.open(directory)
    state = model.state_dict()
    state["transformer.wte.weight"].copy_(torch.from_numpy(quantized.embedding()))
    state["lm_head.weight"].copy_(torch.from_numpy(quantized.head().weight))
    state["lm_head.bias"].copy_(torch.from_numpy(quantized.head().bias))
    for index in range(quantized.info.model.n_layer):
        layer, block = quantized.layer(index), model.transformer.h[index]
        block.ln_1.weight.data.copy_(torch.from_numpy(layer.ln_weight))
        block.ln_1.bias.data.copy_(torch.from_numpy(layer.ln_bias))
        for spec in LINEARS:
            linear = layer.linears[spec.name]
            assert linear.bias is not None
            assert linear.post_scale is not None
            weights = np.split(linear.weight, len(spec.tensors))
            biases = np.split(linear.bias, len(spec.tensors))
            for name, weight, bias in zip(spec.tensors, weights, biases, strict=True):
                # GPT-J's attention has no biases of its own.
                module = torch.nn.Linear(weight.shape[1], weight.shape[0])
                module.weight.data = torch.from_numpy(weight)
                module.bias.data = torch.from_numpy(bias)
                block.set_submodule(name.removesuffix(".weight"), module)
            if spec.gelu:
                block.mlp.act = Scaled(block.mlp.act, torch.from_numpy(linear.post_scale))
            else:
                assert (linear.post_scale == 1).all()
    golden = Golden.load(directory / GOLDEN_FILE)
    assert len(golden.prompts) == 4
    for prompt in golden.prompts:
        tokens = torch.from_numpy(prompt.tokens.astype(np.int64))[None]
        with torch.no_grad():
            expected = model(tokens).logits[0, prompt.start :].numpy()
        assert np.abs(prompt.logits - expected).max() <= 1e-4


def test_linears_of_one_input_share_its_salient_channels(demo_quantized: Path) -> None:
    for index in range(4):
        tensors = load_file(demo_quantized / f"layer.{index:03d}.safetensors")
        idx = {spec.name: tensors[f"h.{index}.{spec.name}.idx"] for spec in LINEARS}
        np.testing.assert_array_equal(idx["attn_qkv"], idx["mlp_fc_in"])
        assert (idx["attn_qkv"] >= 0).sum() == 4
        assert (idx["mlp_fc_out"] >= 0).sum() == 16


def test_int4_weights_are_off_by_little(
    demo_checkpoint: Path, recipe: Callable[..., str], tmp_path: Path
) -> None:
    """Worse than FP16, but 4 bits have not been mixed up."""
    floats = load_file(demo_checkpoint / "model.safetensors")
    quantize(demo_checkpoint, tmp_path / "q", recipe())
    layer = QuantizedCheckpoint.open(tmp_path / "q").layer(0)
    weight = floats["transformer.h.0.mlp.fc_in.weight"].astype(np.float32)
    error = layer.linears["mlp_fc_in"].weight - weight
    assert 0.01 < np.linalg.norm(error) / np.linalg.norm(weight) < 0.2


def test_float_recipe_keeps_every_weight(
    demo_checkpoint: Path, recipe: Callable[..., str], tmp_path: Path
) -> None:
    info = quantize(demo_checkpoint, tmp_path / "q", recipe("float"))
    assert info.quantization.fp16_fraction == 1.0
    floats = load_file(demo_checkpoint / "model.safetensors")
    stored = load_file(tmp_path / "q" / "layer.003.safetensors")
    for spec in LINEARS:
        expected = np.concatenate([floats[f"transformer.h.3.{name}"] for name in spec.tensors])
        assert stored[f"h.3.{spec.name}.weight"].dtype == np.float16
        np.testing.assert_array_equal(stored[f"h.3.{spec.name}.weight"], expected)


def refused(
    checkpoint: Path, out: Path, recipe_file: str, error: type[EdgeRTError], message: str
) -> None:
    """The run fails and leaves what stood at `out`: first nothing, then an earlier result."""
    for earlier in (False, True):
        if earlier:
            out.mkdir()
            (out / "quant.json").write_text("{}")
        with pytest.raises(error, match=message):
            quantize(checkpoint, out, recipe_file)
        assert [path.name for path in out.glob("*")] == ["quant.json"] * earlier
        assert not list(out.parent.glob(f".{out.name}*"))
    shutil.rmtree(out)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (b"", ConfigError, "has 0 tokens"),
        (b"short", ConfigError, "longer calibration.text or a smaller"),
        (b"\xff\xfe\x00binary" * 100, ConfigError, "not UTF-8 text"),
        (None, ConfigError, "cannot be read"),
    ],
    ids=["empty", "short", "binary", "missing"],
)
def test_calibration_text_faults_leave_the_target_alone(
    demo_checkpoint: Path,
    recipe: Callable[..., str],
    tmp_path: Path,
    text: bytes | None,
    error: type[EdgeRTError],
    message: str,
) -> None:
    own = tmp_path / "text.txt"
    if text is not None:
        own.write_bytes(text)
    file = Path(recipe())
    file.write_text(re.sub(r"text = .*", 'text = "text.txt"', file.read_text()))
    refused(demo_checkpoint, tmp_path / "q", str(file), error, message)


def test_a_tokenizer_of_another_model(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path
) -> None:
    path = random_gptj(64, 2, 16)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {k: v + 3000 for k, v in tokenizer["model"]["vocab"].items()}
    tokenizer["added_tokens"] = []
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(path, tmp_path / "q", recipe(), CheckpointError, "they do not belong together")


def test_a_checkpoint_that_does_not_exist(recipe: Callable[..., str], tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", tmp_path / "q", recipe(), CheckpointError, "does not exist")


@pytest.mark.parametrize("name", ["transformer.wte.weight", "lm_head.weight"])
def test_a_weight_beyond_fp16_is_refused(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path, name: str
) -> None:
    """Else it would be stored as infinity, unseen where no golden prompt holds the token."""
    path = random_gptj(64, 2, 16)
    tensors = load_file(path / "model.safetensors")
    tensors[name][3000, 5] = 1e5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    refused(path, tmp_path / "q", recipe(), CheckpointError, "more than FP16's 65504")
    quantize(path, tmp_path / "q", recipe("float"))
    outer = load_file(tmp_path / "q" / "outer.safetensors")
    assert outer[name.removeprefix("transformer.")][3000, 5] == 1e5


def test_a_failed_run_keeps_the_last_result(
    demo_checkpoint: Path, demo_quantized: Path, tmp_path: Path, recipe: Callable[..., str]
) -> None:
    out = tmp_path / "q"
    shutil.copytree(demo_quantized, out)
    broken = tmp_path / "broken"
    shutil.copytree(demo_checkpoint, broken)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        quantize(broken, out, recipe())
    assert (out / "quant.json").read_bytes() == (demo_quantized / "quant.json").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no quantized checkpoint"),
        ("{", "not valid JSON"),
        ('{"schema_version": 99}', "schema version 99"),
        ('{"schema_version": 1}', "schema version 1, .* quantize the checkpoint again"),
        ('{"schema_version": 2, "modle": {}}', "did you mean 'model'"),
    ],
)
def test_a_damaged_quantized_checkpoint(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "quant.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        QuantizedCheckpoint.open(tmp_path)


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_a_packed_checkpoint_is_taken_over_bit_by_bit(
    make: Make, demo_checkpoint: Path, recipe: Callable[..., str], tmp_path: Path, kind: str
) -> None:
    packed = make(kind)
    shutil.copy(demo_checkpoint / "tokenizer.json", packed.directory)
    info = quantize(packed.write(), tmp_path / "q", recipe("gptq", awq="true"))
    done = info.quantization
    assert (done.recipe, done.method, done.bits, done.group_size) == ("imported", kind, 4, 32)
    assert done.fp16_fraction == 0.0
    stored = QuantizedCheckpoint.open(tmp_path / "q")
    stored.check_files()
    for index in range(2):
        for name, modules in MODULES.items():
            sources = [packed.sources[f"transformer.h.{index}.{module}"] for module in modules]
            expected = np.concatenate([source.weight for source in sources])
            np.testing.assert_array_equal(stored.layer(index).linears[name].weight, expected)
    prompt = Golden.load(tmp_path / "q" / GOLDEN_FILE).prompts[0]
    logits = reference_logits(stored, prompt.tokens[None].astype(np.int64))
    np.testing.assert_allclose(logits[0, prompt.start :], prompt.logits, atol=1e-5)
    assert "Nothing was measured" in (tmp_path / "q" / "quality.html").read_text()


def test_a_recipe_that_is_not_used_is_named(
    make: Make, demo_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = make("awq")
    shutil.copy(demo_checkpoint / "tokenizer.json", packed.directory)
    arguments = ["quantize", str(packed.write()), "--out", str(tmp_path / "q")]
    assert main(arguments) == 0
    assert "was not used" not in capsys.readouterr().out
    assert main([*arguments, "--recipe", "int4"]) == 0
    assert "recipe int4 was not used: the checkpoint is quantized" in capsys.readouterr().out


def test_torch_and_numpy_agree(demo_checkpoint: Path, small_recipe: Path, tmp_path: Path) -> None:
    """What both give the text is within 1 %, and so are their errors; single levels may differ.

    A product summed in another order may tip a weight over; what follows it then differs too, and
    more so in each layer.
    """
    devices: tuple[DeviceName, ...] = ("cpu", "torch-cpu")
    found = []
    for device in devices:
        quantize(demo_checkpoint, tmp_path / device, str(small_recipe), device)
        found.append(QuantizedCheckpoint.open(tmp_path / device))
    tokens = np.random.default_rng(0).integers(1, 3072, (8, 64))
    original = Checkpoint.open(demo_checkpoint)
    exact = score_model(of_checkpoint(original), tokens, Device.open()).nll.sum()
    scores = [score_model(of_quantized(one), tokens, Device.open()).nll.sum() for one in found]
    assert abs(scores[0] - scores[1]) <= 0.01 * exact
    first, second = (one.info.layers for one in found)
    for a, b in zip(itertools.chain(*first), itertools.chain(*second), strict=True):
        assert a.name == b.name
        before, after = (np.array(list(r.output_error.values())) for r in (a, b))
        np.testing.assert_allclose(before, after, rtol=0.1)
        np.testing.assert_allclose(a.weight_error, b.weight_error, rtol=0.05)
    for a, b in zip(first[0][:2], second[0][:2], strict=True):  # before anything could pile up
        assert (a.awq_alpha, a.salient) == (b.awq_alpha, b.salient)
