"""What is counted while the daemon serves.

The loop's thread writes, and any thread reads: a number may be one step old, never torn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from edge_rt.choice import Choice
from edge_rt.core import FinishReason, Request, StepStats
from edge_rt.telemetry.histogram import Histogram, decades

TOKENS = tuple(float(2**power) for power in range(15))


class Metrics:
    """Counts since the start, and the times of what has ended; seconds, as Prometheus has them."""

    def __init__(self) -> None:
        self.prompt_tokens = 0  # that went through the engine, once more after a preemption
        self.generation_tokens = 0
        self.failed_steps = 0
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
            self.decode_step_s.observe(stats.decode_ns * 1e-9)

    def on_end(
        self, request: Request, rows: Sequence[Choice], submitted_ns: int, admitted_ns: int | None
    ) -> None:
        """Count a request that has ended; `admitted_ns` None if the engine never let it in.

        Time per output token is that of each row, from its first token to its last.
        """
        self.request_prompt_tokens.observe(len(request.prompt))
        if admitted_ns is not None:
            self.queue_s.observe((admitted_ns - submitted_ns) * 1e-9)
        firsts = [row.first_token_ns for row in rows if row.first_token_ns is not None]
        if firsts:
            self.ttft_s.observe((min(firsts) - submitted_ns) * 1e-9)
        for row in rows:
            assert row.finish is not None
            self.finished[row.finish.value] += 1
            self.request_generation_tokens.observe(len(row.tokens))
            if row.first_token_ns is not None and len(row.tokens) > 1:
                assert row.last_token_ns is not None
                taken_ns = row.last_token_ns - row.first_token_ns
                self.tpot_s.observe(taken_ns * 1e-9 / (len(row.tokens) - 1))
        ends = [row.ended_ns for row in rows if row.ended_ns is not None]
        self.latency_s.observe((max(ends) - submitted_ns) * 1e-9)
