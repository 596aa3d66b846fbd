"""What to expect of a bundle, from a few requests that are not measured.

They also let the engine set up what it sets up at first use, before anything is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from edge_rt.bench import timer
from edge_rt.bench.timer import Prompt
from edge_rt.loop import Loop

# Of an estimate that is too low too few samples are made to fill the least duration, and LoadGen
# calls the run invalid; of one that is too high the run takes longer.
HEADROOM = 1.3


def expected_latency_s(loop: Loop, prompts: Sequence[Prompt], max_tokens: int) -> float:
    """At the most what a request alone takes, in seconds: the second's latency less HEADROOM."""
    timer.single_stream(loop, prompts[:1], max_tokens)
    return timer.single_stream(loop, prompts[:1], max_tokens).wall_ns * 1e-9 / HEADROOM


def expected_samples_per_s(
    loop: Loop, prompts: Sequence[Prompt], max_tokens: int, max_batch: int
) -> float:
    """At the least what the engine does when it is full: HEADROOM times that of two batches."""
    timer.single_stream(loop, prompts[:1], max_tokens)
    two = list(itertools.islice(itertools.cycle(prompts), 2 * max_batch))
    return HEADROOM * len(two) / (timer.offline(loop, two, max_tokens).wall_ns * 1e-9)
