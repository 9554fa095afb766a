"""The journal of a run: what happened to every group, on disk within two seconds, off the hot path.

    journal/000007.log        the events of segment 7, appended as they happen
    journal/000007.snapshot   the state that segment 7 begins with; there only once it is whole and on the disk

Use, in one process and from one event loop:

    journal = Journal(run_folder / "journal", run="name of the run", incarnation=n)   # takes the folder's lock
    recovered = recover(journal.folder, version)      # replay/recovery.py; not when the run is new
    done = journal.rotate(version, state)             # begins a segment; before the first event, and
                                                      # at each checkpoint: after sample(version - 1),
                                                      # before sample(version). A future: its number
    await journal.room()                              # backpressure; before an event with a group
    journal.append(Add(seq, group))                   # see replay/events.py; enqueues, never waits
    journal.prune(before)                             # segments that no checkpoint needs any more
    journal.close()

A checkpoint of version c counts only once the future of `rotate(c, ...)` is done; then `prune(its result)`, or of
the oldest checkpoint that is kept. A run that is not pruned is a recording (replay/recording.py).

Who waits for whom: `append` for nobody. The writer thread waits for events; within 20 ms of one it encodes and
writes all that are there (what is written survives a kill of the process), and syncs once the oldest event that
is not synced is `interval_s` old (what is synced survives the machine). It never writes more than
16 MiB of events and 4 MiB of a snapshot without looking at the clock, so a snapshot of any size holds up no event.
`room` waits while `queue_bytes` are queued or the oldest event is two intervals old: on a disk that cannot keep up
the producers slow down to its pace, and after `wait_s` the run fails with a RunFolderError that says so.

What the disk refuses ends the journal: the next call of any method raises RunFolderError, like a row of metrics
does. A run that went on without it would lose at the next crash what it had promised to keep.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from forge.errors import RunFolderError
from forge.run_folder import folder_error
from replay.events import Event, ReplayState, Trained
from replay.writer import Writer, measure

T = TypeVar("T")
_LINGER_S = 0.02
_IDLE_S = 60.0
_LOCK_S = 10.0


class Journal:
    """The writing end. Methods return at once unless they say otherwise; all raise RunFolderError once it failed."""

    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        incarnation: int = 0,
        interval_s: float = 1.0,
        queue_bytes: int = 64 << 20,
        wait_s: float = 60.0,
    ) -> None:
        """Makes the folder. Raises RunFolderError when another process has the journal open, or the disk refuses."""
        self.folder = folder
        self._lock = _lock(folder)
        self._writer = Writer(folder, run, incarnation, interval_s)
        try:
            self._writer.open()
        except OSError as error:
            os.close(self._lock)
            raise folder_error(folder, error) from error
        self._interval_s = interval_s
        self._queue_bytes = queue_bytes
        self._wait_s = wait_s
        self._version: int | None = None
        self._closed = False
        self._guard = threading.Lock()
        self._waiting: list[Future[None]] = []
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    @property
    def incarnation(self) -> int:
        """What the segments from the next `rotate` on are marked with."""
        return self._writer.incarnation

    @incarnation.setter
    def incarnation(self, incarnation: int) -> None:
        self._writer.incarnation = incarnation

    @property
    def lag_s(self) -> float:
        """Age of the oldest event that is not on the disk; 0 when all are."""
        return self._writer.lag_s

    @property
    def queued_bytes(self) -> int:
        """Bytes of events that are not written yet."""
        return self._writer.queued_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes written so far, snapshots included."""
        return self._writer.written_bytes

    def append(self, event: Event) -> None:
        """Hands one event over; it must not be changed any more.

        Raises RunFolderError too when twice `queue_bytes` are queued: the caller did not wait for `room`.
        """
        self._check()
        assert self._version is not None, "rotate comes first: an event belongs to a segment"
        if isinstance(event, Trained) and event.version < self._version:
            raise ValueError(
                f"a batch of version {event.version} after rotate({self._version}, ...); "
                "rotate after the sample that makes a version and before the next one"
            )
        nbytes = measure(event)
        if self._writer.queued_bytes > 2 * self._queue_bytes:
            raise self._too_slow("wait for Journal.room before an event")
        self._writer.push(event, nbytes)
        self._wake.set()

    async def room(self) -> None:
        """Waits until the disk has caught up; between its return and an `append` nothing else runs.

        Raises RunFolderError after `wait_s`.
        """
        self._check()
        deadline = time.monotonic() + self._wait_s
        while self._is_behind():
            waiter: Future[None] = Future()
            with self._guard:
                self._waiting.append(waiter)
            self._wake.set()
            try:
                await asyncio.wait_for(asyncio.wrap_future(waiter), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise self._too_slow(f"it has not caught up within {self._wait_s:g} s") from None
            self._check()

    def rotate(self, version: int, state: ReplayState) -> Future[int]:
        """Begins a segment at `version` with `state`; events from here on belong to it.

        The result is the segment's number, there once a recovery can begin with it.
        """
        self._check()
        if state.version != version:
            raise ValueError(f"rotate({version}, ...) got the state of version {state.version}")
        self._version = version
        return self._ask(self._writer.push_rotate(state))

    def sync(self) -> Future[None]:
        """Done once every event before it is on the disk."""
        self._check()
        return self._ask(self._writer.push_sync())

    def when_written(self, call: Callable[[], T]) -> Future[T]:
        """The result of `call`, made by the writer's thread once every event before it is in the file.

        What is in the file survives a kill of this process. Nothing is written or removed while `call` runs.
        """
        self._check()
        return self._ask(self._writer.push_call(call))

    def prune(self, before: int) -> None:
        """Removes the segments below number `before`, the result of a `rotate`."""
        self._check()
        self._writer.push_prune(before)
        self._wake.set()

    def close(self, timeout_s: float = 30.0) -> None:
        """Writes and syncs what is queued, and lets go of the folder; a second call does nothing.

        Raises RunFolderError when the disk failed, or has not answered within `timeout_s`.
        """
        if self._closed:
            return
        self._closed = True
        self._hurry.set()
        self._wake.set()
        self._thread.join(timeout_s)
        stuck = self._thread.is_alive()
        os.close(self._lock)
        if stuck:
            raise self._too_slow(f"it has not taken the rest within {timeout_s:g} s")
        if self._writer.failure is not None:
            raise self._writer.failure

    def _ask(self, future: Future[T]) -> Future[T]:
        self._hurry.set()
        self._wake.set()
        return future

    def _check(self) -> None:
        if self._writer.failure is not None:
            raise self._writer.failure
        if self._closed:
            raise RunFolderError(f"the journal {self.folder} is closed")

    def _is_behind(self) -> bool:
        writer = self._writer
        if writer.failure is not None or self._closed:
            return False
        return writer.queued_bytes >= self._queue_bytes or writer.lag_s > 2 * self._interval_s

    def _too_slow(self, what: str) -> RunFolderError:
        return RunFolderError(
            f"the disk is {self.queued_bytes:,} bytes and {self.lag_s:.1f} s behind in {self.folder}, "
            f"the limits are {self._queue_bytes:,} bytes and {2 * self._interval_s:g} s: {what}; give --run.dir a "
            "folder on a disk that answers, or set --replay.journal=false"
        )

    def _work(self) -> None:
        writer = self._writer
        while writer.has_work() or not self._closed:
            if not writer.has_work():
                due = writer.due_in()
                self._wake.wait(_IDLE_S if due is None else due)
                if writer.has_work():
                    self._hurry.wait(_LINGER_S)
            self._wake.clear()
            self._hurry.clear()
            writer.turn()
            self._let_in()
        writer.close()
        self._let_in()

    def _let_in(self) -> None:
        """Wakes the waiting `room`s; each looks for itself whether there is room."""
        if self._is_behind():
            return
        with self._guard:
            waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)


def _lock(folder: Path) -> int:
    """Holds the folder for this process; the kernel lets go of it when the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise folder_error(folder, error) from error
    deadline = time.monotonic() + _LOCK_S
    try:
        # One that was killed a moment ago holds it until the kernel has taken it apart.
        while not (locked := _try_lock(fd)) and time.monotonic() < deadline:
            time.sleep(0.05)
    except OSError as error:
        os.close(fd)
        raise folder_error(folder / "lock", error) from error
    if not locked:
        os.close(fd)
        raise RunFolderError(
            f"another process writes the journal {folder} and has not let go of it within {_LOCK_S:g} s; "
            "wait for that run or end it"
        )
    return fd


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
