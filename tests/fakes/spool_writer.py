"""A process to be killed: it uses a spool at full speed and says on stdout what it has done.

Lines: `p N` record N was put; `a N` record N will be acknowledged now; `c` a commit returned.
Arguments: the spool's file, the number of the first record, a seed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from fakes.spool import MIB, record

from edge_rt.telemetry.spool import Spool


def environment() -> dict[str, str]:
    """What a child process needs to import this."""
    tests = Path(__file__).parent.parent
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}


def main(path: str, first: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    spool = Spool(Path(path), 64 * MIB)
    assert spool.fault == spool.note == ""
    say("open")
    seq = first - 1
    while True:
        for _ in range(int(chance.integers(20))):
            seq += 1
            spool.put(record(seq, int(chance.integers(8, 3000))))
            say(f"p {seq}")
        for each in spool.take_new(int(chance.integers(12))) + spool.take_backlog(
            int(chance.integers(8))
        ):
            if chance.random() < 0.9:
                say(f"a {each.key.seq}")
                spool.acknowledge(each.key)
        if chance.random() < 0.02:
            spool.release()
        if chance.random() < 0.5:
            spool.commit()
            say("c")


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
