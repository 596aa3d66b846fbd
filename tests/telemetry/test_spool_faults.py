"""Disks that are full, read-only or broken, and files that are damaged or not ours."""

from __future__ import annotations

import contextlib
import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fakes.spool import MIB, FailingStore, as_killed, drain, files_bytes, record, seqs
from fakes.spool_writer import environment

from edge_rt.telemetry.spool import MEMORY_BYTES, Spool
from edge_rt.telemetry.store import SCHEMA_VERSION, Store

NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spool.sqlite"


@contextlib.contextmanager
def no_room(bytes_: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes, whoever runs it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, hard))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def no_rights(directory: Path) -> Iterator[None]:
    """A directory that takes no new files; root has to give up its rights for that."""
    directory.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        directory.chmod(0o700)


def put(spool: Spool, *numbers: int, size: int = 1000) -> None:
    for seq in numbers:
        spool.put(record(seq, size))


def commit_now(spool: Spool) -> None:
    spool._retry_at_s = 0
    spool.commit()


def test_disk_full_and_room_again(path: Path) -> None:
    spool = Spool(path, 4 * MIB)
    put(spool, *range(1, 101))
    spool.take_new(10)
    spool.commit()
    spool.acknowledge(record(1).key)
    with no_room(20_000):  # less than the log has, and than the file would get
        seq = 100
        while not spool.fault:
            seq += 1
            put(spool, seq)
            spool.commit()
        assert "spool.sqlite: " in spool.fault
        assert spool.unsettled == 9, "no commit could settle the first"
        put(spool, *range(seq + 1, seq + 6))
        assert seqs(spool.take_new(3)) == [seq + 1, seq + 2, seq + 3], "live records go on"
        spool.acknowledge(record(seq + 1).key)
        for _ in range(3):
            commit_now(spool)
        assert spool.fault
        assert spool.records == 99 + seq - 100 + 4
    commit_now(spool)
    assert spool.fault == spool.note == ""
    assert spool.dropped == 0
    assert drain(spool) == [*range(2, seq + 1), *range(seq + 2, seq + 6)]
    spool.close()


def test_memory_is_bounded_while_the_disk_is_full(path: Path) -> None:
    with no_room(1000):
        spool = Spool(path, 64 * MIB)
        assert spool.fault
        put(spool, 1, size=MIB)
        assert seqs(spool.take_new(1)) == [1]
        put(spool, *range(2, 10_001))
        spool.commit()
        assert spool.bytes <= MEMORY_BYTES
        assert spool.dropped == 10_000 - spool.records > 5000
        assert spool.unsettled == 1, "what is in flight is dropped last"
    commit_now(spool)
    assert spool.fault == ""
    dropped = spool.dropped
    spool.close()
    spool = Spool(path, 64 * MIB)
    assert spool.dropped == dropped
    assert drain(spool) == [1, *range(dropped + 2, 10_001)]
    spool.close()


def test_a_directory_without_rights_and_with_them_again(path: Path) -> None:
    with no_rights(path.parent):
        spool = Spool(path, MIB)
        assert "Permission denied" in spool.fault
        put(spool, 1)
        spool.close()
        assert spool.records == 1
    commit_now(spool)
    assert spool.fault == ""
    spool.close()
    assert path.exists()


def test_a_disk_that_becomes_read_only(path: Path) -> None:
    spool = Spool(path, MIB)
    put(spool, 1)
    spool.commit()
    assert spool._store is not None
    assert spool._store._connection is not None
    spool._store._connection.execute("PRAGMA query_only = ON")
    put(spool, 2)
    spool.commit()
    assert "readonly" in spool.fault
    assert (spool.records, spool.take_backlog(9)) == (2, [record(2, 1000)])
    commit_now(spool)
    assert spool.fault == ""
    assert drain(spool) == [1, 2]
    spool.close()


