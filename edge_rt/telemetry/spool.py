"""Records that wait for the broker's word that it has them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from edge_rt.errors import ConfigError
from edge_rt.telemetry.record import Key, Record
from edge_rt.telemetry.store import GoneError, Held, Layout, Store, is_damage

MEMORY_BYTES = 4 << 20
_OBJECT_BYTES = 500  # what Python takes to hold a record, beside its text
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0
_DAMAGED = Key("", "", 0)
# The last two are of a path.
_FAULTS = (sqlite3.Error, OSError, ConfigError, GoneError, RuntimeError, ValueError)


class Spool:
    """Holds records until they are acknowledged, in memory and in a file; one thread uses it.

    A record is written to the file only if a `commit` comes before its acknowledgement. What was
    there at a commit outlasts a kill and a power cut; the rest does not. Beyond `max_bytes` (file
    and log together) the oldest are dropped and counted.

    `fault` says why there is no file now: records wait in memory, the oldest are dropped beyond
    MEMORY_BYTES, what is in the file waits for its return, and commits try it again. `note` says
    what became of a file that was damaged or deleted. Both are "" when there is nothing to say. No
    fault of the disk is raised.
    """

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        self.fault = ""
        self.note = ""
        self.dropped = 0
        self.dropped_before = 0  # of these, those of earlier runs
        self._layout = Layout.of(max_bytes)
        self._memory_limit_bytes = min(MEMORY_BYTES, max_bytes // 4)
        self._store = None if path is None else Store(path, max_bytes)
        self._new: dict[Key, Held] = {}  # put since the last release or commit
        self._old: dict[Key, Held] = {}  # backlog that is not in the file
        self._taken: dict[Key, Held] = {}
        self._acknowledged: dict[int, Key] = {}  # by their places, as they are still in the file
        self._doubtful: dict[int, Key] = {}  # acknowledged, and perhaps in it:
        self._doubtful_to_id = 0  # those before this place were in a write that failed
        self._cursor = 0  # the backlog up to this place in the file is taken or acknowledged
        self._next_id = 1
        self._memory_bytes = 0
        self._opened = False
        self._retry_s = _FIRST_RETRY_S
        self._retry_at_s = 0.0
        self._open()

    @property
    def records(self) -> int:
        """How many are not acknowledged."""
        stored = 0 if self._store is None else self._store.records - len(self._acknowledged)
        return stored + sum(1 for _ in self._unstored())

    @property
    def bytes(self) -> int:
        """What they take as text, and those that are acknowledged and not deleted yet."""
        stored = 0 if self._store is None else self._store.payload_bytes
        return stored + sum(len(held.record.payload.encode()) for held in self._unstored())

    @property
    def unsettled(self) -> int:
        """How many the broker may have that a kill now would bring back.

        In flight, or acknowledged and still in the file. While the file is at fault, the latter do
        not count: no commit could settle them, and no backlog is read that would add to them.
        """
        usable = self._store is not None and self._store.is_open
        return len(self._taken) + (len(self._acknowledged) if usable else 0)

    def put(self, record: Record) -> None:
        """Hold a new record, in memory until the next commit."""
        key = record.key
        assert not any(key in pool for pool in (self._new, self._old, self._taken)), f"{key} twice"
        held = Held.of(self._next_id, record)
        if _cost(held) > min(self._layout.max_record_bytes, self._memory_limit_bytes):
            self.dropped += 1
            return
        self._next_id += 1
        self._new[key] = held
        self._memory_bytes += _cost(held)
        if self._memory_bytes > self._memory_limit_bytes:
            if self._store is not None and self._store.is_open:
                self.commit()
            self._drop_from_memory()

    def take_new(self, limit: int) -> list[Record]:
        """Those put since the last release or commit that are not taken, in order."""
        return self._take(self._new, limit)

    def take_backlog(self, limit: int) -> list[Record]:
        """All others that are not taken, in order: those of the file, then those in memory."""
        found = self._read(limit)
        return found + self._take(self._old, limit - len(found))

    def acknowledge(self, key: Key) -> None:
        """The broker has a record that was taken; a key that is not is ignored."""
        held = self._taken.pop(key, None)
        if held is None:
            return
        if held.stored:
            self._acknowledged[held.id] = key
        else:
            self._memory_bytes -= _cost(held)
            if held.id < self._doubtful_to_id:
                self._doubtful[held.id] = key

    def release(self) -> None:
        """Nothing is taken any more; all that is here is backlog."""
        held = sorted(self._unstored(), key=lambda held: held.id)
        self._old = {each.record.key: each for each in held}
        self._new.clear()
        self._taken.clear()
        self._cursor = 0

    def commit(self) -> None:
        """Write what is not acknowledged, delete what is; what is not taken becomes backlog."""
        self._old.update(self._new)
        self._new.clear()
        if self._store is None:
            return
        if not self._store.is_open:
            if time.monotonic() < self._retry_at_s:
                return
            self._open()
        if self._store.is_open:
            self._write(self._store)

    def close(self) -> None:
        """Commit, and give the file back."""
        self._retry_at_s = 0.0
        self.commit()
        if self._store is not None:
            self._store.close()

    def _write(self, store: Store) -> None:
        new = sorted(self._unstored(), key=lambda held: held.id)
        if new or self._acknowledged or self.dropped != store.dropped:
            keep = {held.id for held in self._taken.values()}
            try:
                self.dropped, lost = store.write(self._acknowledged, new, keep, self.dropped)
            except _FAULTS as error:
                self._doubtful_to_id = self._next_id
                self._fail(store, error)
                return
            for held in new:
                held.stored = True
            self._taken = {key: held for key, held in self._taken.items() if held.id not in lost}
            self._old.clear()
            self._acknowledged.clear()
            self._memory_bytes = 0
        self._retry_s = _FIRST_RETRY_S

    def _take(self, pool: dict[Key, Held], limit: int) -> list[Record]:
        keys = list(islice(pool, max(0, limit)))
        for key in keys:
            self._taken[key] = pool.pop(key)
        return [self._taken[key].record for key in keys]

    def _read(self, limit: int) -> list[Record]:
        store = self._store
        found: list[Record] = []
        while store is not None and store.is_open and len(found) < limit:
            seen = {held.id for held in self._taken.values()}.union(self._acknowledged)
            try:
                rows = store.read(self._cursor, limit - len(found))
            except _FAULTS as error:
                self._fail(store, error)
                break
            if not rows:
                break
            self._cursor = rows[-1][0]
            for id_, record in rows:
                if id_ in seen:
                    continue
                if record is None:
                    self.note = f"{store.path}: a record was damaged and is dropped"
                    self.dropped += 1
                    self._acknowledged[id_] = _DAMAGED
                    continue
                self._taken[record.key] = held = Held.of(id_, record)
                held.stored = True
                found.append(record)
        return found

    def _unstored(self) -> Iterable[Held]:
        for pool in (self._old, self._new, self._taken):
            yield from (held for held in pool.values() if not held.stored)

    def _drop_from_memory(self) -> None:
        """Keep to the limit: the oldest go first, those in flight last."""
        while self._memory_bytes > self._memory_limit_bytes:
            held = next(iter(self._unstored()))
            for pool in (self._old, self._new, self._taken):
                pool.pop(held.record.key, None)
            self._memory_bytes -= _cost(held)
            self.dropped += 1

    def _open(self, damage: Exception | None = None) -> None:
        """Open the file, a new one if it has `damage`; it is at fault if that fails."""
        store = self._store
        if store is None:
            return
        try:
            if damage is None:
                try:
                    store.open()
                except sqlite3.DatabaseError as error:
                    if not is_damage(error):
                        raise
                    damage = error
            if damage is not None:
                self._set_aside(store, damage)
            self._reconcile(store)
        except _FAULTS as error:
            self._suspend(store, error)
        else:
            self.fault = ""

    def _set_aside(self, store: Store, damage: Exception) -> None:
        self._write_off(store)
        aside = store.set_aside()
        self.note = (
            f"{store.path} was damaged ({damage}); it is now {aside.name}, a new one is used"
        )
        store.open()

    def _write_off(self, store: Store) -> None:
        """The file is lost, and what is not in flight, and so in memory, with it."""
        flying = sum(held.stored for held in self._taken.values())
        self.dropped += max(0, store.records - len(self._acknowledged) - flying)
        for held in self._taken.values():
            held.stored = False
        self._acknowledged.clear()
        store.records = store.payload_bytes = 0

    def _reconcile(self, store: Store) -> None:
        """Compare memory with the file: a write that failed may be there, and rows may not."""
        if self._opened:
            self.dropped = max(self.dropped, store.dropped)
        else:
            self.dropped += store.dropped
            self.dropped_before = store.dropped_before
            self._opened = True
        self._cursor = 0
        self._acknowledged = {
            id_: key
            for id_, key in (self._acknowledged | self._doubtful).items()
            if store.has(id_, key)
        }
        self._doubtful.clear()
        self._doubtful_to_id = 0
        for pool in (self._old, self._new, self._taken):
            for key, held in list(pool.items()):
                held.stored = store.has(held.id, key)
                if held.stored and pool is not self._taken:
                    del pool[key]
        self._next_id = max(self._next_id, store.last_id + 1)
        self._memory_bytes = 0
        for held in sorted(self._unstored(), key=lambda held: held.id):
            held.id = self._next_id
            self._next_id += 1
            self._memory_bytes += _cost(held)

    def _fail(self, store: Store, error: Exception) -> None:
        store.close()
        if is_damage(error):
            self._open(error)
        elif isinstance(error, GoneError):
            self._write_off(store)
            self.note = f"{store.path}: {error}; a new one is used"
            self._open()
        else:
            self._suspend(store, error)

    def _suspend(self, store: Store, error: Exception) -> None:
        """Do without the file for a while."""
        store.close()
        reason = getattr(error, "strerror", None) or error
        self.fault = f"{store.path}: {reason}; records wait in memory alone"
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)


def _cost(held: Held) -> int:
    return held.size_bytes + _OBJECT_BYTES
