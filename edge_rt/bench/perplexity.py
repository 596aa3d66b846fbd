"""Perplexity of a model or an engine on a text, and how two of them compare.

Protocol: the text is encoded whole with the target's own tokenizer and cut into windows of
`context` tokens without overlap; a remainder is dropped. Within a window each token but the first
is predicted from those before it in the window. Perplexity is exp of the mean negative
log-likelihood over all predicted tokens. Greedy agreement is the share of predicted positions at
which two targets' most likely next tokens are the same, both fed with the text.

Intervals are percentile bootstraps (Efron, 1979) over windows, since the tokens of one window are
not independent: 95 %, 1,000 resamples, a fixed seed; the difference of two targets is resampled
in pairs, the same windows for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace
from array_api_compat import device as array_device

from edge_rt.bundle import Bundle
from edge_rt.core import DecodeRow, Draw, PrefillChunk, SamplingParams
from edge_rt.errors import CheckpointError, ConfigError, EngineError
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.device import Array, Device
from edge_rt.model.gptj import (
    Head,
    Layer,
    ModelConfig,
    forward_head,
    forward_layer,
    head_from_tensors,
    layer_from_tensors,
)
from edge_rt.quant.layer import on_device
from edge_rt.quant.store import QuantizedCheckpoint
from edge_rt.runtime.base import Runner
from edge_rt.runtime.engines import open_engine

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Interval = tuple[float, float]

RESAMPLES = 1000
COVERAGE = 0.95
SEED = 0

BLOCK_BYTES = 1 << 30  # hidden state that waits while one layer works through it

_DAMAGED = (
    "{} holds values that are not finite, so there is no perplexity: the weights are damaged or "
    "too large for float32; get the checkpoint again"
)


class Progress(Protocol):
    """Told about work that is done."""

    def __call__(self, share: float, /) -> object:
        """`share` of the whole is done; all calls of a run add up to 1."""
        ...


@dataclass(frozen=True, slots=True)
class FloatModel:
    """A GPT-J whose weights come as float32 NumPy arrays when asked for, one layer at a time."""

    config: ModelConfig
    embedding: Callable[[], F32]
    layer: Callable[[int], Layer]
    head: Callable[[], Head]


def of_checkpoint(checkpoint: Checkpoint) -> FloatModel:
    """A Hugging Face checkpoint."""
    return FloatModel(
        checkpoint.config,
        lambda: checkpoint.tensor("transformer.wte.weight"),
        lambda index: layer_from_tensors(checkpoint.layer(index)),
        lambda: head_from_tensors(checkpoint.tensor),
    )


def of_quantized(checkpoint: QuantizedCheckpoint) -> FloatModel:
    """A quantized checkpoint, dequantized."""
    return FloatModel(
        checkpoint.info.model, checkpoint.embedding, checkpoint.layer, checkpoint.head
    )


@dataclass(frozen=True, slots=True)
class Score:
    """What a target said about `windows` [windows, context].

    `nll` [windows] is each window's negative log-likelihood, summed over its predicted tokens, in
    nats; `greedy` [windows, context - 1] the most likely token at each predicted position.
    """

    windows: I64
    nll: F64
    greedy: I32

    @property
    def predicted_tokens(self) -> int:
        """All tokens but the first of each window."""
        return self.greedy.size

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood; inf where float64 cannot hold it."""
        return float(_perplexity(self.nll.sum() / self.predicted_tokens))

    @property
    def top1_accuracy(self) -> float:
        """Share of predicted positions at which the text goes on with the most likely token."""
        return float((self.greedy == self.windows[:, 1:]).mean())

    def interval(self, seed: int = SEED) -> Interval | None:
        """95 % bootstrap interval of the perplexity; None with fewer than 2 windows."""
        return None if len(self.nll) < 2 else percentiles(_resampled([self], seed)[0])


def windows(tokens: Sequence[int] | I64, context: int) -> I64:
    """`tokens` cut into rows [windows, context] without overlap; the remainder is dropped.

    ConfigError for a context that predicts nothing and for a text shorter than one window.
    """
    if context < 2:
        raise ConfigError(f"a context of {context} token predicts nothing; give 2 or more")
    count = len(tokens) // context
    if count == 0:
        raise ConfigError(
            f"{len(tokens)} tokens are fewer than one window of {context}; "
            f"give more text (and --tokens), or a smaller --context"
        )
    return np.asarray(tokens, np.int64)[: count * context].reshape(count, context)


