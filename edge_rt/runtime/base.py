"""The contract between the loop and an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edge_rt.core import DecodeRow, Limits, PageCopy, PrefillChunk, SampledToken

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one call brought back.

    `tokens`: one for each draw of each chunk, or one for each row, in the order given. `logits` is
    float32 [tokens, vocab_size], in the same order, only if it was asked for; the caller owns it.
    """

    tokens: tuple[SampledToken, ...]
    logits: Logits | None = None


class Runner(Protocol):
    """One engine over one bundle, driven by one thread.

    A row's cache lives in the pages that each call names; a row that starts at position 0 makes
    no assumption about what its pages held. Nothing is remembered per request, so a request can
    leave at any step without a word to the engine. A call that raises EngineError has sampled
    nothing; rows that it did not name are unharmed.
    """

    @property
    def limits(self) -> Limits:
        """Constant for the life of the engine."""
        ...

    def prefill(self, chunks: Sequence[PrefillChunk], *, want_logits: bool = False) -> Sampled:
        """Append each chunk to its row's cache; sample a token for each of its draws."""
        ...

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        """Append one token to every row and sample the next."""
        ...

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the first positions of pages, one after another."""
        ...

    def close(self) -> None:
        """Give back all memory; the engine is not used afterwards. A second call does nothing."""
        ...
