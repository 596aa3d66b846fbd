"""build: a quantized checkpoint and an engine recipe -> a bundle."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from edge_rt import recipes
from edge_rt.build import ort
from edge_rt.bundle import MANIFEST, Manifest, ModelInfo, Tolerance, write_manifest
from edge_rt.errors import ConfigError
from edge_rt.golden import GOLDEN_FILE, Golden
from edge_rt.quant.store import QuantizedCheckpoint
from edge_rt.recipes import EngineRecipe
from edge_rt.storage import atomic_directory
from edge_rt.tokenizer import TOKENIZER_FILE


@dataclasses.dataclass(frozen=True, slots=True)
class _Engine:
    """What an engine needs at run time, and how far its logits may be off."""

    libraries: dict[str, str]
    tolerance: Tolerance | None


def build(quantized: Path, recipe_name: str, out: Path) -> Manifest:
    """Build a bundle into the directory `out`.

    Raises CheckpointError for a damaged checkpoint and ConfigError for a recipe that does not fit
    it; `out` then stays as it was.
    """
    recipe = recipes.engine(recipe_name)
    checkpoint = QuantizedCheckpoint.open(quantized)
    checkpoint.check_files()
    model = checkpoint.info.model
    info = ModelInfo(
        architecture="gptj",
        n_layer=model.n_layer,
        n_head=model.n_head,
        head_size=model.head_size,
        vocab_size=model.vocab_size,
        n_positions=model.n_positions,
        eos_token_id=model.eos_token_id,
    )
    if recipe.max_context is None:
        recipe = dataclasses.replace(recipe, max_context=model.n_positions)
    with atomic_directory(out, MANIFEST) as partial:
        engine = _build_engine(checkpoint, recipe, partial)
        shutil.copyfile(quantized / TOKENIZER_FILE, partial / TOKENIZER_FILE)
        if engine.tolerance is not None:
            _check_context(recipe, Golden.load(quantized / GOLDEN_FILE))
            shutil.copyfile(quantized / GOLDEN_FILE, partial / GOLDEN_FILE)
        return write_manifest(
            partial,
            model=info,
            recipe=recipe,
            quantization=checkpoint.info.quantization,
            libraries=engine.libraries,
            tolerance=engine.tolerance,
        )


def _build_engine(checkpoint: QuantizedCheckpoint, recipe: EngineRecipe, out: Path) -> _Engine:
    if recipe.engine == "null":
        return _Engine({}, None)
    if recipe.engine == "ort":
        ort.write_model(checkpoint.directory, out, recipe.ort)
        return _Engine({"onnxruntime": ort.OLDEST_RUNTIME}, ort.tolerance(recipe.ort))
    raise ConfigError(f"no builder for engine '{recipe.engine}'")


def _check_context(recipe: EngineRecipe, golden: Golden) -> None:
    """A bundle that could never be verified is not built."""
    needed = max(len(prompt.tokens) for prompt in golden.prompts)
    if recipe.max_context is not None and recipe.max_context < needed:
        raise ConfigError(
            f"max_context is {recipe.max_context}, but the golden prompts that the bundle is "
            f"verified with have {needed} tokens; raise it in the engine recipe"
        )
