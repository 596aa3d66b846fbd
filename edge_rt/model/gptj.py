"""GPT-J as data (shapes, tensor names, which linears read the same activations) and as arithmetic.

The arithmetic follows the GPT-J-6B release (Wang and Komatsuzaki, 2021): a parallel block
`x + attention(ln_1(x)) + mlp(ln_1(x))`, rotary embedding of the first `rotary_dim` elements of
each head in interleaved pairs (Su et al., 2021), and the tanh form of GELU. It runs in float32
over whole sequences without a cache: the reference that engines are judged by, not an engine.
It takes NumPy arrays or those of another Device, and gives the same kind back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, device

from edge_rt.errors import CheckpointError
from edge_rt.model.device import Array

F32 = npt.NDArray[np.float32]
T = TypeVar("T")

_MOST_POSITIONS = 1 << 20  # the rotary tables are held in memory
_GELU_TANH_NAMES = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of one GPT-J, in Hugging Face's names."""

    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int
    rotary_dim: int
    vocab_size: int
    n_positions: int
    layer_norm_epsilon: float
    tie_word_embeddings: bool
    eos_token_id: int | None

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.n_embd // self.n_head

    @classmethod
    def from_hf(cls, table: Mapping[str, Any]) -> ModelConfig:
        """Take the sizes from a Hugging Face config.json; CheckpointError names what is wrong."""
        if table.get("model_type") != "gptj":
            raise CheckpointError(
                f"config.json says model_type {table.get('model_type')!r}; "
                f"edge_rt reads 'gptj' checkpoints"
            )
        activation = table.get("activation_function", "gelu_new")
        if activation not in _GELU_TANH_NAMES:
            raise CheckpointError(
                f"config.json says activation_function {activation!r}; GPT-J has 'gelu_new'"
            )
        sizes = {key: _positive(table, key) for key in _SIZES}
        config = cls(
            **sizes,
            n_inner=4 * sizes["n_embd"]
            if not table.get("n_inner")
            else _positive(table, "n_inner"),
            layer_norm_epsilon=_typed(table, "layer_norm_epsilon", float, 1e-5),
            tie_word_embeddings=_typed(table, "tie_word_embeddings", bool, False),
            eos_token_id=(
                None
                if "eos_token_id" in table and table["eos_token_id"] is None
                else _typed(table, "eos_token_id", int, 50256)
            ),
        )
        if config.n_positions > _MOST_POSITIONS:
            raise CheckpointError(
                f"config.json: n_positions {config.n_positions} is more than {_MOST_POSITIONS}; "
                f"GPT-J-6B has 2048"
            )
        if config.n_embd % config.n_head:
            raise CheckpointError(
                f"config.json: n_embd {config.n_embd} is not a multiple of n_head {config.n_head}"
            )
        if config.rotary_dim % 2 or config.rotary_dim > config.head_size:
            raise CheckpointError(
                f"config.json: rotary_dim {config.rotary_dim} must be even and at most the head "
                f"size {config.head_size}"
            )
        return config


_SIZES = ("n_embd", "n_layer", "n_head", "rotary_dim", "vocab_size", "n_positions")