def test_a_write_that_failed_may_have_been_done(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_rt.telemetry.spool.Store", FailingStore)
    spool = Spool(path, MIB)
    put(spool, 1, 2)
    spool.take_new(1)
    monkeypatch.setattr(FailingStore, "fails", "after")
    spool.commit()
    commit_now(spool)
    assert spool.fault
    assert spool.records == 2, "counted in memory and in the file"
    spool.acknowledge(record(1).key)
    monkeypatch.setattr(FailingStore, "fails", "")
    commit_now(spool)
    assert spool.fault == ""
    assert spool.records == 1
    assert drain(spool) == [2], "the first was acknowledged, the second is here once"
    spool.close()


@pytest.mark.parametrize("kind", ["directory", "pipe", "under a file", "zero byte", "loop"])
def test_paths_that_can_be_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "spool.sqlite"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "under a file":
        path.write_text("x", encoding="ascii")
        path /= "spool.sqlite"
    elif kind == "zero byte":
        path = tmp_path / "a\0b"
    else:
        path.symlink_to(path)
    spool = Spool(path, MIB)
    assert spool.fault
    put(spool, 1)
    commit_now(spool)
    assert seqs(spool.take_backlog(9)) == [1]
    spool.close()


def test_a_dead_disk_is_not_hammered(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    path.mkdir()
    spool = Spool(path, MIB)
    tries = 0

    def count(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError("still dead")

    monkeypatch.setattr("edge_rt.telemetry.store.Store.open", count)
    for _ in range(720):
        now_s += 5
        spool.commit()
    assert 3600 / 65 < tries < 3600 / 60 + 10
    spool.close()


def test_a_file_that_another_process_uses(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from edge_rt.telemetry.spool import Spool\n"
        "from fakes.spool import record\n"
        "spool = Spool(Path(sys.argv[1]), 1 << 20)\n"
        "for seq in range(1, 11):\n    spool.put(record(seq))\n"
        "spool.commit(); print('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        spool = Spool(path, MIB)
        assert "used by another process" in spool.fault
        put(spool, 11, 12, 13)
        spool.take_new(1)
        commit_now(spool)
        assert "used by another process" in spool.fault
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            sqlite3.connect(path, timeout=0).execute("SELECT * FROM record")
        other.kill()
    commit_now(spool)
    assert spool.fault == ""
    assert seqs(spool.take_backlog(9)) == [*range(1, 10)]
    assert seqs(spool.take_backlog(9)) == [10, 12, 13], "the eleventh is still in flight"
    assert spool.records == 13
    spool.close()


@pytest.mark.parametrize("kind", ["newer", "foreign"])
def test_a_database_that_is_not_ours_is_left_alone(path: Path, kind: str) -> None:
    if kind == "newer":
        Spool(path, MIB).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE other (x)")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    before = path.read_bytes()
    spool = Spool(path, MIB)
    assert ("newer edge_rt" if kind == "newer" else "another program") in spool.fault
    put(spool, 1)
    commit_now(spool)
    spool.close()
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_file_that_is_no_database_is_set_aside_and_the_last_one_kept(path: Path) -> None:
    for content in (b"x" * 5000, b"y" * 5000):
        path.write_bytes(content)
        path.with_name("spool.sqlite-wal").write_bytes(content)
        spool = Spool(path, MIB)
        assert spool.fault == ""
        assert "damaged" in spool.note
        put(spool, 1)
        spool.commit()
        assert drain(spool) == [1]
        spool.close()
        aside = sorted(path.parent.glob("spool.sqlite.corrupt-*"))
        assert [each.read_bytes() for each in aside] in ([content], [content, content])


def test_the_log_is_set_aside_with_its_file(path: Path) -> None:
    path.write_bytes(b"x")
    path.with_name("spool.sqlite-wal").write_bytes(b"log")
    aside = Store(path, MIB).set_aside()
    assert aside.read_bytes() == b"x"
    assert Path(f"{aside}-wal").read_bytes() == b"log"
    assert len(list(path.parent.iterdir())) == 2


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
@pytest.mark.parametrize("kind", ["bytes", "block", "cut"])
def test_damage_anywhere_costs_records_and_never_changes_one(
    tmp_path: Path, kind: str, killed: bool
) -> None:
    rng = np.random.default_rng(1)
    path = tmp_path / "spool.sqlite"
    spool = Spool(path, MIB)
    for seq in range(1, 201):
        put(spool, seq, size=int(rng.integers(10, 4000)))
        if seq % 10 == 0:
            spool.commit()
    whole = as_killed(path, tmp_path / "whole")
    spool.close()
    original = {each: record(each.key.seq, len(each.payload)) for each in _all(whole, tmp_path)}
    assert len(original) == 200
    losses = []
    for number in range(40):
        copy = as_killed(whole if killed else path, tmp_path / str(number))
        files = sorted(each for each in copy.parent.iterdir() if each.stat().st_size)
        damaged = files[int(rng.integers(len(files)))]
        _damage(damaged, kind, rng)
        spool = Spool(copy, MIB)
        found = spool.take_backlog(1000)
        assert all(original.get(each) == each for each in found), "not as it was put"
        assert seqs(found) == sorted(set(seqs(found)))
        put(spool, 201)
        commit_now(spool)
        spool.release()
        assert [each.key.seq for each in spool.take_backlog(1000)][-1] == 201
        spool.close()
        losses.append(200 - len(found))
        assert not losses[-1] or spool.note or "-wal" in damaged.name, "lost, and nothing said"
    assert max(losses) > 0, "nothing was damaged"


def _all(path: Path, tmp_path: Path) -> list:
    spool = Spool(as_killed(path, tmp_path / "all"), MIB)
    found = spool.take_backlog(1000)
    spool.close()
    return found


def _damage(path: Path, kind: str, rng: np.random.Generator) -> None:
    content = bytearray(path.read_bytes())
    at = int(rng.integers(len(content)))
    if kind == "cut":
        del content[at:]
    elif kind == "block":
        content[at : at + 4096] = rng.bytes(len(content[at : at + 4096]))
    else:
        for _ in range(int(rng.integers(1, 30))):
            content[int(rng.integers(len(content)))] ^= int(rng.integers(1, 256))
    path.write_bytes(content)


def test_damage_while_it_runs_is_counted_and_what_is_in_flight_kept(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    put(spool, *range(1, 6))
    spool.take_new(5)
    put(spool, *range(6, 6001))  # more than SQLite keeps in memory
    spool.commit()
    assert spool._store is not None
    spool._store._checkpoint()
    with path.open("r+b") as file:
        file.seek(3 * MIB)
        file.write(b"\xff" * 65536)
    found: list[int] = []
    while batch := spool.take_backlog(100):
        found += seqs(batch)
        for each in batch:
            spool.acknowledge(each.key)
        spool.commit()
    assert "damaged" in spool.note
    assert spool.fault == ""
    assert 1000 < len(found) < 5000
    spool.acknowledge(record(1).key)
    assert (spool.records, spool.unsettled) == (4, 4)
    assert len(found) + spool.dropped + 5 == 6000, "lost, and not counted"
    spool.close()
    spool = Spool(path, 16 * MIB)
    assert drain(spool) == [2, 3, 4, 5]
    assert spool.dropped > 0
    spool.close()
    assert files_bytes(path) > MIB, "the damaged file is gone"


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_that_is_deleted_is_counted_and_a_new_one_used(path: Path, how: str) -> None:
    """SQLite would go on writing to what nobody can open again, into a log without bounds."""
    spool = Spool(path, 4 * MIB)
    put(spool, *range(1, 6))
    spool.take_new(2)
    spool.commit()
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()
    if how == "replaced":
        path.touch()
    put(spool, 6)
    spool.commit()
    commit_now(spool)
    assert (spool.fault, spool.dropped) == ("", 3)
    assert "another file is in its place" in spool.note
    spool.acknowledge(record(1).key)
    spool.close()
    spool = Spool(path, 4 * MIB)
    assert (drain(spool), spool.dropped) == ([2, 6], 3)
    spool.close()
