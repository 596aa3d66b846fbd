"""One scenario from warm-up to timings, by LoadGen or by our own timer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edge_rt.bench import loadgen, timer, warmup
from edge_rt.bench.extent import Extent
from edge_rt.bench.timer import OnEnd, Prompt, Run
from edge_rt.loop import Loop

Name = Literal["single-stream", "offline"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is to be done: `prompts` take turns, each is continued by exactly `max_tokens`."""

    name: Name
    prompts: Sequence[Prompt]
    max_tokens: int
    extent: Extent
    max_batch: int

    def by_own_timer(self, loop: Loop, on_end: OnEnd) -> Run:
        """EngineError if a request fails."""
        if self.name == "single-stream":
            self._expected_latency_s(loop)
            prompts = self.extent.single_stream(self.prompts)
            return timer.single_stream(loop, prompts, self.max_tokens, on_end)
        expected = self._expected_samples_per_s(loop)
        prompts_at_once = self.extent.offline(self.prompts, expected)
        return timer.offline(loop, prompts_at_once, self.max_tokens, on_end)

    def by_loadgen(self, loop: Loop, logs: Path, on_end: OnEnd) -> Run:
        """As by_own_timer; LoadGen writes its files to `logs`. The loop does not `run` again."""
        if self.name == "single-stream":
            return loadgen.single_stream(
                loop,
                self.prompts,
                self.max_tokens,
                extent=self.extent,
                expected_latency_s=self._expected_latency_s(loop),
                logs=logs,
                on_end=on_end,
            )
        return loadgen.offline(
            loop,
            self.prompts,
            self.max_tokens,
            extent=self.extent,
            expected_samples_per_s=self._expected_samples_per_s(loop),
            logs=logs,
            on_end=on_end,
        )

    def shortfall(self, run: Run) -> list[str]:
        """A warning if our own timer's run did not last as long as it should."""
        took_s = run.wall_ns * 1e-9
        if took_s >= self.extent.duration_s:
            return []
        return [f"the run took {took_s:.1f} s, less than {self.extent.duration_s:g} s"]

    def _expected_latency_s(self, loop: Loop) -> float:
        return warmup.expected_latency_s(loop, self.prompts, self.max_tokens)

    def _expected_samples_per_s(self, loop: Loop) -> float:
        return warmup.expected_samples_per_s(loop, self.prompts, self.max_tokens, self.max_batch)
