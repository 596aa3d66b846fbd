"""What the memory delivers, measured with NumPy, and what a decode step asks of it.

A decode step reads nearly all weights and does little with each: at small batches it takes at the
least as long as that reading (the memory-bound side of a roofline; Williams et al., 2009), unless
the weights fit into the processor's caches.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edge_rt.bundle import Bundle
from edge_rt.golden import GOLDEN_FILE
from edge_rt.tokenizer import TOKENIZER_FILE

COPY_BYTES = 128 << 20  # beyond the caches of edge boards and most servers
_ROUNDS = 5
_FP16_BYTES = 2
_NO_WEIGHTS = frozenset({GOLDEN_FILE, TOKENIZER_FILE})


def memory_gb_s(copy_bytes: int = COPY_BYTES) -> float:
    """GB/s of a copy of `copy_bytes`, the best of a few, by all cores; reads and writes counted.

    Takes twice `copy_bytes` of memory meanwhile.
    """
    threads = len(os.sched_getaffinity(0))
    source = np.ones(copy_bytes // 8)
    target = np.empty_like(source)
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    best_ns: float = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            started_ns = time.perf_counter_ns()
            list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))
            best_ns = min(best_ns, time.perf_counter_ns() - started_ns)
    return 2 * source.nbytes / best_ns


def weights_bytes(bundle: Bundle) -> int:
    """What a decode step reads of a bundle: its files of weights but for the embedding.

    Of the embedding, taken to be FP16, a step reads one line for each row.
    """
    model = bundle.manifest.model
    stored = sum(
        entry.size_bytes for name, entry in bundle.manifest.files.items() if name not in _NO_WEIGHTS
    )
    embedding = _FP16_BYTES * model.vocab_size * model.n_head * model.head_size
    return max(0, stored - embedding)
