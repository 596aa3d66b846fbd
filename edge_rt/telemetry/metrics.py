"""What is counted while the daemon serves.

The loop's thread writes, and any thread reads: a number may be one step old, never torn.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from edge_rt.choice import Choice
from edge_rt.core import FinishReason, Request, StepStats
from edge_rt.telemetry.histogram import Histogram, decades

TOKENS = tuple(float(2**power) for power in range(15))
ENDED = 4096  # requests whose times are kept until they are asked for


class Times(NamedTuple):
    """Of a request that has ended, in seconds from its arrival; None for what never came.

    `tpot_s` is the mean time between the tokens of each of its rows that had more than one.
    """

    latency_s: float
    queue_s: float | None
    ttft_s: float | None
    tpot_s: tuple[float, ...]


class Metrics:
    """Counts since the start, and the times of what has ended; seconds, as Prometheus has them."""

    def __init__(self) -> None:
        self.prompt_tokens = 0  # that went through the engine, once more after a preemption
        self.generation_tokens = 0
        self.decode_rows = 0  # the sum over all decode steps
        self.failed_steps = 0
        self.cached_answers = 0  # the asyncio thread's
        # From 0 on, or Prometheus' rate() would miss the first. Rows by finish reason:
        self.finished = Counter({reason.value: 0 for reason in FinishReason})
        self.answered = Counter({200: 0})  # calls by HTTP status; the asyncio thread's
        self.prefill_step_s = Histogram(decades(1e-4, 100))
        self.decode_step_s = Histogram(decades(1e-5, 10))
        self.step_tokens = Histogram(TOKENS)
        self.queue_s = Histogram(decades(1e-4, 500))
        self.ttft_s = Histogram(decades(1e-4, 500))
        self.tpot_s = Histogram(decades(1e-5, 10))
        self.latency_s = Histogram(decades(1e-3, 5000))
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generation_tokens = Histogram(TOKENS)
        # Percentiles need the values themselves; the longest ago go first. One reader takes them.
        self._ended: deque[Times] = deque(maxlen=ENDED)

    def on_step(self, stats: StepStats) -> None:
        """Count a step of the engine."""
        if stats.failed:
            self.failed_steps += 1
            return
        self.prompt_tokens += stats.prefill_tokens
        self.generation_tokens += stats.sampled_tokens
        self.step_tokens.observe(stats.prefill_tokens + stats.decode_rows)
        if stats.prefill_tokens:
            self.prefill_step_s.observe(stats.prefill_ns * 1e-9)
        if stats.decode_rows:
            self.decode_rows += stats.decode_rows
            self.decode_step_s.observe(stats.decode_ns * 1e-9)

    def on_end(
        self, request: Request, rows: Sequence[Choice], submitted_ns: int, admitted_ns: int | None
    ) -> None:
        """Count a request that has ended; `admitted_ns` None if the engine never let it in.

        Time per output token is that of each row, from its first token to its last.
        """
        self.request_prompt_tokens.observe(len(request.prompt))
        for row in rows:
            assert row.finish is not None
            self.finished[row.finish.value] += 1
            self.request_generation_tokens.observe(len(row.tokens))
        times = _times(rows, submitted_ns, admitted_ns)
        self._ended.append(times)
        self.latency_s.observe(times.latency_s)
        if times.queue_s is not None:
            self.queue_s.observe(times.queue_s)
        if times.ttft_s is not None:
            self.ttft_s.observe(times.ttft_s)
        for tpot_s in times.tpot_s:
            self.tpot_s.observe(tpot_s)

    def take_ended(self) -> list[Times]:
        """Times of the requests that have ended since the last call, the last ENDED at the most."""
        return [self._ended.popleft() for _ in range(len(self._ended))]


def _times(rows: Sequence[Choice], submitted_ns: int, admitted_ns: int | None) -> Times:
    firsts = [row.first_token_ns for row in rows if row.first_token_ns is not None]
    ends = [row.ended_ns for row in rows if row.ended_ns is not None]
    return Times(
        latency_s=(max(ends) - submitted_ns) * 1e-9,
        queue_s=None if admitted_ns is None else (admitted_ns - submitted_ns) * 1e-9,
        ttft_s=(min(firsts) - submitted_ns) * 1e-9 if firsts else None,
        tpot_s=tuple(
            (row.last_token_ns - row.first_token_ns) * 1e-9 / (len(row.tokens) - 1)
            for row in rows
            if row.first_token_ns is not None
            and row.last_token_ns is not None
            and len(row.tokens) > 1
        ),
    )
