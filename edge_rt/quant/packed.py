"""GPT-J checkpoints that AutoAWQ, AutoGPTQ or GPTQModel quantized, in our layout bit by bit.

Nothing is rounded again: the integers, zero points and scales are those of the source, so the
weights are `(q - zero) * scale` exactly as the source defines them. Both layouts pack eight values
into an int32. With N outputs, K inputs and G groups:

- AWQ, version GEMM (AutoAWQ): `qweight` [K, N / 8] and `qzeros` [G, N / 8], packed along the
  outputs in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble; `scales` [G, N]. What AutoAWQ
  divides GELU's output by is `mlp.act.scales`, our `post_scale` upside down.
- GPTQ: `qweight` [K / 8, N] packed along the inputs, `qzeros` [G, N / 8] along the outputs, from
  the lowest nibble; `scales` [G, N]; `g_idx` [K], the group of each input channel. The format
  'gptq' stores zero points less one, 'gptq_v2' as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from edge_rt.errors import CheckpointError
from edge_rt.model.checkpoint import name_entries, read_config, refuse_strangers, require
from edge_rt.model.gptj import (
    F32,
    LINEARS,
    Layer,
    Linear,
    LinearSpec,
    ModelConfig,
    in_features,
    layer_tensors,
    outer_tensors,
)
from edge_rt.model.weights import FLOATS, INTEGERS, WeightEntry, find_weights
from edge_rt.quant.pack import F16, U8, QuantizedLinear, pack_nibbles
from edge_rt.quant.scheme import REQUANTIZE, PackedScheme

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_GPTQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_WORD = 8  # values in an int32
_ONES = np.uint32(0x11111111)
_SYMMETRIC_ZERO = 8
_ACT_SCALES = "mlp.act.scales"
_DAMAGED = "download the checkpoint again"

U32 = npt.NDArray[np.uint32]
# Name -> shape and dtypes.
_Expected = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]


class PackedCheckpoint:
    """A quantized GPT-J checkpoint whose tensors are all there in the expected shapes.

    Tensors carry the names of GPTJForCausalLM; a file may leave out the prefix `transformer.`.
    `method` is the source's; `group_size` is that of our stored form.
    """

    def __init__(
        self, config: ModelConfig, scheme: PackedScheme, entries: Mapping[str, WeightEntry]
    ) -> None:
        self.config = config
        self._scheme = scheme
        self._entries = entries
        self.group_size = scheme.stored_group_size((config.n_embd, config.n_inner))

    @property
    def method(self) -> Literal["awq", "gptq"]:
        """Who quantized it."""
        return self._scheme.method

    @classmethod
    def open(cls, directory: Path) -> PackedCheckpoint:
        """Find and check every tensor; CheckpointError names what is missing, wrong or foreign.

        Values are not read yet: `layer` and `tensor` check them.
        """
        table = read_config(directory)
        config = ModelConfig.from_hf(table)
        scheme = PackedScheme.read(directory, table)
        entries = name_entries(find_weights(directory, scheme.files), config)
        _check(entries, scheme, config, directory)
        return cls(config, scheme, entries)

    def tensor(self, name: str) -> F32:
        """Read a tensor outside the layers; CheckpointError if float32 cannot hold its values."""
        return self._entries[name].floats()

    def layer(self, index: int) -> tuple[Layer, dict[str, QuantizedLinear]]:
        """One layer with dequantized weights, and its quantized linears by LinearSpec.name.

        A linear that the source left in float, or a stack that it quantized in part, is absent from
        the second. CheckpointError names a tensor whose values cannot be used.
        """
        prefix = f"transformer.h.{index}."
        linears: dict[str, Linear] = {}
        quantized: dict[str, QuantizedLinear] = {}
        for spec in LINEARS:
            modules = [prefix + name.removesuffix(".weight") for name in spec.tensors]
            parts = [self._part(module) for module in modules]
            packed = [part for part in parts if part is not None]
            bias = self._bias(modules)
            post_scale = self._post_scale(prefix) if spec.gelu else None
            if len(packed) == len(parts):
                quantized[spec.name] = _stack(packed, bias, post_scale)
            elif post_scale is not None:
                raise CheckpointError(
                    f"{self._entries[prefix + _ACT_SCALES]} scales what {modules[0]} puts out, "
                    f"which is not quantized; quantize it too, or {REQUANTIZE}"
                )
            weights = [self._weight(*of, spec) for of in zip(modules, parts, strict=True)]
            linears[spec.name] = Linear(np.concatenate(weights), bias, post_scale)
        ln_weight, ln_bias = (self.tensor(f"{prefix}ln_1.{part}") for part in ("weight", "bias"))
        return Layer(ln_weight, ln_bias, linears), quantized

    def _weight(self, module: str, part: QuantizedLinear | None, spec: LinearSpec) -> F32:
        if part is None:
            return self.tensor(f"{module}.weight")
        return part.dequantize(in_features(spec, self.config))

    def _part(self, module: str) -> QuantizedLinear | None:
        """One module's tensors in our form, without bias; None where it is not quantized."""
        if f"{module}.qweight" not in self._entries:
            return None
        words = _words(self._entries[f"{module}.qweight"])
        if self.method == "awq":
            q = _nibbles(words, _AWQ_ORDER).T
        else:
            q = _nibbles(words.T, _GPTQ_ORDER)
        source = self._groups(module, q.shape[1])
        scales = _half(self._entries[f"{module}.scales"])
        zeros = self._zeros(self._entries[f"{module}.qzeros"])
        return _pack(q, scales[source].T, zeros[source].T, self.group_size)

    def _groups(self, module: str, in_features: int) -> npt.NDArray[np.int64]:
        """The source's group of each of our groups."""
        size = self._scheme.source_group(in_features)
        groups = -(-in_features // size)
        entry = self._entries.get(f"{module}.g_idx")
        if entry is None:
            owner = np.arange(in_features) // size
        else:
            owner = entry.integers().astype(np.int64)
            if not np.array_equal(np.unique(owner), np.arange(groups)):
                raise CheckpointError(
                    f"{entry} does not name each of the groups 0 to {groups - 1}; {_DAMAGED}"
                )
        first = owner[:: self.group_size]
        if not np.array_equal(np.repeat(first, self.group_size)[:in_features], owner):
            raise CheckpointError(
                f"{entry} has groups whose channels do not lie side by side, as desc_act makes "
                f"them, and every engine reads its groups in a row; make the checkpoint again "
                f"with desc_act false, or {REQUANTIZE}"
            )
        return first

    def _zeros(self, entry: WeightEntry) -> U8:
        """The zero points [G, N] of the source's groups."""
        words = _words(entry)
        if self.method == "awq":
            return _nibbles(words, _AWQ_ORDER)
        stored = _nibbles(words, _GPTQ_ORDER)
        if self._scheme.exact_zeros:
            zeros = stored
        else:
            # Stored less one. GPTQModel takes the one from whole words and adds it to whole words,
            # so that even a zero point of 0, which borrows from its neighbour, comes back.
            # AutoGPTQ does not: what lies above a 0 is lost, and its kernels disagree about a 15.
            if not self._scheme.whole_words and (stored == 15).any():
                raise CheckpointError(
                    f"{entry} stores {np.count_nonzero(stored == 15)} zero points as 15, which "
                    f"AutoGPTQ's kernels read as 0 or as 16, and which its packer writes over the "
                    f"neighbours of a 0; make the checkpoint again with sym true, or with "
                    f"GPTQModel and the format 'gptq_v2', or {REQUANTIZE}"
                )
            zeros = _nibbles(words + _ONES, _GPTQ_ORDER)
        if self._scheme.symmetric and (zeros != _SYMMETRIC_ZERO).any():
            wrong = zeros[zeros != _SYMMETRIC_ZERO][0]
            raise CheckpointError(
                f"{entry} holds the zero point {wrong}, but the checkpoint says sym true, whose "
                f"zero points are {_SYMMETRIC_ZERO}; if a file stores 8 as it is, set "
                f"checkpoint_format to 'gptq_v2', and if it was made without sym, set sym to false"
            )
        return zeros

    def _bias(self, modules: Sequence[str]) -> F32 | None:
        """Stacked; None where no module has one."""
        given = [self._entries.get(f"{module}.bias") for module in modules]
        if not any(given):
            return None
        n = self.config.n_embd  # only attention's linears may have none
        return np.concatenate(
            [np.zeros(n, np.float32) if entry is None else entry.floats() for entry in given]
        )

    def _post_scale(self, prefix: str) -> F32 | None:
        entry = self._entries.get(prefix + _ACT_SCALES)
        if entry is None:
            return None
        scales = entry.floats()
        if (scales == 0.0).any():
            raise CheckpointError(
                f"{entry} holds a scale of 0, by which nothing can be divided; {_DAMAGED}"
            )
        if (scales == 1.0).all():
            return None
        return np.float32(1.0) / scales


def _check(
    entries: Mapping[str, WeightEntry], scheme: PackedScheme, config: ModelConfig, directory: Path
) -> None:
    if "lm_head.qweight" in entries:
        raise CheckpointError(
            f"{entries['lm_head.qweight']} is quantized, and edge_rt keeps the head in FP16; make "
            f"the checkpoint with lm_head false, or {REQUANTIZE}"
        )
    if not any(name.endswith(".qweight") for name in entries):
        raise CheckpointError(
            f"{directory} says that its weights are {scheme.method}, but its files have no "
            f"qweight; {_DAMAGED}, or take quantization_config out of config.json if they are float"
        )
    expected: _Expected = {name: (shape, FLOATS) for name, shape in outer_tensors(config).items()}
    for index in range(config.n_layer):
        expected |= _layer_entries(entries, scheme, config, f"transformer.h.{index}.")
    for name, (shape, dtypes) in expected.items():
        require(entries, name, shape).check(shape, dtypes, _DAMAGED)
    refuse_strangers(entries, expected, config)


def _layer_entries(
    entries: Mapping[str, WeightEntry], scheme: PackedScheme, config: ModelConfig, prefix: str
) -> _Expected:
    expected: _Expected = {}
    for name, shape in layer_tensors(config).items():
        module, _, kind = (prefix + name).rpartition(".")
        if kind == "weight" and len(shape) == 2 and prefix + name not in entries:
            expected |= _packed_entries(entries, scheme, module, shape)
        else:
            expected[prefix + name] = (shape, FLOATS)
    if scheme.method == "awq" and prefix + _ACT_SCALES in entries:
        expected[prefix + _ACT_SCALES] = ((config.n_inner,), FLOATS)
    return expected


def _packed_entries(
    entries: Mapping[str, WeightEntry], scheme: PackedScheme, module: str, shape: tuple[int, ...]
) -> _Expected:
    n, k = shape
    if n % _WORD or k % _WORD:
        raise CheckpointError(
            f"{module} has {n} outputs and {k} inputs, which do not fill int32 words of eight; "
            f"{REQUANTIZE}"
        )
    groups = -(-k // scheme.source_group(k))
    expected: _Expected = {
        f"{module}.qweight": (
            (k, n // _WORD) if scheme.method == "awq" else (k // _WORD, n),
            INTEGERS,
        ),
        f"{module}.qzeros": ((groups, n // _WORD), INTEGERS),
        f"{module}.scales": ((groups, n), FLOATS),
    }
    # Early releases gave every linear a bias, those that GPT-J has none for too.
    if f"{module}.bias" in entries:
        expected[f"{module}.bias"] = ((n,), FLOATS)
    # Without desc_act it says nothing new, and some writers leave it out.
    if scheme.desc_act or (scheme.method == "gptq" and f"{module}.g_idx" in entries):
        expected[f"{module}.g_idx"] = ((k,), INTEGERS)
    return expected


def _words(entry: WeightEntry) -> U32:
    return entry.integers().view(np.uint32)


def _nibbles(words: U32, order: tuple[int, ...]) -> U8:
    """Words [rows, n] -> values 0..15 [rows, 8 n]; the lowest nibble is value `order[0]` of 8."""
    values = np.empty((*words.shape, _WORD), np.uint8)
    for slot, place in enumerate(order):
        values[..., place] = (words >> np.uint32(4 * slot)) & np.uint32(15)
    return values.reshape(words.shape[0], -1)


def _half(entry: WeightEntry) -> F16:
    """Scales as float16, which must hold them exactly: nothing is rounded here."""
    wide = entry.floats()
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), wide):
        raise CheckpointError(
            f"{entry} holds scales that float16 cannot hold exactly; make the checkpoint again "
            f"in float16, or {REQUANTIZE}"
        )
    return half


def _pack(q: U8, scales: F16, zeros: U8, group_size: int) -> QuantizedLinear:
    """Values [N, K], scales and zero points [N, our G] -> our form, nothing salient, no bias."""
    n = len(q)
    padded = np.repeat(zeros, group_size, axis=1)
    padded[:, : q.shape[1]] = q
    return QuantizedLinear(
        qweight=pack_nibbles(padded),
        scales=np.ascontiguousarray(scales),
        zeros=np.ascontiguousarray(zeros),
        w_salient=np.zeros((n, 0), np.float16),
        idx=np.zeros(0, np.int32),
        bias=np.zeros(n, np.float32),
        post_scale=np.ones(n, np.float32),
    )


def _stack(
    parts: Sequence[QuantizedLinear], bias: F32 | None, post_scale: F32 | None
) -> QuantizedLinear:
    """Linears of the same input as one, the outputs of the first on top."""
    stacked = QuantizedLinear.from_tensors(
        {
            name: value if name == "idx" else np.concatenate([p.tensors()[name] for p in parts])
            for name, value in parts[0].tensors().items()
        }
    )
    return replace(
        stacked,
        bias=stacked.bias if bias is None else bias,
        post_scale=stacked.post_scale if post_scale is None else post_scale,
    )