def _positive(table: Mapping[str, Any], key: str) -> int:
    value = table.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def _typed(table: Mapping[str, Any], key: str, kind: type[T], default: T) -> T:
    value = table.get(key, default)
    if type(value) is not kind:
        raise CheckpointError(
            f"config.json: {key} must be of type {kind.__name__}, found {value!r}"
        )
    return value


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear node of the decoder layer.

    `tensors` are the Hugging Face weights [out, in] stacked along the outputs; `reads` names the
    activations that it multiplies: linears with the same `reads` share salient channels and scales.
    `residual`: its output is added to the residual stream.
    """

    name: str
    tensors: tuple[str, ...]
    bias: str | None
    reads: str
    gelu: bool = False
    residual: bool = False


LINEARS = (
    LinearSpec(
        "attn_qkv",
        ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight"),
        None,
        "ln_1",
    ),
    LinearSpec("mlp_fc_in", ("mlp.fc_in.weight",), "mlp.fc_in.bias", "ln_1", gelu=True),
    LinearSpec("attn_out", ("attn.out_proj.weight",), None, "attention", residual=True),
    LinearSpec("mlp_fc_out", ("mlp.fc_out.weight",), "mlp.fc_out.bias", "gelu", residual=True),
)


def in_features(spec: LinearSpec, config: ModelConfig) -> int:
    """Input channels of the linear."""
    return config.n_inner if spec.reads == "gelu" else config.n_embd


def value_rows(config: ModelConfig) -> slice:
    """The rows of attn_qkv that are V: row i makes channel i of what attn_out reads."""
    return slice(2 * config.n_embd, 3 * config.n_embd)


def layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name (without `transformer.h.N.`) -> shape of every tensor of one layer."""
    d, inner = config.n_embd, config.n_inner
    square = {f"attn.{name}_proj.weight": (d, d) for name in ("q", "k", "v", "out")}
    return {
        "ln_1.weight": (d,),
        "ln_1.bias": (d,),
        **square,
        "mlp.fc_in.weight": (inner, d),
        "mlp.fc_in.bias": (inner,),
        "mlp.fc_out.weight": (d, inner),
        "mlp.fc_out.bias": (d,),
    }


def outer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor outside the layers."""
    d, vocab = config.n_embd, config.vocab_size
    return {
        "transformer.wte.weight": (vocab, d),
        "transformer.ln_f.weight": (d,),
        "transformer.ln_f.bias": (d,),
        "lm_head.weight": (vocab, d),
        "lm_head.bias": (vocab,),
    }


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear's float32 weight [out, in], bias [out] and post_scale [out] (behind GELU)."""

    weight: Array
    bias: Array | None = None
    post_scale: Array | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer in float32; `linears` by LinearSpec.name."""

    ln_weight: Array
    ln_bias: Array
    linears: Mapping[str, Linear]


@dataclass(frozen=True, slots=True)
class Head:
    """What follows the last layer: final norm [n_embd], weight [vocab, n_embd], bias [vocab]."""

    ln_weight: Array
    ln_bias: Array
    weight: Array
    bias: Array


def head_from_tensors(tensor: Callable[[str], F32]) -> Head:
    """What `tensor` gives for the names of GPTJForCausalLM behind the last layer."""
    norm, head = "transformer.ln_f", "lm_head"
    names = (f"{norm}.weight", f"{norm}.bias", f"{head}.weight", f"{head}.bias")
    return Head(*map(tensor, names))


def layer_from_tensors(tensors: Mapping[str, F32]) -> Layer:
    """Stack a checkpoint layer's tensors into the decoder's linears."""
    return Layer(
        tensors["ln_1.weight"],
        tensors["ln_1.bias"],
        {
            spec.name: Linear(
                np.concatenate([tensors[name] for name in spec.tensors]),
                tensors[spec.bias] if spec.bias else None,
            )
            for spec in LINEARS
        },
    )


@functools.lru_cache(maxsize=8)
def rotary_tables(config: ModelConfig) -> tuple[F32, F32]:
    """Cosines and sines, each [n_positions, rotary_dim / 2]."""
    exponent = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    angle = np.outer(np.arange(config.n_positions, dtype=np.float64), 10000.0**-exponent)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    """Normalize the last axis."""
    xp = array_namespace(x)
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    variance = xp.mean(centred * centred, axis=-1, keepdims=True)
    return centred / xp.sqrt(variance + epsilon) * weight + bias


def gelu(x: Array) -> Array:
    """GELU in its tanh form (Hendrycks and Gimpel, 2016)."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1.0 + array_namespace(x).tanh(inner))