def agreement(a: Score, b: Score) -> float:
    """Share of predicted positions at which both have the same most likely token."""
    _check_pair(a, b)
    return float((a.greedy == b.greedy).mean())


def difference(a: Score, b: Score, seed: int = SEED) -> tuple[float, Interval | None]:
    """Perplexity of `a` less that of `b`, and its 95 % interval, resampled in pairs.

    The interval is None with fewer than 2 windows.
    """
    _check_pair(a, b)
    found = a.perplexity - b.perplexity
    if len(a.nll) < 2:
        return found, None
    of_a, of_b = _resampled([a, b], seed)
    return found, percentiles(of_a - of_b)


def _check_pair(a: Score, b: Score) -> None:
    assert np.array_equal(a.windows, b.windows), "the two were not scored on the same windows"


def _perplexity(mean_nll: F64) -> F64:
    with np.errstate(over="ignore"):
        return np.exp(mean_nll)


def _resampled(scores: Sequence[Score], seed: int) -> F64:
    """Perplexities [scores, resamples], every score on the same resampled windows."""
    nll = np.stack([score.nll for score in scores])
    predicted = scores[0].predicted_tokens
    rng = np.random.default_rng(seed)
    means = [
        nll[:, rng.integers(nll.shape[1], size=nll.shape[1])].sum(1) / predicted
        for _ in range(RESAMPLES)
    ]
    return _perplexity(np.stack(means, axis=1))


def percentiles(resampled: F64) -> Interval:
    """The interval that holds COVERAGE of the resampled values."""
    tail = 50.0 * (1.0 - COVERAGE)
    with np.errstate(invalid="ignore"):  # between two infinities; the caller gets nan
        low, high = np.percentile(resampled, [tail, 100.0 - tail])
    return float(low), float(high)


def _ignore(_share: float) -> None:
    pass


