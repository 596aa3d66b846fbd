"""What tests of the loop share: an engine with a script, and a reader of events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from edge_rt.core import (
    DecodeRow,
    FinishReason,
    Limits,
    PrefillChunk,
    Request,
    SamplingParams,
    TokenEvent,
)
from edge_rt.recipes import NullOptions
from edge_rt.runtime.base import Sampled
from edge_rt.runtime.null import NullRunner

LIMITS = Limits(
    max_requests=3,
    max_rows=3,
    max_tokens_per_step=8,
    prefill_chunk=4,
    pages=10,
    page_tokens=4,
    max_context=32,
    vocab_size=11,
)

BENCH_LIMITS = Limits(
    max_requests=4,
    max_rows=4,
    max_tokens_per_step=64,
    prefill_chunk=16,
    pages=4,
    page_tokens=64,
    max_context=64,
    vocab_size=100,
)


class Script(NullRunner):
    """A null engine that can be told to fail, or to answer wrongly, in its next calls."""

    def __init__(self) -> None:
        super().__init__(LIMITS, NullOptions())
        self.failures: list[Exception | Sampled | None] = []
        self.closed = 0

    def prefill(self, chunks: Sequence[PrefillChunk], *, want_logits: bool = False) -> Sampled:
        return self._scripted() or super().prefill(chunks, want_logits=want_logits)

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        return self._scripted() or super().decode(rows, want_logits=want_logits)

    def close(self) -> None:
        self.closed += 1

    def _scripted(self) -> Sampled | None:
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, Exception):
            raise failure
        return failure


class Reader:
    """Collects events by request."""

    def __init__(self) -> None:
        self.events: defaultdict[str, list[TokenEvent]] = defaultdict(list)

    def __call__(self, event: TokenEvent) -> None:
        self.events[event.request_id].append(event)

    def ends(self) -> dict[str, list[FinishReason]]:
        return {
            name: [event.finish for event in events if event.finish is not None]
            for name, events in self.events.items()
        }


def request(name: str, prompt: int = 3, max_tokens: int = 2) -> Request:
    return Request(name, tuple(token % 11 for token in range(prompt)), SamplingParams(max_tokens))
