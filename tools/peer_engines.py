"""One engine's turn in `tools/peers`: it tries every setting, in a process of its own.

    python tools/peer_engines.py JOB.json OUT.json

Only this process loads the engine's libraries, so that no two thread pools fight for the cores.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from edge_rt.bundle import Bundle
from edge_rt.core import Request, SamplingParams, TokenEvent
from edge_rt.errors import EngineError
from edge_rt.loop import Loop
from edge_rt.runtime.engines import open_engine

Prompt = Sequence[int]
Tokens = list[list[int]]
Setting = dict[str, Any]
Row = dict[str, Any]  # a setting at one batch size: see `turn`


def settings_of(engine: str, cores: int, machine: str) -> list[Setting]:
    """What is tried for an engine, the most promising first."""
    threads = [cores, 1] if cores > 1 else [1]
    found: list[Setting]
    if engine == "edge_rt":
        found = [{"threads": n, "spinning": n > 1} for n in threads]
        if cores > 1:
            found.append({"threads": cores, "spinning": False})
    elif engine == "transformers":
        found = [{"threads": n, "cache": c} for c in ("dynamic", "static") for n in threads]
    elif engine == "torch_int8":
        x86 = machine.lower() in {"x86_64", "amd64"}
        found = [
            {"threads": n, "backend": backend, "cache": "dynamic"}
            for backend in (("x86", "onednn") if x86 else ("qnnpack", "onednn"))
            for n in threads
        ]
        found.append({**found[0], "cache": "static"})
    else:
        found = [
            {"compute_type": kind, "inter_threads": 1, "intra_threads": n}
            for kind in ("int8", "int8_float32")
            for n in threads
        ]
        if cores > 1:
            found.append({"compute_type": "int8", "inter_threads": cores, "intra_threads": 1})
    return found


def with_settings(bundle: Bundle, **ort: Any) -> Bundle:
    """The bundle with other settings of its engine: those that need no other weights."""
    recipe = bundle.manifest.recipe
    recipe = replace(recipe, ort=replace(recipe.ort, **ort))
    return replace(bundle, manifest=replace(bundle.manifest, recipe=recipe))


class EdgeRT:
    """The bundle's engine behind the real loop, scheduler and sampler."""

    def __init__(self, _checkpoint: Path, bundle: Path) -> None:
        self._bundle = Bundle.load(bundle)
        self._loop: Loop | None = None

    def use(self, setting: Setting) -> None:
        """Load the engine anew: its threads are fixed at load."""
        if self._loop is not None:
            self._loop.close()
        self._loop = Loop(open_engine(with_settings(self._bundle, **setting)))

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Tokens:
        """Submit all, step until idle; EngineError for a request that ended early."""
        assert self._loop is not None
        found: Tokens = [[] for _ in prompts]

        def reader(tokens: list[int]) -> Callable[[TokenEvent], None]:
            return lambda event: None if event.token is None else tokens.append(event.token.id)

        for row, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
            request = Request(f"row-{row}", tuple(prompt), SamplingParams(new_tokens))
            self._loop.submit(request, reader(tokens))
        self._loop.run_until_idle()
        if any(len(tokens) != new_tokens for tokens in found):
            raise EngineError("a request ended before it had all its tokens")
        return found


class Transformers:
    """GPTJForCausalLM in float32."""

    def __init__(self, checkpoint: Path, _made: Path) -> None:
        self._torch = import_module("torch")
        self._checkpoint = checkpoint
        self._cache: str | None = None
        self._model: Any = self._load()

    def use(self, setting: Setting) -> None:
        """Set the threads and the kind of key-value cache."""
        self._torch.set_num_threads(setting["threads"])
        self._cache = "static" if setting["cache"] == "static" else None

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Tokens:
        """One call of the library's own `generate`."""
        ids = self._torch.tensor([list(prompt) for prompt in prompts])
        with self._torch.inference_mode():
            found = self._model.generate(
                input_ids=ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                cache_implementation=self._cache,
            )
        return cast("Tokens", found[:, ids.shape[1] :].tolist())

    def _load(self) -> Any:
        library = import_module("transformers").GPTJForCausalLM
        return library.from_pretrained(self._checkpoint, dtype=self._torch.float32).eval()


