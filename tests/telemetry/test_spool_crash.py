"""What a kill or a power cut leaves: all that was committed, and nothing that was deleted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fakes.spool import MIB, as_killed, drain, record
from fakes.spool_writer import environment

from edge_rt.telemetry.spool import Spool

KILLS = 15


def killed_run(path: Path, first: int, seed: int, after_s: float) -> list[str]:
    """What a writer said until it was killed, `after_s` from when it had the file."""
    command = [sys.executable, "-m", "fakes.spool_writer", str(path), str(first), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline()]
        os.set_blocking(writer.stdout.fileno(), False)
        end_s = time.monotonic() + after_s
        said = b""
        while time.monotonic() < end_s:  # or it would wait for room in the pipe
            said += writer.stdout.read() or b""
            time.sleep(0.001)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        os.set_blocking(writer.stdout.fileno(), True)
        said += writer.stdout.read()
    assert lines == [b"open\n"]
    return [line.decode() for line in said.splitlines(keepends=True) if line.endswith(b"\n")]


@pytest.mark.slow
def test_kill_9_at_random_moments_loses_nothing_committed(tmp_path: Path) -> None:
    chance = np.random.default_rng(6)
    path = tmp_path / "spool.sqlite"
    must: set[int] = set()  # committed and not acknowledged
    next_seq = 1
    for seed in range(KILLS):
        new: set[int] = set()
        acknowledged: set[int] = set()
        for line in killed_run(path, next_seq, seed, chance.uniform(0, 0.25)):
            verb, _, number = line.strip().partition(" ")
            if verb == "p":
                next_seq = int(number) + 1
                new.add(int(number))
            elif verb == "a":
                acknowledged.add(int(number))
            else:
                must, new, acknowledged = (must | new) - acknowledged, set(), set()
        maybe = must | new | {next_seq}  # the last was put, perhaps, and not said
        next_seq += 1
        copy = as_killed(path, tmp_path / str(seed))
        spool = Spool(copy, 64 * MIB)
        assert spool.fault == spool.note == ""
        assert spool.dropped == 0
        found = drain(spool)
        spool.close()
        shutil.rmtree(copy.parent)
        assert found == sorted(set(found))
        assert must - acknowledged <= set(found), "committed, and lost"
        assert set(found) <= maybe, "acknowledged and committed, and here again"
        must = set(found)
    assert next_seq > 20 * KILLS, "the writers did nothing"


def test_any_beginning_of_the_log_is_the_state_after_some_commit(tmp_path: Path) -> None:
    """A power cut: SQLite takes the log up to the last commit that is whole."""
    path = tmp_path / "spool.sqlite"
    spool = Spool(path, 4 * MIB)
    assert spool._store is not None
    assert spool._store._pragma("synchronous") == 2, "a commit would return before it is on disk"
    spool.put(record(1))
    spool.commit()
    states = [[1]]
    for seq in range(2, 12):
        spool.put(record(seq, 1500))
        if seq % 3 == 0:
            spool.release()
            spool.acknowledge(spool.take_backlog(1)[0].key)
        spool.commit()
        kept = [*states[-1], seq]
        states.append(kept[1:] if seq % 3 == 0 else kept)
    whole = as_killed(path, tmp_path / "whole")
    log = whole.with_name(f"{whole.name}-wal").read_bytes()
    spool.close()
    met = []
    for size in range(0, len(log) + 1, 1001):
        copy = as_killed(whole, tmp_path / str(size))
        copy.with_name(f"{copy.name}-wal").write_bytes(log[:size])
        cut = Spool(copy, 4 * MIB)
        assert cut.fault == cut.note == ""
        met.append(drain(cut))
        cut.close()
    assert all(state in [[], *states] for state in met)
    assert len({tuple(state) for state in met}) > 5
