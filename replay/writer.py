"""The half of the journal that works: queue, segment files, syncs. One `turn` is a bounded piece of it.

`push*` are called by the owner of the journal, everything else by its thread; the queue between them is the only
thing that both touch. Without the thread it is a plain object, which is how the tests drive it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forge.batch import WIDE_KEYS
from forge.errors import RunFolderError
from forge.run_folder import folder_error, sync_folder
from forge.telemetry import span
from forge.trace import JOURNAL
from replay.events import Add, Event, ReplayState, Start, Tokens
from replay.frames import MARK, encode
from replay.segments import KINDS, log_path, numbers, snapshot_path, state_records

T = TypeVar("T")
CHUNK = 4 << 20
"""Bytes of a snapshot that are written before the clock is looked at again."""
EVENTS_FIRST = 4
"""Bytes of events that may be written for each byte of a snapshot: what is left over is enough for a snapshot to
end, and events that come at less than four fifths of the disk's pace do not queue up behind it."""
_RECORD = 512
"""Bytes that a record is taken for beside its tensors."""
_TOKEN = 25
"""Bytes of one token in a group: id, mask, version and two log-probs; what is wide comes on top."""


def measure(event: Event) -> int:
    """About the bytes that `event` takes in the queue."""
    if isinstance(event, Add):
        tokens = event.group.get("tokens", None)
        if tokens is not None:  # a look at every leaf costs more than the rest of an append
            wide = [event.group.get(key, None) for key in WIDE_KEYS]
            return _RECORD + _TOKEN * tokens.numel() + sum(value.nbytes for value in wide if value is not None)
        leaves: Iterable[Any] = event.group.values(include_nested=True, leaves_only=True)
        return _RECORD + sum(leaf.nbytes for leaf in leaves)
    if isinstance(event, Tokens):
        return _RECORD + 3 * event.tokens.nbytes + (0 if event.kept is None else event.kept.nbytes)
    return _RECORD


