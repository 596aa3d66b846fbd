"""quantize: a Hugging Face checkpoint and a recipe -> a quantized checkpoint.

Streams layer by layer: one layer, what is measured of the activations that one group of its
linears reads, the calibration and golden activations, the embedding and the head are in memory at a
time. The golden logits come from the same pass, through the dequantized layers. A layer that is
written is done: a killed run goes on from the first that is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

import edge_rt
from edge_rt import recipes
from edge_rt.bundle import QuantizationSummary
from edge_rt.errors import ConfigError
from edge_rt.golden import GOLDEN_FILE, Golden, GoldenPrompt
from edge_rt.model import graph
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.device import Device, DeviceName
from edge_rt.model.gptj import (
    Head,
    Layer,
    ModelConfig,
    forward_head,
    forward_layer,
    head_from_tensors,
)
from edge_rt.quant import store
from edge_rt.quant.calibration import sample_sequences
from edge_rt.quant.layer import QuantizedLayer
from edge_rt.quant.pack import QuantizedLinear, to_half
from edge_rt.quant.packed import PackedCheckpoint
from edge_rt.quant.page import PAGE_FILE, render
from edge_rt.quant.report import LinearReport
from edge_rt.quant.scheme import is_packed
from edge_rt.quant.source import FloatLayers, Layers, PackedLayers, QuantizedLayers
from edge_rt.recipes import QuantRecipe
from edge_rt.storage import atomic_directory, list_files, read_text, sha256_file, write_json
from edge_rt.tokenizer import encode_for

GOLDEN_PROMPTS = 4
GOLDEN_TOKENS = 32
GOLDEN_KEPT = 8  # positions whose logits are kept: one of prefill, the rest of decoding

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class LayerRun:
    """How one layer went: `resumed` from an earlier run, or else what it took.

    `index` is None for the head, which follows the last layer.
    """

    index: int | None
    resumed: bool
    duration_s: float
    peak_rss_bytes: int


def quantize(
    source: Path,
    out: Path,
    recipe_name: str,
    device_name: DeviceName = "cpu",
    watch: Callable[[LayerRun], None] = lambda _run: None,
) -> store.QuantInfo:
    """Quantize the checkpoint in `source` into the directory `out`.

    A checkpoint that AutoAWQ or GPTQ has quantized is taken over as it is, whatever the recipe.
    Raises CheckpointError for a checkpoint and ConfigError for a recipe or device that cannot be
    used; `out` then stays as it was. `watch` is told of each layer that is done, and of the head.
    """
    _check_out(out)
    recipe, text = recipes.quantization(recipe_name)
    device = Device.open(device_name)
    packed = is_packed(source)
    checkpoint = PackedCheckpoint.open(source) if packed else Checkpoint.open(source)
    config = checkpoint.config
    tokens = text_tokens(text, source, config)
    key = _resume_key(source, recipe, text, device_name)
    with atomic_directory(out, store.MARKER, key) as partial:
        _keep_layers(partial, config)
        if isinstance(checkpoint, PackedCheckpoint):
            layers: Layers = PackedLayers(checkpoint)
        elif recipe.method == "float":
            layers = FloatLayers(checkpoint)
        else:
            layers = QuantizedLayers(checkpoint, recipe, device, tokens)
        weights, reports = _write_tensors(checkpoint, layers, tokens, partial, watch)
        graph.write_decoder(partial, config)
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        info = store.QuantInfo(
            model=config,
            recipe=recipe,
            quantization=_summary(checkpoint, recipe, recipe_name, text, weights),
            edge_rt_version=edge_rt.__version__,
            layers=reports,
            files=list_files(partial),
        )
        (partial / PAGE_FILE).write_text(render(info), encoding="utf-8")
        info = replace(info, files=list_files(partial))
        write_json(partial / store.MARKER, asdict(info))
    return info


def text_tokens(
    text: Path, tokenizer: Path, config: ModelConfig, what: str = "calibration text"
) -> npt.NDArray[np.int64]:
    """The text as tokens of the model; ConfigError or CheckpointError where they do not fit.

    `what` the text is called in messages.
    """
    ids = encode_for(tokenizer, config.vocab_size, read_text(text, what))
    return np.array(ids, np.int64)


def _keep_layers(partial: Path, config: ModelConfig) -> None:
    """Remove from a directory that is gone on with all but the layers: they are made again."""
    layers = {graph.layer_file(index) for index in range(config.n_layer)}
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in layers:
            path.unlink()


def _check_out(out: Path) -> None:
    """ConfigError for a directory that only the end of the work would find wrong."""
    place = Path(os.path.realpath(out))
    if not place.name:
        raise ConfigError(f"{out} is the root directory; choose another directory")
    try:
        str(place).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place} is not UTF-8, and ONNX reads no such path; choose another directory"
        ) from error


def _resume_key(source: Path, recipe: QuantRecipe, text: Path, device: str) -> str:
    """Of one job: with the same libraries it writes the same bytes, so it may be gone on with."""
    files = sorted(path for path in source.resolve().iterdir() if path.is_file())
    facts = {
        "source": [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files],
        "recipe": asdict(recipe),
        "text": sha256_file(text),
        "device": device,
        "edge_rt": edge_rt.__version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _summary(
    checkpoint: Checkpoint | PackedCheckpoint,
    recipe: QuantRecipe,
    recipe_name: str,
    text: Path,
    weights: _WeightCount,
) -> QuantizationSummary:
    fraction = weights.fp16 / weights.all
    if isinstance(checkpoint, PackedCheckpoint):
        return QuantizationSummary(
            store.IMPORTED, checkpoint.method, 4, checkpoint.group_size, fraction, None
        )
    is_float = recipe.method == "float"
    return QuantizationSummary(
        recipe=Path(recipe_name).name.removesuffix(".toml"),
        method=recipe.method,
        bits=16 if is_float else 4,
        group_size=None if is_float else recipe.group_size,
        fp16_fraction=fraction,
        calibration_sha256=None if is_float else sha256_file(text),
    )


def _write_tensors(
    checkpoint: Checkpoint | PackedCheckpoint,
    layers: Layers,
    tokens: npt.NDArray[np.int64],
    out: Path,
    watch: Callable[[LayerRun], None],
) -> tuple[_WeightCount, list[list[LinearReport]]]:
    config = checkpoint.config
    # An engine reads FP16; only the baseline keeps what FP16 cannot hold.
    to_stored = store.lossless if isinstance(layers, FloatLayers) else to_half
    stored_wte = to_stored(checkpoint.tensor("transformer.wte.weight"), "the embedding")
    original_head = head_from_tensors(checkpoint.tensor)
    to_stored(original_head.weight, "lm_head.weight")  # refused now rather than after hours
    golden_tokens = sample_sequences(tokens, GOLDEN_PROMPTS, min(GOLDEN_TOKENS, config.n_positions))
    golden = stored_wte[golden_tokens].astype(np.float32)
    weights, reports = _WeightCount(), []
    for index in tqdm(
        range(config.n_layer), desc="quantize", unit=" layer", leave=False, disable=None
    ):
        made, run = _layer(layers, out, index, config)
        golden = forward_layer(golden, made.layer, config)
        weights.add(made.layer, made.linears)
        reports.append(made.reports)
        watch(run)
    started = time.monotonic()
    _forget_peak_rss()
    head = layers.head(original_head)
    stored_head = to_stored(head.weight, "lm_head.weight")
    store.save_outer(out, stored_wte, head, stored_head, config)
    head = Head(head.ln_weight, head.ln_bias, stored_head.astype(np.float32), head.bias)
    logits = forward_head(golden[:, -GOLDEN_KEPT:], head, config)
    Golden.save(
        out / GOLDEN_FILE,
        [GoldenPrompt(t.astype(np.int32), y) for t, y in zip(golden_tokens, logits, strict=True)],
    )
    watch(LayerRun(None, False, time.monotonic() - started, _peak_rss_bytes()))
    return weights, reports


def _layer(
    layers: Layers, out: Path, index: int, config: ModelConfig
) -> tuple[QuantizedLayer, LayerRun]:
    """Layer `index`: made and written, or as an earlier run of the same job wrote it."""
    started = time.monotonic()
    _forget_peak_rss()
    resumed = store.has_layer(out, index)  # one that is damaged is made again
    if resumed:
        made = store.load_layer(out, index, config)
        layers.resume(index, made.layer)
    else:
        made = layers.make(index)
        store.save_layer(out, index, made)
    return made, LayerRun(index, resumed, time.monotonic() - started, _peak_rss_bytes())


def _forget_peak_rss() -> None:
    """Let the kernel measure the process's largest memory anew, where it does that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_rss_bytes() -> int:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass(slots=True)
class _WeightCount:
    """Weights of the linears, and how many of them stay in FP16."""

    all: int = 0
    fp16: int = 0

    def add(self, layer: Layer, quantized: Mapping[str, QuantizedLinear]) -> None:
        """Count one layer's."""
        for name, linear in layer.linears.items():
            rows, columns = linear.weight.shape
            self.all += rows * columns
            self.fp16 += rows * (len(quantized[name].salient) if name in quantized else columns)
