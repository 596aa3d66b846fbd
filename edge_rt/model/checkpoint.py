"""Any Hugging Face GPT-J directory, read one tensor at a time.

Everything that can be wrong with names, shapes and dtypes is found at open, before a weight is
read; values are checked as they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_rt.errors import CheckpointError
from edge_rt.model.gptj import F32, ModelConfig, layer_tensors, outer_tensors
from edge_rt.model.weights import FLOATS, WeightEntry, find_weights
from edge_rt.storage import read_json

_PREFIX = "transformer."
_BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal mask, which older releases stored


class Checkpoint:
    """A GPT-J checkpoint whose tensors are all there in the expected shapes.

    Tensors carry the names of GPTJForCausalLM; a file may leave out the prefix `transformer.`.
    """

    def __init__(self, config: ModelConfig, entries: Mapping[str, WeightEntry]) -> None:
        self.config = config
        self._entries = entries

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Find and check every tensor; CheckpointError names what is missing or wrong."""
        config = ModelConfig.from_hf(read_config(directory))
        entries = name_entries(find_weights(directory), config)
        expected = _expected(config)
        for name, shape in expected.items():
            require(entries, name, shape).check(
                shape, FLOATS, "give the checkpoint before quantization"
            )
        refuse_strangers(entries, expected, config)
        return cls(config, entries)

    def tensor(self, name: str) -> F32:
        """Read one tensor; CheckpointError if it holds a value that float32 cannot."""
        return self._entries[name].floats()

    def layer(self, index: int) -> dict[str, F32]:
        """Read one layer's tensors, by their names within the layer (`attn.q_proj.weight`)."""
        return {
            name: self.tensor(f"transformer.h.{index}.{name}")
            for name in layer_tensors(self.config)
        }


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of a checkpoint; CheckpointError where there is none."""
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise CheckpointError(
            f"{directory} {found}, expected a directory with config.json and the weights"
        )
    if not (directory / "config.json").is_file():
        known = {"quant.json": "is a quantized checkpoint already", "manifest.json": "is a bundle"}
        of_ours = (what for file, what in known.items() if (directory / file).is_file())
        raise CheckpointError(
            f"{directory} {next(of_ours, 'has no config.json')}; give the directory of a Hugging "
            f"Face checkpoint"
        )
    return read_json(directory / "config.json", CheckpointError)


def name_entries(found: Mapping[str, WeightEntry], config: ModelConfig) -> dict[str, WeightEntry]:
    """What the files hold by its name in GPTJForCausalLM, without buffers, the tied head added."""
    entries = {
        key if key.startswith((_PREFIX, "lm_head.")) else _PREFIX + key: entry
        for key, entry in found.items()
        if not key.endswith(_BUFFERS)
    }
    if config.tie_word_embeddings and "transformer.wte.weight" in entries:
        entries.setdefault("lm_head.weight", entries["transformer.wte.weight"])
    return entries


def require(entries: Mapping[str, WeightEntry], name: str, shape: tuple[int, ...]) -> WeightEntry:
    """The entry of that name; CheckpointError says in which files it is missing."""
    if name not in entries:
        files = ", ".join(sorted({entry.file.path.name for entry in entries.values()}))
        raise CheckpointError(
            f"the checkpoint has no tensor {name}, expected with shape {list(shape)} in {files}"
        )
    return entries[name]


def refuse_strangers(
    entries: Mapping[str, WeightEntry], expected: Mapping[str, object], config: ModelConfig
) -> None:
    """CheckpointError for the first tensor that is not expected."""
    unexpected = sorted(entries.keys() - expected.keys())
    if unexpected:
        # Leaving out weights that the model was trained with would change its answers unseen.
        raise CheckpointError(
            f"{entries[unexpected[0]]} is no tensor of a GPT-J with {config.n_layer} layers; "
            f"check config.json, or merge adapters first"
        )


def _expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    layers = {
        f"transformer.h.{index}.{name}": shape
        for index in range(config.n_layer)
        for name, shape in layer_tensors(config).items()
    }
    return outer_tensors(config) | layers