class _File:
    """A new file that grows by whole records, or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.size = 0

    def write(self, records: list[bytearray]) -> None:
        """Appends all of them. Where the disk takes the head and refuses the rest, none is left."""
        total = sum(map(len, records))
        try:
            for first in range(0, len(records), 512):  # the kernel takes 1024 pieces at most
                left = records[first : first + 512]
                done = os.writev(self._fd, left)
                if done < sum(map(len, left)):
                    self._write_rest(memoryview(b"".join(left))[done:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.size += total

    def _write_rest(self, rest: memoryview) -> None:
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


@dataclass(slots=True)
class _Item:
    """An event, or what is to be done when its turn in the queue comes."""

    at: float
    event: Event | None = None
    nbytes: int = 0
    action: Callable[[], None] | None = None
    future: Future[Any] | None = None


@dataclass(slots=True)
class _Snapshot:
    number: int
    records: Iterator[tuple[int, Any]]
    future: Future[Any]
    file: _File | None = None


@dataclass(slots=True)
class Writer:
    """See the head of the file. `failure` is what the disk refused first; from then on nothing is written."""

    folder: Path
    run: str
    incarnation: int
    interval_s: float
    clock: Callable[[], float] = time.monotonic
    failure: RunFolderError | None = None
    written_bytes: int = 0
    num_durable: int = 0
    """Events on the disk."""
    _items: deque[_Item] = field(default_factory=deque)
    _pushed_bytes: int = 0
    _popped_bytes: int = 0
    _log: _File | None = None
    _number: int = -1
    _num_written: int = 0
    _unsynced_since: float | None = None
    _folder_changed: bool = True
    _snapshots: deque[_Snapshot] = field(default_factory=deque)

    # --- the owner's side

    @property
    def queued_bytes(self) -> int:
        """Bytes of events that have been pushed and not written."""
        return self._pushed_bytes - self._popped_bytes

    @property
    def lag_s(self) -> float:
        """Age of the oldest event that is not on the disk; 0 when all are."""
        since = self._unsynced_since
        if since is None:
            with suppress(IndexError):  # the other side takes items away
                since = self._items[0].at
        return 0.0 if since is None else max(0.0, self.clock() - since)

    def push(self, event: Event, nbytes: int) -> None:
        """`nbytes` is `measure(event)`."""
        self._pushed_bytes += nbytes
        self._items.append(_Item(self.clock(), event, nbytes))

    def push_rotate(self, state: ReplayState) -> Future[int]:
        """Begins a segment when its turn comes; done, with its number, when log and snapshot are on the disk."""
        future: Future[int] = Future()
        self._items.append(_Item(self.clock(), action=lambda: self._rotate(state, future), future=future))
        return future

    def push_sync(self) -> Future[None]:
        """Done when all that was pushed before is on the disk."""
        future: Future[None] = Future()
        self._items.append(_Item(self.clock(), action=lambda: self._sync_for(future), future=future))
        return future

    def push_call(self, call: Callable[[], T]) -> Future[T]:
        """The result of `call`, made when all that was pushed before is in the file; nothing is written meanwhile."""
        future: Future[T] = Future()
        self._items.append(_Item(self.clock(), action=lambda: _call(call, future), future=future))
        return future

    def push_prune(self, before: int) -> None:
        """Removes the files of the segments below `before` when its turn comes."""
        self._items.append(_Item(self.clock(), action=lambda: self._prune(before)))

    # --- the thread's side

    def open(self) -> None:
        """Finds the number of the next segment, and removes what a kill left of a snapshot. Raises OSError."""
        self._number = max(numbers(self.folder), default=-1)
        for left in self.folder.glob("*.tmp"):
            left.unlink()

    def has_work(self) -> bool:
        """Whether `turn` would write something now."""
        return bool(self._items or self._snapshots)

    def due_in(self) -> float | None:
        """Seconds until the oldest event must be synced, 0 when that is past; None when all are."""
        if self._unsynced_since is None:
            return None
        return max(0.0, self._unsynced_since + self.interval_s - self.clock())

    def turn(self) -> None:
        """Writes EVENTS_FIRST * CHUNK bytes of events and CHUNK bytes of a snapshot at most, and syncs what is due."""
        if self.failure is None:
            try:
                self._write_events()
                self._write_snapshot()
                if self.due_in() == 0.0:
                    self._sync()
            except OSError as error:
                self.failure = folder_error(error.filename or self._path, error)
            except Exception as error:  # a thread that ends in silence would lose every later event
                self.failure = RunFolderError(f"cannot write {self._path}: {error!r}")
        if self.failure is not None:
            self._give_up(self.failure)

    def close(self) -> None:
        """Syncs and closes the segment."""
        if self.failure is None and self._log is not None:
            try:
                self._sync()
                self._log.close()
            except OSError as error:
                self.failure = folder_error(self._path, error)

    @property
    def _path(self) -> Path:
        return self._log.path if self._log is not None else self.folder

    def _write_events(self) -> None:
        records: list[bytearray] = []
        size = 0
        while self._items and size < CHUNK * EVENTS_FIRST:
            item = self._items.popleft()
            self._popped_bytes += item.nbytes
            if item.event is not None:
                records.append(encode(KINDS[type(item.event)], item.event))
                size += len(records[-1])
                self._num_written += 1
                if self._unsynced_since is None:
                    self._unsynced_since = item.at
            elif item.action is not None:
                try:
                    self._append(records)
                    records = []
                    item.action()
                except BaseException:
                    self._items.appendleft(item)  # whoever waits for it is told
                    raise
        self._append(records)

    def _append(self, records: list[bytearray]) -> None:
        if records:
            assert self._log is not None, "an event before the first rotate"
            self._log.write(records)
            self.written_bytes += sum(map(len, records))

    def _sync(self) -> None:
        assert self._log is not None
        if self._unsynced_since is not None or self._folder_changed:
            with span(JOURNAL, "sync"):
                self._log.sync()
                if self._folder_changed:
                    sync_folder(self.folder)
                    sync_folder(self.folder.parent)
                    self._folder_changed = False
            self._append([encode(MARK, None)])
            self._unsynced_since = None
        self.num_durable = self._num_written

    def _sync_for(self, future: Future[None]) -> None:
        if self._log is not None:
            self._sync()
        _resolve(future, None)

    def _rotate(self, state: ReplayState, future: Future[int]) -> None:
        if self._log is not None:
            self._sync()
            self._log.close()
        self._number += 1
        self._log = _File(log_path(self.folder, self._number))
        self._folder_changed = True
        start = Start(self.run, self.incarnation, state.version)
        self._append([encode(KINDS[Start], start)])
        self._snapshots.append(_Snapshot(self._number, state_records(start, state), future))

    def _write_snapshot(self) -> None:
        if not self._snapshots:
            return
        job = self._snapshots[0]
        path = snapshot_path(self.folder, job.number)
        if job.file is None:
            job.file = _File(path.with_suffix(".tmp"))
        size, ended = 0, False
        while size < CHUNK and not ended:
            record = next(job.records, None)
            ended = record is None
            if record is not None:
                data = encode(*record)
                job.file.write([data])
                size += len(data)
        self.written_bytes += size
        with span(JOURNAL, "snapshot", segment=job.number):
            job.file.sync()  # piece by piece, so that no sync takes long
        if ended:
            self._sync()
            job.file.close()
            job.file.path.rename(path)
            sync_folder(self.folder)
            self._snapshots.popleft()
            _resolve(job.future, job.number)

    def _prune(self, before: int) -> None:
        for number in numbers(self.folder):
            if number < min(before, self._number):
                # The snapshot first: a log without one is nobody's beginning.
                snapshot_path(self.folder, number).unlink(missing_ok=True)
                log_path(self.folder, number).unlink(missing_ok=True)

    def _give_up(self, failure: RunFolderError) -> None:
        self._unsynced_since = None
        waiting = [job.future for job in self._snapshots]
        self._snapshots.clear()
        while self._items:
            item = self._items.popleft()
            self._popped_bytes += item.nbytes
            if item.future is not None:
                waiting.append(item.future)
        for future in waiting:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(failure)


def _call(call: Callable[[], T], future: Future[T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except Exception as error:  # the caller's, not the disk's
            future.set_exception(error)


def _resolve(future: Future[Any], result: object) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)
