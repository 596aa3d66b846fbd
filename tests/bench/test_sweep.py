"""Throughput and decode time over batch size, on an engine whose times are known."""

from __future__ import annotations

import pytest

from edge_rt.bench import sweep
from edge_rt.core import Limits
from edge_rt.loop import Loop
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner

LIMITS = Limits(4, 4, 64, 16, 4, 64, 64, 100)
PROMPTS = [(1, 2, 3), (4, 5, 6)]


@pytest.mark.parametrize(
    ("max_batch", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_batch_sizes(max_batch: int, sizes: list[int]) -> None:
    assert sweep.batches(max_batch) == sizes


def measured(max_tokens: int) -> tuple[list[sweep.Point], int]:
    steps, ends = sweep.Steps(), []
    loop = Loop(NullRunner(LIMITS, NullOptions(step_ms=2, row_ms=3)), after_step=steps)
    points = sweep.measure(
        loop, steps, PROMPTS, max_tokens, max_batch=4, on_end=lambda: ends.append(None)
    )
    assert steps.kept is None  # nothing piles up while other things are measured
    return points, len(ends)


def test_a_step_takes_what_the_engine_takes() -> None:
    points, ends = measured(max_tokens=6)
    assert [point.batch for point in points] == [1, 2, 4]
    assert ends == sweep.requests(4)
    for point in points:
        step_ms = 2 + 3 * point.batch
        assert point.decode_step_ms is not None
        assert step_ms <= point.decode_step_ms < 10 * step_ms
        # A step for the prompts, of a chunk each, and 5 that decode.
        most = point.batch * 6 / (6 * step_ms * 1e-3)
        assert 0.1 * most < point.throughput_tok_s <= most


def test_a_single_token_is_never_decoded() -> None:
    points, _ = measured(max_tokens=1)
    assert [point.decode_step_ms for point in points] == [None] * 3
