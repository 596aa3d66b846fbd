"""Write a random GPT-J of GPT-J-6B's width but few layers, to try the quantizer at that size.

    python tools/gptj_cut.py --out cut --layers 2

Weights are normal with a few large channels, as trained models have them; the tokenizer is the
demo checkpoint's. Two layers are 1.6 GB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from edge_rt.model.gptj import ModelConfig, layer_tensors, outer_tensors
from edge_rt.recipes import data_dir

WIDTH, HEADS, ROTARY, VOCAB, POSITIONS = 4096, 16, 64, 50400, 2048
LARGE_CHANNELS = 0.005  # share of ln_1's channels that are twenty times as large


def tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A random tensor of float16."""
    if name.endswith("ln_1.weight"):
        gain = np.where(rng.random(shape) < LARGE_CHANNELS, 20.0, 1.0)
        return gain.astype(np.float16)
    if name.endswith("ln_f.weight"):
        return np.ones(shape, np.float16)
    values = rng.standard_normal(shape, np.float32)
    values *= 0.02
    return values.astype(np.float16)


def main() -> None:
    """Write config.json, the weights in one shard a layer, and the tokenizer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    table = {
        "model_type": "gptj",
        "activation_function": "gelu_new",
        "n_embd": WIDTH,
        "n_layer": options.layers,
        "n_head": HEADS,
        "rotary_dim": ROTARY,
        "vocab_size": VOCAB,
        "n_positions": POSITIONS,
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    }
    config = ModelConfig.from_hf(table)
    if options.out.exists():
        sys.exit(f"{options.out} exists; name a new directory")
    options.out.mkdir(parents=True)
    (options.out / "config.json").write_text(json.dumps(table, indent=1) + "\n")
    shutil.copy(data_dir("engines") / "demo" / "tokenizer.json", options.out)
    rng = np.random.default_rng(0)
    shards = {"outer": outer_tensors(config)}
    for index in range(config.n_layer):
        shards[f"layer-{index}"] = {
            f"transformer.h.{index}.{name}": shape for name, shape in layer_tensors(config).items()
        }
    weight_map = {}
    for shard, shapes in shards.items():
        file = f"{shard}.safetensors"
        save_file({n: tensor(n, s, rng) for n, s in shapes.items()}, options.out / file)
        weight_map |= dict.fromkeys(shapes, file)
    index_file = options.out / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1) + "\n")


if __name__ == "__main__":
    main()
