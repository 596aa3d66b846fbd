"""What waits, in which order, and what is dropped, while the disk works."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest
from fakes.spool import MIB, drain, files_bytes, record, seqs

from edge_rt.telemetry.record import Key
from edge_rt.telemetry.spool import MEMORY_BYTES, Spool


def put(spool: Spool, *numbers: int, size: int = 100) -> None:
    for seq in numbers:
        spool.put(record(seq, size))


def test_new_records_and_backlog_come_apart_and_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite", MIB)
    put(spool, 1, 2, 3)
    assert seqs(spool.take_new(2)) == [1, 2]
    assert spool.take_backlog(9) == []
    spool.commit()
    put(spool, 4, 5)
    assert seqs(spool.take_new(1)) == [4]
    assert seqs(spool.take_backlog(9)) == [3], "what waited for a commit is backlog"
    spool.release()
    assert spool.take_new(9) == []
    assert seqs(spool.take_backlog(9)) == [1, 2, 3, 4, 5]
    spool.close()


def test_records_of_an_earlier_run_come_first(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    spool = Spool(path, MIB)
    put(spool, 1, 2)
    spool.close()
    spool = Spool(path, MIB)
    spool.put(record(1, boot_id="later"))
    spool.release()
    spool.commit()
    assert [each.key.boot_id for each in spool.take_backlog(9)] == ["b", "b", "later"]
    spool.close()


def test_unsettled_is_in_flight_and_acknowledged_on_disk(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite", MIB)
    put(spool, 1, 2, 3)
    spool.take_new(2)
    spool.acknowledge(record(1).key)
    assert (spool.unsettled, spool.records) == (1, 2), "the first never was on disk"
    spool.commit()
    spool.acknowledge(record(2).key)
    assert (spool.unsettled, spool.records) == (1, 1)
    spool.commit()
    assert (spool.unsettled, spool.records) == (0, 1)
    spool.close()


def test_an_unknown_key_is_ignored_and_a_known_one_is_not_put_twice(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite", MIB)
    spool.acknowledge(Key("x", "y", 1))
    put(spool, 1)
    with pytest.raises(AssertionError, match="twice"):
        put(spool, 1)
    assert spool.records == 1
    spool.close()


def test_no_file_is_no_fault() -> None:
    spool = Spool(None, 64 * MIB)
    put(spool, *range(1, 41), size=200_000)
    spool.commit()
    assert spool.fault == ""
    assert spool.bytes <= MEMORY_BYTES
    assert spool.dropped == 40 - spool.records > 0
    assert drain(spool) == list(range(spool.dropped + 1, 41)), "not the oldest were dropped"
    spool.close()


def test_beyond_the_limit_of_memory_the_file_takes_over_before_a_commit(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite", 64 * MIB)
    put(spool, *range(1, 41), size=200_000)
    assert (spool.records, spool.dropped) == (40, 0)
    assert spool._memory_bytes <= MEMORY_BYTES
    spool.close()


def test_dropped_is_counted_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    spool = Spool(path, MIB)
    put(spool, 1, size=MIB // 2)
    assert (spool.records, spool.dropped) == (0, 1), "larger than any record may be"
    put(spool, *range(2, 12), size=100_000)
    spool.commit()
    dropped = spool.dropped
    assert dropped > 1
    spool.close()
    spool = Spool(path, MIB)
    assert spool.dropped == spool.dropped_before == dropped
    assert drain(spool) == list(range(dropped + 1, 12))
    spool.close()


def test_what_is_in_flight_is_dropped_last(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite", MIB)
    put(spool, 1, 2, size=100_000)
    spool.take_new(2)
    spool.commit()
    put(spool, *range(3, 13), size=100_000)
    spool.commit()
    assert (spool.unsettled, spool.dropped) == (2, 6)
    assert seqs(spool.take_backlog(9)) == [9, 10, 11, 12]
    put(spool, *range(13, 19), size=100_000)
    spool.commit()
    assert (spool.records, spool.dropped) == (6, 12), "a spool that is all in flight is full"
    spool.acknowledge(record(1).key)
    spool.commit()
    assert spool.records == 6, "one that was dropped was counted again"
    spool.close()


def test_a_limit_that_was_lowered_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    spool = Spool(path, 6 * MIB)
    put(spool, *range(1, 3001), size=1000)
    assert spool.dropped == 0
    spool.close()
    assert files_bytes(path) > 3 * MIB
    spool = Spool(path, MIB)
    assert files_bytes(path) <= MIB
    assert spool.records > 400
    assert spool.dropped == 3000 - spool.records
    put(spool, 3001)
    spool.commit()
    assert files_bytes(path) <= MIB
    assert drain(spool) == list(range(spool.dropped + 1, 3002))
    spool.close()


def test_only_its_owner_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "spool.sqlite"
    spool = Spool(path, MIB)
    put(spool, 1)
    spool.commit()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    files = list(path.parent.iterdir())
    assert len(files) == 2
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
    spool.close()


def test_a_spool_may_be_made_in_another_thread(tmp_path: Path) -> None:
    made: list[Spool] = []
    thread = threading.Thread(target=lambda: made.append(Spool(tmp_path / "spool.sqlite", MIB)))
    thread.start()
    thread.join()
    [spool] = made
    put(spool, 1)
    spool.commit()
    assert drain(spool) == [1]
    spool.close()
    assert spool.fault == ""
