"""The ONNX Runtime engine: any CPU, with one key-value buffer per row, updated in place.

A row's single page is its slot in the buffers. Decoding runs over a contiguous range of slots,
since a session sees the caches as one tensor; a slot inside the range that does not decode in this
step runs along with a harmless token at its next free position, which the row's own next token
overwrites.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edge_rt.core import DecodeRow, Limits, PageCopy, PrefillChunk, SampledToken
from edge_rt.errors import EngineError, MissingLibraryError
from edge_rt.recipes import OrtOptions
from edge_rt.runtime.base import Sampled
from edge_rt.runtime.sampler import sample_rows

if TYPE_CHECKING:
    import onnxruntime

MODEL_FILE = "model.onnx"

_logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]


class OrtRunner:
    """Runs model.onnx of a bundle; see Runner for the contract."""

    def __init__(self, model: Path, limits: Limits, options: OrtOptions) -> None:
        """Load the model and allocate every slot; EngineError says what ONNX Runtime refused."""
        self._limits = limits
        try:
            self._memory = _Memory(_session(model, options), limits)
        except KeyError as error:
            raise EngineError(
                f"{model} has no input {error}: it is no model of edge_rt; "
                f"rebuild the bundle with edge-rt build"
            ) from error
        except (MemoryError, ValueError) as error:
            raise EngineError(
                f"no memory for {limits.max_rows} rows of {limits.max_context} tokens ({error}); "
                f"lower max_batch, max_rows or max_context in the engine recipe and build again"
            ) from error
        self._filled = np.zeros(limits.max_rows, np.int32)
        self._decode_steps: dict[tuple[int, int], _Step] = {}
        self._prefill_steps: dict[tuple[int, int], _Step] = {}
        self._fewest = self._fewest_slots()

    @property
    def limits(self) -> Limits:
        """Slots are pages of `max_context` tokens."""
        return self._limits

    def prefill(self, chunks: Sequence[PrefillChunk], *, want_logits: bool = False) -> Sampled:
        """One session run for each chunk."""
        tokens: list[SampledToken] = []
        logits = []
        for chunk in chunks:
            (slot,) = chunk.pages
            key = slot, len(chunk.tokens)
            step = self._prefill_steps.get(key) or _Step(self._memory, slot, 1, len(chunk.tokens))
            if len(chunk.tokens) == self._limits.prefill_chunk:  # a prompt's rest seldom recurs
                self._prefill_steps[key] = step
            step.input_ids[0] = chunk.tokens
            step.run(np.array([chunk.start], np.int32))
            self._filled[slot] = chunk.start + len(chunk.tokens)
            if chunk.draws:
                found = self._memory.logits[[slot] * len(chunk.draws)]
                tokens += sample_rows(found, chunk.draws)
                logits.append(found)
        return Sampled(tuple(tokens), np.concatenate(logits) if want_logits and logits else None)

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        """One session run for all rows."""
        slots = [row.pages[0] for row in rows]
        count = max(max(slots) - min(slots) + 1, self._fewest)
        first = min(*slots, self._limits.max_rows - count)
        step = self._decode_step(first, count)
        step.input_ids[:] = 0
        # A slot that runs along may be full; its row has ended, so any position will do.
        past = np.minimum(self._filled[first : first + count], self._limits.max_context - 1)
        for slot, row in zip(slots, rows, strict=True):
            step.input_ids[slot - first, 0] = row.token
            past[slot - first] = row.position
        step.run(past)
        for slot, row in zip(slots, rows, strict=True):
            self._filled[slot] = row.position + 1
        logits = self._memory.logits[slots]
        tokens = sample_rows(logits, [row.draw for row in rows])
        return Sampled(tokens, logits if want_logits else None)

    def _decode_step(self, first: int, count: int) -> _Step:
        if (first, count) not in self._decode_steps:
            self._decode_steps[first, count] = _Step(self._memory, first, count, 1)
        return self._decode_steps[first, count]

    def _fewest_slots(self) -> int:
        """The fewest slots of a step in which a row has the same bits as among all slots.

        On a CPU without AVX-512, or with other blocks than 32, INT4 products of one row are summed
        in another order than those of several: then no slot is ever computed alone.
        """
        most, token = self._limits.max_rows, self._limits.vocab_size // 2
        past = min(4, self._limits.max_context - 1)

        def logits(count: int, position: int) -> Array:
            step = self._decode_step(0, count)
            step.input_ids[:] = token
            step.run(np.full(count, position, np.int32))
            return self._memory.logits[:count].copy()

        for position in range(past):
            logits(most, position)
        expected = logits(most, past)[0]
        counts = sorted({1, 2, 3, most} & set(range(1, most + 1)))
        same = {count: bool((logits(count, past) == expected).all()) for count in counts}
        if not all(same[count] for count in counts if count >= min(2, most)):
            _logger.warning(
                "on this machine the last bits of a row depend on how many run along, so a request "
                "may get other tokens in a batch than alone"
            )
        return 1 if same[1] else min(2, most)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the first positions of slots."""
        for one in copies:
            caches = self._memory.caches
            caches[:, :, one.target, :, : one.tokens] = caches[:, :, one.source, :, : one.tokens]
            self._filled[one.target] = one.tokens

    def close(self) -> None:
        """Drop the session and the buffers."""
        self._decode_steps.clear()
        self._prefill_steps.clear()
        if hasattr(self, "_memory"):
            del self._memory


