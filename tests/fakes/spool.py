"""Records for a spool, a disk that fails on demand, and files as a kill would leave them."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from edge_rt.telemetry.record import Key, Record
from edge_rt.telemetry.spool import Spool
from edge_rt.telemetry.store import Store

MIB = 1 << 20


def record(seq: int, size: int = 100, boot_id: str = "b") -> Record:
    """The record `seq` with a payload of `size` characters that tells it from all others."""
    return Record(Key(boot_id, "telemetry", seq), f"{seq:08d}" + chr(97 + seq % 26) * (size - 8))


def seqs(records: list[Record]) -> list[int]:
    return [each.key.seq for each in records]


def files_bytes(path: Path) -> int:
    """What the spool's files take, all that lie beside it included."""
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*"))


def as_killed(path: Path, copy: Path) -> Path:
    """Copy the files as they are now, as a kill of their process would leave them."""
    copy.mkdir()
    for each in path.parent.glob(f"{path.name}*"):
        shutil.copy(each, copy / each.name)
    return copy / path.name


class FailingStore(Store):
    """A file on a disk that can fail before or after a transaction is durable."""

    fails = ""

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if FailingStore.fails == "before":
            raise sqlite3.OperationalError("disk I/O error")
        counts = self.records, self.payload_bytes
        with super()._transaction() as connection:
            yield connection
        if FailingStore.fails == "after":
            FailingStore.fails = "before"
            self.records, self.payload_bytes = counts
            raise sqlite3.OperationalError("disk I/O error")


def drain(spool: Spool, limit: int = 100) -> list[int]:
    """Take and acknowledge all that is here, as a new connection would; their numbers."""
    spool.release()
    found: list[int] = []
    while batch := spool.take_backlog(limit):
        found += seqs(batch)
        for each in batch:
            spool.acknowledge(each.key)
        spool.commit()
    return found
