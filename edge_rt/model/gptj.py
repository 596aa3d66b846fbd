"""GPT-J as data (shapes, tensor names, which linears read the same activations) and as NumPy.

The arithmetic follows the GPT-J-6B release (Wang and Komatsuzaki, 2021): a parallel block
`x + attention(ln_1(x)) + mlp(ln_1(x))`, rotary embedding of the first `rotary_dim` elements of
each head in interleaved pairs (Su et al., 2021), and the tanh form of GELU. It runs in float32
over whole sequences without a cache: the reference that engines are judged by, not an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from edge_rt.errors import CheckpointError

F32 = npt.NDArray[np.float32]
T = TypeVar("T")
Tap = Callable[[str, F32], None]

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
    """

    name: str
    tensors: tuple[str, ...]
    bias: str | None
    reads: str
    gelu: bool = False


LINEARS = (
    LinearSpec(
        "attn_qkv",
        ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight"),
        None,
        "ln_1",
    ),
    LinearSpec("mlp_fc_in", ("mlp.fc_in.weight",), "mlp.fc_in.bias", "ln_1", gelu=True),
    LinearSpec("attn_out", ("attn.out_proj.weight",), None, "attention"),
    LinearSpec("mlp_fc_out", ("mlp.fc_out.weight",), "mlp.fc_out.bias", "gelu"),
)


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

    weight: F32
    bias: F32 | None = None
    post_scale: F32 | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer in float32; `linears` by LinearSpec.name."""

    ln_weight: F32
    ln_bias: F32
    linears: Mapping[str, Linear]


@dataclass(frozen=True, slots=True)
class Head:
    """What follows the last layer: final norm [n_embd], weight [vocab, n_embd], bias [vocab]."""

    ln_weight: F32
    ln_bias: F32
    weight: F32
    bias: F32


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


def rotary_tables(config: ModelConfig) -> tuple[F32, F32]:
    """Cosines and sines, each [n_positions, rotary_dim / 2]."""
    exponent = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    angle = np.outer(np.arange(config.n_positions, dtype=np.float64), 10000.0**-exponent)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def layer_norm(x: F32, weight: F32, bias: F32, epsilon: float) -> F32:
    """Normalize the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    variance = np.square(centred).mean(-1, keepdims=True)
    result: F32 = centred / np.sqrt(variance + np.float32(epsilon)) * weight + bias
    return result


def gelu(x: F32) -> F32:
    """GELU in its tanh form (Hendrycks and Gimpel, 2016)."""
    inner = np.float32(np.sqrt(2.0 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    result: F32 = np.float32(0.5) * x * (np.float32(1.0) + np.tanh(inner))
    return result


def apply_linear(x: F32, linear: Linear, *, with_gelu: bool) -> F32:
    """`x` [..., in] -> [..., out]."""
    # One product over all rows: NumPy would multiply a stack of matrices one by one.
    y: F32 = (x.reshape(-1, x.shape[-1]) @ linear.weight.T).reshape(*x.shape[:-1], -1)
    if linear.bias is not None:
        y += linear.bias
    if with_gelu:
        y = gelu(y)
    if linear.post_scale is not None:
        y *= linear.post_scale
    return y


def _rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Turn the interleaved pairs of the first elements of `x` [batch, tokens, heads, head]."""
    half = cos.shape[-1]
    even, odd = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    c, s = cos[: x.shape[1], None, :], sin[: x.shape[1], None, :]
    turned = x.copy()
    turned[..., 0 : 2 * half : 2] = even * c - odd * s
    turned[..., 1 : 2 * half : 2] = odd * c + even * s
    return turned


def attention(qkv: F32, config: ModelConfig) -> F32:
    """Causal self-attention over `qkv` [batch, tokens, 3 n_embd] -> [batch, tokens, n_embd]."""
    batch, tokens, _ = qkv.shape
    q, k, v = np.split(qkv.reshape(batch, tokens, 3 * config.n_head, config.head_size), 3, axis=2)
    cos, sin = rotary_tables(config)
    # Contiguous: NumPy multiplies strided stacks of matrices without BLAS.
    q = np.ascontiguousarray(_rotate(q, cos, sin).transpose(0, 2, 1, 3))
    k = np.ascontiguousarray(_rotate(k, cos, sin).transpose(0, 2, 3, 1))
    v = np.ascontiguousarray(v.transpose(0, 2, 1, 3))
    scores: F32 = (q @ k) / np.float32(np.sqrt(config.head_size))
    scores += np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    heads: F32 = scores @ v
    return heads.transpose(0, 2, 1, 3).reshape(batch, tokens, -1)


def forward_layer(x: F32, layer: Layer, config: ModelConfig, tap: Tap | None = None) -> F32:
    """One decoder layer over `x` [batch, tokens, n_embd].

    `tap(reads, activations)` sees what each group of linears multiplies (LinearSpec.reads).
    """
    watch = tap or (lambda _reads, _activations: None)
    h = layer_norm(x, layer.ln_weight, layer.ln_bias, config.layer_norm_epsilon)
    watch("ln_1", h)
    a = attention(apply_linear(h, layer.linears["attn_qkv"], with_gelu=False), config)
    watch("attention", a)
    m = apply_linear(h, layer.linears["mlp_fc_in"], with_gelu=True)
    watch("gelu", m)
    a = apply_linear(a, layer.linears["attn_out"], with_gelu=False)
    return x + a + apply_linear(m, layer.linears["mlp_fc_out"], with_gelu=False)


def forward_head(x: F32, head: Head, config: ModelConfig) -> F32:
    """Logits [..., vocab] of the last layer's output `x` [..., n_embd]."""
    h = layer_norm(x, head.ln_weight, head.ln_bias, config.layer_norm_epsilon)
    result: F32 = h @ head.weight.T + head.bias
    return result