def apply_linear(x: Array, linear: Linear, *, with_gelu: bool) -> Array:
    """`x` [..., in] -> [..., out]."""
    # One product over all rows: NumPy would multiply a stack of matrices one by one.
    y = (x.reshape(-1, x.shape[-1]) @ linear.weight.T).reshape(*x.shape[:-1], -1)
    if linear.bias is not None:
        y += linear.bias
    if with_gelu:
        y = gelu(y)
    if linear.post_scale is not None:
        y *= linear.post_scale
    return y


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn the interleaved pairs of the first elements of `x` [batch, tokens, heads, head]."""
    half = cos.shape[-1]
    even, odd = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    c, s = cos[: x.shape[1], None, :], sin[: x.shape[1], None, :]
    turned = array_namespace(x).asarray(x, copy=True)
    turned[..., 0 : 2 * half : 2] = even * c - odd * s
    turned[..., 1 : 2 * half : 2] = odd * c + even * s
    return turned


def _contiguous(x: Array) -> Array:
    # NumPy multiplies strided stacks of matrices without BLAS.
    packed = array_namespace(x).empty(tuple(x.shape), dtype=x.dtype, device=device(x))
    packed[...] = x
    return packed


def attention(qkv: Array, config: ModelConfig) -> Array:
    """Causal self-attention over `qkv` [batch, tokens, 3 n_embd] -> [batch, tokens, n_embd]."""
    xp, place = array_namespace(qkv), device(qkv)
    batch, tokens, _ = qkv.shape
    qkv = qkv.reshape(batch, tokens, 3, config.n_head, config.head_size)
    cos, sin = (xp.asarray(table, device=place) for table in rotary_tables(config))
    q = _contiguous(xp.permute_dims(_rotate(qkv[:, :, 0], cos, sin), (0, 2, 1, 3)))
    q /= math.sqrt(config.head_size)  # here and not on the scores, which are many more
    k = _contiguous(xp.permute_dims(_rotate(qkv[:, :, 1], cos, sin), (0, 2, 3, 1)))
    v = _contiguous(xp.permute_dims(qkv[:, :, 2], (0, 2, 1, 3)))
    scores = q @ k
    future = xp.full((tokens, tokens), -math.inf, dtype=scores.dtype, device=place)
    scores += xp.triu(future, k=1)
    scores -= xp.max(scores, axis=-1, keepdims=True)
    xp.exp(scores, out=scores)
    mixed = (scores @ v) / xp.sum(scores, axis=-1, keepdims=True)
    return xp.permute_dims(mixed, (0, 2, 1, 3)).reshape(batch, tokens, -1)


@dataclass(frozen=True, slots=True)
class Step:
    """Where a layer's forward pass stands: before the linears that read `reads` are applied.

    `activations()` is what they will multiply, `residual()` the residual stream so far; both are
    computed when asked for.
    """

    reads: str
    activations: Callable[[], Array]
    residual: Callable[[], Array]


def layer_steps(
    x: Array, layer: Layer, config: ModelConfig
) -> Generator[Step, Mapping[str, Linear] | None, Array]:
    """One decoder layer over `x` [batch, tokens, n_embd], stopped before each group of linears.

    At each stop it takes, by `send`, linears to use instead of the layer's from there on. What is
    cheap to compute again is not kept while it waits: a pass that waits holds two arrays like `x`.
    """
    linears = dict(layer.linears)

    def norm() -> Array:
        return layer_norm(x, layer.ln_weight, layer.ln_bias, config.layer_norm_epsilon)

    def hidden() -> Array:
        return apply_linear(norm(), linears["mlp_fc_in"], with_gelu=True)

    def attended() -> Array:
        return x + apply_linear(mixed, linears["attn_out"], with_gelu=False)

    linears.update((yield Step("ln_1", norm, lambda: x)) or {})
    mixed = attention(apply_linear(norm(), linears["attn_qkv"], with_gelu=False), config)
    linears.update((yield Step("attention", lambda: mixed, lambda: x)) or {})
    linears.update((yield Step("gelu", hidden, attended)) or {})
    return attended() + apply_linear(hidden(), linears["mlp_fc_out"], with_gelu=False)


def forward_layer(x: Array, layer: Layer, config: ModelConfig) -> Array:
    """One decoder layer over `x` [batch, tokens, n_embd]."""
    steps = layer_steps(x, layer, config)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def forward_head(x: Array, head: Head, config: ModelConfig) -> Array:
    """Logits [..., vocab] of the last layer's output `x` [..., n_embd]."""
    h = layer_norm(x, head.ln_weight, head.ln_bias, config.layer_norm_epsilon)
    return h @ head.weight.T + head.bias