class TorchInt8(Transformers):
    """The same model with every nn.Linear quantized: int8 weights, activations on the fly."""

    def __init__(self, checkpoint: Path, made: Path) -> None:
        self._backend = ""
        super().__init__(checkpoint, made)

    def use(self, setting: Setting) -> None:
        """As the float model; another backend packs the weights its own way."""
        super().use(setting)
        if setting["backend"] != self._backend:
            if self._backend:
                self._model = None  # before the next one is loaded
                self._model = self._load()
            self._backend = self._torch.backends.quantized.engine = setting["backend"]
            # In place, or the float model would stay beside the copy.
            self._torch.ao.quantization.quantize_dynamic(
                self._model, {self._torch.nn.Linear}, dtype=self._torch.qint8, inplace=True
            )


class CTranslate2:
    """What ctranslate2's converter made of the checkpoint, in int8."""

    def __init__(self, _checkpoint: Path, made: Path) -> None:
        self._library = import_module("ctranslate2")
        self._made = made
        self._text: list[str] = json.loads((made / "vocabulary.json").read_text("utf-8"))
        self._generator: Any = None
        self._workers = 1

    def use(self, setting: Setting) -> None:
        """Load the model anew: all of it is fixed at load."""
        self._generator = None  # before the next one is loaded
        self._generator = self._library.Generator(str(self._made), device="cpu", **setting)
        self._workers = setting["inter_threads"]

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Tokens:
        """One call; with several workers each takes its share of the rows."""
        found = self._generator.generate_batch(
            [[self._text[token] for token in prompt] for prompt in prompts],
            max_batch_size=-(-len(prompts) // self._workers),
            beam_size=1,
            sampling_topk=1,
            min_length=new_tokens,
            max_length=new_tokens,
            end_token=[],
            include_prompt_in_result=False,  # else the prompt is read token by token
        )
        return [list(one.sequences_ids[0]) for one in found]


ENGINES: dict[str, Callable[[Path, Path], Any]] = {
    "edge_rt": EdgeRT,
    "transformers": Transformers,
    "torch_int8": TorchInt8,
    "ctranslate2": CTranslate2,
}


def turn(job: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting once, at every batch size; and the first tokens after all prompts.

    `calls`: pairs of the rows of a call and the calls of a turn.
    """
    engine = ENGINES[job["engine"]](Path(job["checkpoint"]), Path(job["made"]))
    prompts, checked = job["prompts"], job["check_tokens"]
    rows: list[Row] = []
    first: dict[str, Tokens] = {}
    for setting in job["settings"]:
        engine.use(setting)
        for batch, calls in job["calls"]:
            if setting.get("inter_threads", 1) > batch:
                continue  # the other workers would have nothing to do
            parts = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
            found = measured(engine.generate, parts[:calls], job["new_tokens"])
            rows.append({"setting": setting, "batch": batch, **found})
            key = f"b{batch}"
            if checked and key not in first:
                first[key] = [row for part in parts for row in engine.generate(part, checked)]
    return {"rows": rows, "first": first}


def measured(
    generate: Callable[[Sequence[Prompt], int], Tokens],
    parts: Sequence[Sequence[Prompt]],
    new_tokens: int,
) -> Row:
    """Seconds of each call, for all tokens and for the first one alone, after a warm-up."""
    for count in (new_tokens, 1):
        generate(parts[0], count)
    seconds: dict[str, list[float]] = {"wall_s": [], "prefill_s": []}
    for part in parts:
        for key, count in (("wall_s", new_tokens), ("prefill_s", 1)):
            started = time.perf_counter()
            found = generate(part, count)
            seconds[key].append(time.perf_counter() - started)
            if any(len(tokens) != count for tokens in found):
                raise EngineError(f"a row ended before it had {count} tokens")
    return {"tokens": len(parts[0]) * new_tokens, "steps": new_tokens - 1, **seconds}


def main() -> None:
    """Read the job, write what was found."""
    job, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(turn(json.loads(job.read_text("utf-8")))), encoding="utf-8")


if __name__ == "__main__":
    main()