def score_model(
    model: FloatModel, windows: I64, device: Device, progress: Progress = _ignore
) -> Score:
    """Score `windows` [windows, context] with the reference forward, in float32.

    Holds one layer, BLOCK_BYTES of hidden state and one small batch at a time; a text of more than
    that is worked off block by block, and every layer is read once for each. CheckpointError names
    the layer whose output is not finite.
    """
    count, context = windows.shape
    per_window = 4 * context * model.config.n_embd
    size = max(1, BLOCK_BYTES // per_window)
    parts = [
        _score_block(model, windows[i : i + size], device, lambda share: progress(share / count))
        for i in range(0, count, size)
    ]
    nll, greedy = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Score(windows, nll.sum(1), greedy)


def _score_block(
    model: FloatModel, windows: I64, device: Device, done: Callable[[float], object]
) -> tuple[F64, I32]:
    """Negative log-likelihoods and greedy tokens, each [windows, context - 1].

    `done` is told how many windows' worth of work is done.
    """
    config, targets = model.config, windows[:, 1:]
    size = max(1, device.batch_tokens // windows.shape[1])
    steps = [slice(i, i + size) for i in range(0, len(windows), size)]
    embedding = model.embedding()
    hidden = [device.array(embedding[windows[step]]) for step in steps]
    del embedding
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
        for index in range(config.n_layer):
            layer = on_device(model.layer(index), device)
            for place, step in enumerate(steps):
                hidden[place] = forward_layer(hidden[place], layer, config)
                if not _finite(hidden[place]):
                    raise CheckpointError(_DAMAGED.format(f"the output of layer {index}"))
                done(len(windows[step]) / (config.n_layer + 1))
        del layer
        head = _head_on_device(model.head(), device)
        nll = np.empty(targets.shape, np.float64)
        greedy = np.empty(targets.shape, np.int32)
        for x, step in zip(hidden, steps, strict=True):
            # What a window's last token predicts lies outside of it.
            found = _score_hidden(x[:, :-1], targets[step], head, config, device)
            nll[step], greedy[step] = found
            done(len(windows[step]) / (config.n_layer + 1))
    return nll, greedy


def _score_hidden(
    x: Array, targets: I64, head: Head, config: ModelConfig, device: Device
) -> tuple[F64, I32]:
    flat, wanted = x.reshape(-1, x.shape[-1]), device.array(targets.reshape(-1))
    parts = []
    size = max(1, device.batch_tokens // 4)  # logits are wider than hidden states
    for i in range(0, len(flat), size):
        logits = forward_head(flat[i : i + size], head, config)
        if not _finite(logits):
            raise CheckpointError(_DAMAGED.format("what lm_head gives"))
        found = _score_logits(logits, wanted[i : i + size])
        parts.append([device.numpy(value) for value in found])
    nll, greedy = (np.concatenate(part).reshape(targets.shape) for part in zip(*parts, strict=True))
    return nll, greedy.astype(np.int32)


def _score_logits(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Negative log-likelihood of `targets` [rows] in float64 and the greedy tokens, both [rows].

    `logits` [rows, vocab] are overwritten: each pass over them counts.
    """
    xp = array_namespace(logits)
    rows = xp.arange(len(targets), device=array_device(logits))
    greedy = xp.argmax(logits, axis=-1)
    logits -= logits[rows, greedy][:, None]
    wanted = xp.astype(logits[rows, targets], xp.float64)
    xp.exp(logits, out=logits)
    return xp.log(xp.astype(xp.sum(logits, axis=-1), xp.float64)) - wanted, greedy


def _finite(values: Array) -> bool:
    xp = array_namespace(values)
    # Two reductions need no array of booleans; a NaN comes out of both.
    return bool(xp.isfinite(xp.max(values)) & xp.isfinite(xp.min(values)))


def _head_on_device(head: Head, device: Device) -> Head:
    return Head(*map(device.array, (head.ln_weight, head.ln_bias, head.weight, head.bias)))


def require_arithmetic(bundle: Bundle) -> None:
    """ConfigError for a bundle whose engine computes nothing."""
    if bundle.manifest.recipe.engine == "null":
        raise ConfigError(
            f"{bundle.path} has the engine null, which computes nothing; "
            f"build the model with another engine recipe"
        )


def score_bundle(bundle: Bundle, windows: I64, progress: Progress = _ignore) -> Score:
    """Score `windows` [windows, context] with the bundle's engine, fed with the text.

    ConfigError for an engine that computes nothing and for windows beyond its max_context,
    EngineError for logits that are not finite.
    """
    require_arithmetic(bundle)
    engine = open_engine(bundle)
    try:
        return score_engine(engine, windows, progress)
    finally:
        engine.close()


def score_engine(runner: Runner, windows: I64, progress: Progress = _ignore) -> Score:
    """As score_bundle, with an engine that is open and has no work.

    As many windows side by side as it has rows, each decoded from its second token on.
    """
    limits = runner.limits
    count, context = windows.shape
    if context > limits.max_context:
        raise ConfigError(
            f"windows of {context} tokens do not fit the bundle's max_context of "
            f"{limits.max_context}; give a smaller --context, or raise max_context in the engine "
            f"recipe and build again"
        )
    pages = -(-context // limits.page_tokens)  # of one row
    rows = min(
        limits.max_rows, limits.max_requests, limits.max_tokens_per_step, limits.pages // pages
    )
    tables = [tuple(range(row * pages, (row + 1) * pages)) for row in range(rows)]
    nll = np.empty((count, context - 1), np.float64)
    greedy = np.empty((count, context - 1), np.int32)
    for first in range(0, count, rows):
        block = windows[first : first + rows]
        for position in range(context - 1):
            logits = _step(runner, block[:, position], position, tables[: len(block)])
            if not _finite(logits):
                raise EngineError(
                    f"the engine's logits at position {position} are not finite: the bundle or the "
                    f"engine is damaged; check it with edge-rt verify"
                )
            found = _score_logits(logits, block[:, position + 1])
            nll[first : first + rows, position], greedy[first : first + rows, position] = found
            progress(len(block) / (count * (context - 1)))
    return Score(windows, nll.sum(1), greedy)


def _step(runner: Runner, tokens: I64, position: int, tables: Sequence[tuple[int, ...]]) -> F32:
    """Logits [rows, vocab] behind `tokens` [rows], each at `position` of its row."""
    greedy = Draw(SamplingParams(), 0, (), ())
    rows = [(f"window-{row}", pages) for row, pages in enumerate(tables)]
    if position == 0:
        sampled = runner.prefill(
            [
                PrefillChunk(name, pages, 0, (token,), (greedy,))
                for (name, pages), token in zip(rows, tokens.tolist(), strict=True)
            ],
            want_logits=True,
        )
    else:
        sampled = runner.decode(
            [
                DecodeRow(name, pages, position, token, greedy)
                for (name, pages), token in zip(rows, tokens.tolist(), strict=True)
            ],
            want_logits=True,
        )
    assert sampled.logits is not None
    return sampled.logits