class _Memory:
    """The session and the buffers that its runs are bound to."""

    def __init__(self, session: onnxruntime.InferenceSession, limits: Limits) -> None:
        self.session = session
        inputs = {value.name: value for value in session.get_inputs()}
        self.takes_positions = "position_ids" in inputs
        self.layers = sum(name.startswith("k_cache.") for name in inputs)
        _, heads, _, head = inputs["k_cache.0"].shape
        # Slots that never ran must hold finite numbers: the caches are zeroed, not just allocated.
        self.caches = np.zeros(
            (self.layers, 2, limits.max_rows, heads, limits.max_context, head), np.float32
        )
        self.logits = np.zeros((limits.max_rows, limits.vocab_size), np.float32)


class _Step:
    """Inputs and outputs bound once for `count` slots from `first` and `tokens` tokens each."""

    def __init__(self, memory: _Memory, first: int, count: int, tokens: int) -> None:
        self._session = memory.session
        self._binding = memory.session.io_binding()
        self.input_ids = np.zeros((count, tokens), np.int32)
        self._seqlens_k = np.zeros(count, np.int32)
        self._total_len = np.zeros(1, np.int32)
        self._last_idx = np.full((count, 1), tokens - 1, np.int64)
        self._position_ids = np.zeros((count, tokens), np.int64)
        self._offsets = np.arange(tokens, dtype=np.int64)
        inputs: dict[str, Array] = {
            "input_ids": self.input_ids,
            "seqlens_k": self._seqlens_k,
            "total_len": self._total_len,
            "last_idx": self._last_idx,
        }
        if memory.takes_positions:
            inputs["position_ids"] = self._position_ids
        for name, array in inputs.items():
            self._bind(self._binding.bind_input, name, array)
        slots = slice(first, first + count)
        self.logits = memory.logits[slots]
        self._bind(self._binding.bind_output, "logits", self.logits)
        for layer in range(memory.layers):
            for kind, cache in zip("kv", memory.caches[layer], strict=True):
                # The same memory in and out: the new tokens are appended in place.
                self._bind(self._binding.bind_input, f"{kind}_cache.{layer}", cache[slots])
                self._bind(self._binding.bind_output, f"{kind}_out.{layer}", cache[slots])

    def run(self, past: npt.NDArray[np.int32]) -> None:
        """Append this step's tokens behind `past` [count] filled positions of each slot."""
        tokens = self.input_ids.shape[1]
        self._seqlens_k[:] = past + (tokens - 1)
        self._total_len[0] = past.max() + tokens
        self._position_ids[:] = past[:, None] + self._offsets
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises RuntimeError and its own classes
            raise EngineError(f"ONNX Runtime failed in a step: {error}") from error

    @staticmethod
    def _bind(bind: Callable[..., None], name: str, array: Array) -> None:
        bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def import_onnxruntime() -> ModuleType:
    """The library, with its own telemetry switched off unless the user has decided otherwise.

    Its wheels keep a device id in the home directory and report to their vendor by default.
    MissingLibraryError if it is not installed, EngineError if it is and cannot be loaded.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
        raise MissingLibraryError("onnxruntime", "ort") from error
    except ImportError as error:  # a library that it is linked to, for instance
        raise EngineError(f"onnxruntime is installed but cannot be loaded: {error}") from error
    return onnxruntime


def usable_cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _session(model: Path, options: OrtOptions) -> onnxruntime.InferenceSession:
    ort = import_onnxruntime()
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.threads or usable_cores()
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 4  # errors are raised, and reported by whoever catches them
    spinning = "1" if options.spinning else "0"
    settings.add_session_config_entry("session.intra_op.allow_spinning", spinning)
    try:
        return ort.InferenceSession(str(model), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises RuntimeError and its own classes
        raise EngineError(f"ONNX Runtime cannot load {model}: {error}") from error
