"""quantize: a Hugging Face checkpoint and a recipe -> a quantized checkpoint.

Streams layer by layer: at any time one float layer, the calibration activations and the golden
activations are in memory. The golden logits come from the same pass, through the dequantized
layers.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

import edge_rt
from edge_rt import recipes
from edge_rt.bundle import QuantizationSummary
from edge_rt.errors import CheckpointError, ConfigError
from edge_rt.golden import GOLDEN_FILE, Golden, GoldenPrompt
from edge_rt.model import graph
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.gptj import (
    F32,
    LINEARS,
    Head,
    Layer,
    Linear,
    ModelConfig,
    forward_head,
    forward_layer,
    layer_from_tensors,
)
from edge_rt.quant import store
from edge_rt.quant.calibration import ChannelMeans, observe_layer, sample_sequences
from edge_rt.quant.pack import QuantizedLinear, quantize_rtn, to_half
from edge_rt.quant.salient import salient_channels
from edge_rt.recipes import QuantRecipe
from edge_rt.storage import atomic_directory, list_files, sha256_file, write_json
from edge_rt.tokenizer import Tokenizer

GOLDEN_PROMPTS = 4
GOLDEN_TOKENS = 32
GOLDEN_KEPT = 8  # positions whose logits are kept: one of prefill, the rest of decoding

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(slots=True)
class _WeightCount:
    """Weights of the linears, and how many of them stay in FP16."""

    all: int = 0
    fp16: int = 0


def quantize(source: Path, out: Path, recipe_name: str) -> store.QuantInfo:
    """Quantize the checkpoint in `source` into the directory `out`.

    Raises CheckpointError for a checkpoint and ConfigError for a recipe that cannot be used;
    `out` then stays as it was.
    """
    recipe, text = recipes.quantization(recipe_name)
    checkpoint = Checkpoint.open(source)
    config = checkpoint.config
    tokens = calibration_tokens(text, source, config)
    with atomic_directory(out, store.MARKER) as partial:
        weights = _write_tensors(checkpoint, tokens, recipe, partial)
        graph.write_decoder(partial, config)
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        float_only = recipe.method == "float"
        info = store.QuantInfo(
            model=config,
            recipe=recipe,
            quantization=QuantizationSummary(
                recipe=Path(recipe_name).name.removesuffix(".toml"),
                method=recipe.method,
                bits=16 if float_only else 4,
                group_size=None if float_only else recipe.group_size,
                fp16_fraction=weights.fp16 / weights.all,
                calibration_sha256=None if float_only else sha256_file(text),
            ),
            edge_rt_version=edge_rt.__version__,
            files=list_files(partial),
        )
        write_json(partial / store.MARKER, asdict(info))
    return info


def calibration_tokens(text: Path, tokenizer: Path, config: ModelConfig) -> npt.NDArray[np.int64]:
    """The text as tokens of the model; ConfigError or CheckpointError where they do not fit."""
    try:
        content = text.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"calibration text {text} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"calibration text {text} is not UTF-8 text: {error}") from error
    tokens = np.array(Tokenizer.load(tokenizer).encode(content), np.int64)
    if tokens.size and tokens.max() >= config.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {tokenizer} yields token {tokens.max()}, but the model's vocabulary "
            f"has {config.vocab_size}; they do not belong together"
        )
    return tokens


def _write_tensors(
    checkpoint: Checkpoint, tokens: npt.NDArray[np.int64], recipe: QuantRecipe, out: Path
) -> _WeightCount:
    config = checkpoint.config
    quantizing = recipe.method != "float"
    wte = checkpoint.tensor("transformer.wte.weight")
    stored_wte = to_half(wte, "the embedding") if quantizing else store.lossless(wte)
    golden_tokens = sample_sequences(tokens, GOLDEN_PROMPTS, min(GOLDEN_TOKENS, config.n_positions))
    golden = stored_wte[golden_tokens].astype(np.float32)
    shown = recipe.calibration
    length = min(shown.tokens, config.n_positions)
    hidden = wte[sample_sequences(tokens, shown.sequences, length)] if quantizing else wte[:0]
    weights = _WeightCount()
    for index in tqdm(
        range(config.n_layer), desc="quantize", unit=" layer", leave=False, disable=None
    ):
        layer = layer_from_tensors(checkpoint.layer(index))
        quantized: dict[str, QuantizedLinear] = {}
        if quantizing:
            # Calibrated on the float layers' outputs: each layer is measured on its own.
            hidden, means = observe_layer(hidden, layer, config)
            quantized = _quantize_layer(layer, means, recipe)
        store.save_layer(out, index, layer, quantized)
        golden = forward_layer(golden, _dequantized(layer, quantized), config)
        _count(weights, layer, quantized)
    head = _head(checkpoint)
    stored_head = (
        to_half(head.weight, "lm_head.weight") if quantizing else store.lossless(head.weight)
    )
    store.save_outer(out, stored_wte, head, stored_head, config)
    head = Head(head.ln_weight, head.ln_bias, stored_head.astype(np.float32), head.bias)
    logits = forward_head(golden[:, -GOLDEN_KEPT:], head, config)
    Golden.save(
        out / GOLDEN_FILE,
        [GoldenPrompt(t.astype(np.int32), y) for t, y in zip(golden_tokens, logits, strict=True)],
    )
    return weights


def _quantize_layer(
    layer: Layer, means: dict[str, ChannelMeans], recipe: QuantRecipe
) -> dict[str, QuantizedLinear]:
    salient = {
        reads: salient_channels(seen.mean, recipe.outlier_fraction) for reads, seen in means.items()
    }
    return {
        spec.name: quantize_rtn(
            layer.linears[spec.name].weight,
            salient[spec.reads],
            recipe.group_size,
            layer.linears[spec.name].bias,
        )
        for spec in LINEARS
    }


def _dequantized(layer: Layer, quantized: dict[str, QuantizedLinear]) -> Layer:
    """The layer as an engine computes it."""
    linears = dict(layer.linears)
    for name, linear in quantized.items():
        weight = linear.dequantize(linears[name].weight.shape[1])
        linears[name] = Linear(weight, linear.bias, linear.post_scale)
    return Layer(layer.ln_weight, layer.ln_bias, linears)


def _count(weights: _WeightCount, layer: Layer, quantized: dict[str, QuantizedLinear]) -> None:
    for name, linear in layer.linears.items():
        rows, columns = linear.weight.shape
        weights.all += rows * columns
        kept = len(quantized[name].salient) if name in quantized else columns
        weights.fp16 += rows * kept


def _head(checkpoint: Checkpoint) -> Head:
    names = ("transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight", "lm_head.bias")
    ln_weight, ln_bias, weight, bias = (checkpoint.tensor(name) for name in names)
    return Head(ln_weight, ln_bias, weight, bias)


def reference_logits(checkpoint: store.QuantizedCheckpoint, tokens: npt.NDArray[np.int64]) -> F32:
    """Logits [sequences, tokens, vocab] of the dequantized float32 reference."""
    config = checkpoint.info.model
    hidden = checkpoint.embedding()[tokens]
    for index in range(config.n_layer):
        hidden = forward_layer(hidden, checkpoint.layer(index), config)
    return forward_head(hidden, checkpoint.head(), config)
