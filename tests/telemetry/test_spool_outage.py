"""A broker that is away for long: memory, disk, what is dropped, and the replay."""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from fakes.spool import MIB, drain, files_bytes, record, seqs

from edge_rt.telemetry.spool import Spool

DAY_S = 24 * 3600
COMMIT_S = 60  # twelve times the default: what it costs is the disk's time to sync


def in_memory() -> tuple[int, int]:
    """Python's small objects, and the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return sys.getallocatedblocks(), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_day_without_broker_at_1_hz(tmp_path: Path) -> None:
    max_bytes = 64 * MIB
    path = tmp_path / "spool.sqlite"
    spool = Spool(path, max_bytes)
    largest = 0
    for second in range(1, DAY_S + 1):
        spool.put(record(second, 1200))
        if second % COMMIT_S == 0:
            spool.commit()
            largest = max(largest, files_bytes(path))
        if second == DAY_S // 10:
            early = in_memory()
    blocks, memory_bytes = (now - then for now, then in zip(in_memory(), early, strict=True))
    assert blocks < 2000, "objects grow with the backlog"
    assert memory_bytes < 4 * MIB, "memory grows with the backlog"
    assert largest <= max_bytes
    assert spool.dropped == DAY_S - spool.records > 0
    assert spool.bytes == 1200 * spool.records > 0.7 * max_bytes, "much of the room is not used"

    spool.close()
    spool = Spool(path, max_bytes)
    assert spool.dropped == DAY_S - spool.records
    expected = spool.dropped + 1
    live = DAY_S
    while batch := spool.take_backlog(50):
        live += 1
        spool.put(record(live, 1200))
        new = spool.take_new(10)
        assert seqs(new) == [live], "what is new waits for what is old"
        assert seqs(batch) == list(range(expected, expected + len(batch)))
        expected += len(batch)
        for each in batch + new:
            spool.acknowledge(each.key)
        spool.commit()
        largest = max(largest, files_bytes(path))
    assert expected == DAY_S + 1
    assert largest <= max_bytes
    assert spool.records == spool.bytes == spool.unsettled == 0
    spool.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_files_keep_to_the_cap_whatever_the_sizes(tmp_path: Path, seed: int) -> None:
    """With records of all sizes, and some of them in flight all over the file."""
    chance = np.random.default_rng(seed)
    path = tmp_path / "spool.sqlite"
    spool = Spool(path, MIB)
    seq = 0
    most = 0
    flying: deque[int] = deque()
    for _ in range(80):
        scale = int(chance.choice([60, 600, 2100, 5000, 50_000, 200_000]))
        for _ in range(int(chance.integers(1, 20))):
            seq += 1
            spool.put(record(seq, int(chance.integers(10, scale))))
        taken = spool.take_new(int(chance.integers(3))) + spool.take_backlog(
            int(chance.integers(4))
        )
        flying.extend(seqs(taken))
        while len(flying) > 100:
            spool.acknowledge(record(flying.popleft()).key)
        if chance.random() < 0.02:
            spool.release()
            flying.clear()
        spool.commit()
        most = max(most, files_bytes(path))
        assert files_bytes(path) <= MIB
        assert spool.fault == spool.note == ""
    assert most > 0.6 * MIB
    left = spool.records
    assert left > 0
    assert len(drain(spool)) == left
    assert spool.records == spool.bytes == 0
    spool.close()


def test_while_the_broker_answers_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    spool = Spool(path, MIB)

    def files() -> list[tuple[int, int]]:
        return [(at.stat().st_size, at.stat().st_mtime_ns) for at in sorted(tmp_path.iterdir())]

    before = files()
    for seq in range(1, 1001):
        spool.put(record(seq))
        for each in spool.take_new(10):
            spool.acknowledge(each.key)
        spool.commit()
    assert files() == before
    spool.put(record(1001))
    spool.commit()
    assert files() != before
    spool.close()
