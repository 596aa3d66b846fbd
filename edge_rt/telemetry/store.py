"""Records in an SQLite file of bounded size."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import sqlite3
import stat
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_rt.errors import ConfigError
from edge_rt.telemetry.record import Key, Record

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x65527453  # "eRtS": tells our file from another program's
_SCHEMA = (
    "CREATE TABLE meta (dropped INTEGER, opened INTEGER)",
    "CREATE TABLE record (id INTEGER PRIMARY KEY, boot TEXT, topic TEXT, seq, payload TEXT, crc32)",
)
_PAGE_BYTES = 4096
_FRAME_BYTES = _PAGE_BYTES + 24  # a page in the write-ahead log
_OVERFLOW_BYTES = _PAGE_BYTES - 4  # what one page holds of a row that needs several
_SPARE_PAGES = 8  # of a transaction: inner nodes, free list, `meta`


@dataclass(frozen=True, slots=True)
class Layout:
    """How file and log share what they may take on disk, in pages.

    Before each transaction the log has at most `checkpoint` pages, and a transaction adds at most
    `transaction`: it writes a page once (no cache spill), and is cut where it could touch more.
    """

    checkpoint: int
    transaction: int
    file: int

    @classmethod
    def of(cls, max_bytes: int) -> Layout:
        """The layout for a file and its log of `max_bytes`, 1 MiB or more."""
        pages = max_bytes // _FRAME_BYTES - 1
        checkpoint, transaction = min(pages // 16, 256), min(pages // 4, 1024)
        return cls(checkpoint, transaction, pages - checkpoint - transaction)

    @property
    def max_record_bytes(self) -> int:
        """The largest record, as `Held` counts it."""
        return (self.transaction - _SPARE_PAGES - 3) * _OVERFLOW_BYTES


@dataclass(slots=True)
class Held:
    """A record and its place in the order of all; `stored`: it is in the file."""

    id: int
    record: Record
    size_bytes: int
    stored: bool = False

    @classmethod
    def of(cls, id_: int, record: Record) -> Held:
        """Hold a record that is in no file yet; its size is that of its row, about."""
        key, payload = record
        texts = (key.boot_id, key.topic, payload)
        return cls(id_, record, 32 + sum(len(text.encode()) for text in texts))

    @property
    def pages(self) -> float:
        """The most that it takes among others: a leaf and the next one fill a page together."""
        if self.size_bytes < _PAGE_BYTES:
            return 2 * self.size_bytes / _OVERFLOW_BYTES
        return self.size_bytes / _OVERFLOW_BYTES + 3


class GoneError(Exception):
    """The file was deleted, or another one is in its place; what is still written is lost."""


def is_damage(error: BaseException) -> bool:
    """Whether SQLite says that the file is no database, or a broken one.

    Its other errors (full, read-only, locked, I/O) come as subclasses; Python 3.10 has no codes.
    """
    return type(error) is sqlite3.DatabaseError


class Store:
    """The file; one process has it at a time. Its methods raise sqlite3.Error, OSError, GoneError.

    Durable means in the log and synced (WAL, synchronous=FULL) when `write` returns. `records`,
    `last_id` and `dropped` are those of the last time that the file could be used, `dropped_before`
    is what it had when it was opened.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.layout = Layout.of(max_bytes)
        self.records = 0
        self.payload_bytes = 0
        self.last_id = 0
        self.dropped = 0
        self.dropped_before = 0
        self._lock: int | None = None
        self._connection: sqlite3.Connection | None = None

    @property
    def is_open(self) -> bool:
        """Whether the file is ours now."""
        return self._connection is not None

    def open(self) -> None:
        """Open the file or make one; ConfigError for a database that is not ours to write."""
        counts = self.records, self.payload_bytes
        try:
            self.path = self.path.resolve()  # SQLite puts the log where a link leads to
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take()
            self._connect()
        except BaseException:
            self.records, self.payload_bytes = counts
            self.close()
            raise

    def close(self) -> None:
        """Give the file back; what is not written is lost."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        if self._lock is not None:
            # Not before: closing any descriptor of a file drops SQLite's own locks on it.
            os.close(self._lock)
            self._lock = None

    def set_aside(self) -> Path:
        """Rename the damaged file and its log, in place of the last that was; the new name."""
        self.close()
        self._take()  # or it could be another process' new one by now
        try:
            for last in self.path.parent.glob(f"{glob.escape(self.path.name)}.corrupt-*"):
                last.unlink()
            now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            aside = self.path.with_name(f"{self.path.name}.corrupt-{now}")
            with contextlib.suppress(FileNotFoundError):
                # SQLite would delete it, and it may have what the file lacks.
                self._log.rename(f"{aside}-wal")
            return self.path.rename(aside)
        finally:
            self.close()

    def has(self, id_: int, key: Key) -> bool:
        """Whether the file has this record in this place."""
        found = self._rows("SELECT boot, topic, seq FROM record WHERE id = ?", id_)
        boot_id, topic, seq = key
        return found == [(boot_id.encode(), topic.encode(), seq)]

    def read(self, after: int, limit: int) -> list[tuple[int, Record | None]]:
        """The next records and their places, in order; None for one whose bytes have changed."""
        rows = self._rows(
            "SELECT id, boot, topic, seq, payload, crc32 FROM record WHERE id > ? "
            "ORDER BY id LIMIT ?",
            after,
            limit,
        )
        return [(row[0], _checked(row)) for row in rows]

    def write(
        self, gone: Collection[int], new: Sequence[Held], keep: Collection[int], dropped: int
    ) -> tuple[int, set[int]]:
        """Delete the records `gone`, add `new`, note how many were `dropped`: one transaction.

        More than the log has room for takes several. The oldest make room, those of `keep` last.
        Returns how many are dropped now, and which of `keep` are among them. If it raises, a part
        may be done, which does no harm when it is done again after `open`.
        """
        lost: set[int] = set()
        for ids, batch in self._parts(gone, new):
            with self._transaction() as connection:
                for id_ in ids:
                    self._delete(connection, id_)
                need = sum(held.pages for held in batch) + _SPARE_PAGES
                victims = self._make_room(connection, need, keep) if batch else []
                for held in batch:
                    self._insert(connection, held)
                connection.execute("UPDATE meta SET dropped = ?", (dropped + len(victims),))
            dropped += len(victims)
            lost.update(victims)
        self.dropped = dropped
        return dropped, lost & set(keep)

    def _parts(
        self, gone: Collection[int], new: Sequence[Held]
    ) -> Iterator[tuple[list[int], list[Held]]]:
        """Cut the work so that no part can touch more pages than a transaction may."""
        ids: list[int] = []
        batch: list[Held] = []
        pages: float = _SPARE_PAGES
        work: list[int | Held] = [*gone, *new]
        for item in work:
            cost = 2 if isinstance(item, int) else item.pages
            if pages + cost > self.layout.transaction:
                yield ids, batch
                ids, batch, pages = [], [], _SPARE_PAGES
            if isinstance(item, int):
                ids.append(item)
            else:
                batch.append(item)
            pages += cost
        yield ids, batch

    @property
    def _log(self) -> Path:
        return self.path.with_name(f"{self.path.name}-wal")

    def _take(self) -> None:
        """Lock the file, made if need be; the lock is the kernel's and ends with the process."""
        self._lock = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                "used by another process; a second daemon needs its own spool_file and device"
            ) from None
        ours = os.fstat(self._lock)
        if not stat.S_ISREG(ours.st_mode):
            raise ConfigError("no regular file; choose another one")
        if not os.path.samestat(ours, self.path.stat()):
            raise BlockingIOError("renamed by another process just now")

    def _connect(self) -> None:
        connection = self._connection = sqlite3.connect(
            self.path, timeout=0, isolation_level=None, check_same_thread=False
        )
        connection.text_factory = bytes  # text that is damaged must not stop the reading
        # Exclusive from the first access on: no shared memory file, and no one else comes in.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        version = self._check()
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "wal_autocheckpoint = 0",  # `_transaction` does it, where an error is seen
            "cache_spill = OFF",
            "secure_delete = OFF",  # Debian's default writes zeros over whatever is deleted
            f"max_page_count = {self.layout.file}",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        if version == 0:
            with self._transaction():
                for statement in _SCHEMA:
                    connection.execute(statement)
                connection.execute("INSERT INTO meta VALUES (0, 0)")
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._count()
        self._shrink(connection)
        with self._transaction():  # a disk that takes no writes is better known at once
            connection.execute("UPDATE meta SET opened = opened + 1")

    def _check(self) -> int:
        """The schema's version, 0 for an empty file; nothing is written."""
        version, application = self._pragma("user_version"), self._pragma("application_id")
        schema = [row[0] for row in self._rows("SELECT sql FROM sqlite_master ORDER BY rowid")]
        if version == application == 0 and not schema:
            return 0
        if application != _APPLICATION_ID:
            raise ConfigError("the database of another program; choose another file")
        if version > SCHEMA_VERSION:
            raise ConfigError(
                f"written by a newer edge_rt (schema {version}, expected {SCHEMA_VERSION}); update "
                "edge_rt or choose another file"
            )
        if version != SCHEMA_VERSION or schema != [text.encode() for text in _SCHEMA]:
            raise sqlite3.DatabaseError("its schema is altered")
        found = self._rows("PRAGMA quick_check(1)")
        if found != [(b"ok",)]:
            raise sqlite3.DatabaseError(str(found[0][0], "utf-8", "replace"))
        return version

    def _count(self) -> None:
        [(self.records, last, size)] = self._rows(
            "SELECT count(*), max(id), sum(length(CAST(payload AS BLOB))) FROM record"
        )
        self.last_id, self.payload_bytes = last or 0, size or 0
        self.dropped = self.dropped_before = self._rows("SELECT dropped FROM meta")[0][0]

    def _shrink(self, connection: sqlite3.Connection) -> None:
        """Keep to a limit that was lowered."""
        if self._pragma("page_count") <= self.layout.file:
            return
        with self._transaction():
            dropped = self.dropped + len(self._make_room(connection, _SPARE_PAGES, ()))
            connection.execute("UPDATE meta SET dropped = ?", (dropped,))
        self.dropped = dropped
        connection.execute("VACUUM")
        self._checkpoint()
        connection.execute(f"PRAGMA max_page_count = {self.layout.file}").fetchall()

    def _make_room(
        self, connection: sqlite3.Connection, pages: float, keep: Collection[int]
    ) -> list[int]:
        """Delete the oldest until so many pages are free; those deleted."""
        victims: list[int] = []
        while (lack := pages - self._free_pages()) > 0:
            oldest = self._rows(
                "SELECT id, length(CAST(payload AS BLOB)) FROM record ORDER BY id LIMIT ?",
                len(keep) + 100,
            )
            assert oldest, "an empty file has no room for one record"
            freed = 0
            for id_, size in [row for row in oldest if row[0] not in keep] or oldest[:1]:
                if freed >= lack * _PAGE_BYTES:
                    break
                freed += size or 1
                self._delete(connection, id_)
                victims.append(id_)
        return victims

    def _free_pages(self) -> int:
        used = self._pragma("page_count") - self._pragma("freelist_count")
        return self.layout.file - used

    def _insert(self, connection: sqlite3.Connection, held: Held) -> None:
        (boot_id, topic, seq), payload = held.record
        content = payload.encode()
        check = _crc32(held.id, boot_id.encode(), topic.encode(), seq, content)
        connection.execute(
            "INSERT INTO record VALUES (?, ?, ?, ?, ?, ?)",
            (held.id, boot_id, topic, seq, payload, check),
        )
        self.records += 1
        self.payload_bytes += len(content)

    def _delete(self, connection: sqlite3.Connection, id_: int) -> None:
        sizes = self._rows("SELECT length(CAST(payload AS BLOB)) FROM record WHERE id = ?", id_)
        connection.execute("DELETE FROM record WHERE id = ?", (id_,))
        self.records -= len(sizes)
        self.payload_bytes -= sum(size or 0 for (size,) in sizes)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        assert self._connection is not None
        self._check_place()
        counts = self.records, self.payload_bytes
        if self._log.exists() and (
            self._log.stat().st_size > self.layout.checkpoint * _FRAME_BYTES
        ):
            self._checkpoint()
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            self.records, self.payload_bytes = counts
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    def _check_place(self) -> None:
        assert self._lock is not None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._lock), self.path.stat()):
                return
        raise GoneError("deleted, or another file is in its place")

    def _checkpoint(self) -> None:
        """Bring the log's pages into the file, and the log to nothing."""
        self._rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def _pragma(self, name: str) -> int:
        [(value,)] = self._rows(f"PRAGMA {name}")
        return int(value)

    def _rows(self, statement: str, *values: int) -> list[Any]:
        assert self._connection is not None
        return self._connection.execute(statement, values).fetchall()


def _crc32(id_: int, boot_id: bytes, topic: bytes, seq: int, payload: bytes) -> int:
    # SQLite has sums for its log alone: a bit that flips in a row goes unseen without one.
    return zlib.crc32(b"%d\0%b\0%b\0%d\0%b" % (id_, boot_id, topic, seq, payload))


def _checked(row: tuple[Any, ...]) -> Record | None:
    try:
        intact = _crc32(*row[:5]) == row[5]
    except TypeError:
        return None
    _, boot_id, topic, seq, payload, _ = row
    return Record(Key(boot_id.decode(), topic.decode(), seq), payload.decode()) if intact else None
