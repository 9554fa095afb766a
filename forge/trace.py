"""Who did what when, as a file that Perfetto and chrome://tracing open: spans in lanes.

    trace = Trace(folder / "trace.json")
    with trace.span("generate", "group 4, episode 2", turn=1): ...
    trace.close()

Spans of one lane that overlap lie in rows below each other, each in the lowest that is free: how many rows are taken
is how many of them run. A span costs a few microseconds: a thread of its own writes, so nobody waits for a disk. The
file is whole up to a few spans after a crash as well, since readers of the format do without its last bracket. Spans of
other processes come through `forge.collector`, on the clock of this one.
Format: "Trace Event Format", JSON array, complete events ("X"), times in microseconds of the monotonic clock.
"""

from __future__ import annotations

import heapq
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.errors import RunFolderError

_CLOSE_S = 30.0
TRAIN_LOOP, GENERATE = "train loop", "generate"
"""Lanes of the controller: what the train loop does, and turns that a generator has been asked for; every other is an
environment's. Those of an actor have its name before them, see `lane_of`."""
RESTARTS = "restarts"
"""Lane of the controller: replicas that died, until they serve again."""
STEP, WEIGHTS = "step", "weights"
"""Lanes of actors: the parts of a training step; snapshots, transfers and flips."""
BATCHES, JOURNAL = "batches", "journal"
"""Lanes of the replay: batches that it hands over, and what its journal waits for the disk."""


@dataclass(frozen=True)
class Span:
    """One thing that took time; seconds from the start of the trace."""

    lane: str
    row: int
    name: str
    begin_s: float
    end_s: float
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Taken:
    """A span as the process measured it that it ran in: nanoseconds of that host's monotonic clock."""

    lane: str
    row: int
    name: str
    begin_ns: int
    end_ns: int
    arguments: dict[str, Any]


def lane_of(actor: str, lane: str) -> str:
    """The name of an actor's lane in the trace."""
    return f"{actor}: {lane}"


class Spans:
    """Measures spans and hands each to `take` as it ends. For any number of threads and tasks of one process."""

    def __init__(self, take: Callable[[Taken], object]) -> None:
        self._take = take
        self._rows: dict[str, int] = {}
        self._free: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def span(self, lane: str, name: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """The body, as one span of `lane`, also when it raises.

        arguments: plain values, shown with it; the body may add to those that it is given.
        """
        with self._lock:
            free = self._free.setdefault(lane, [])
            row = heapq.heappop(free) if free else self._rows.get(lane, 0)
            self._rows[lane] = max(row + 1, self._rows.get(lane, 0))
        begin = time.monotonic_ns()
        try:
            yield arguments
        finally:
            end = time.monotonic_ns()
            with self._lock:
                heapq.heappush(free, row)
            self._take(Taken(lane, row, name, begin, end, arguments))


class Trace:
    """The file; without a `path` it does nothing. Not for several threads, its spans excepted."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises RunFolderError when the file cannot be made."""
        self._path, self._lanes = path, dict[str, int]()
        self._start_ns = time.monotonic_ns()
        self._spans = Spans(self.add)
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        if path is None:
            return
        try:
            path.write_text("[\n", encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error
        self._thread = threading.Thread(target=self._write, args=(path,), name="trace", daemon=True)
        self._thread.start()

    @property
    def on(self) -> bool:
        """Whether anything is written."""
        return self._thread is not None

    @contextmanager
    def span(self, lane: str, name: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """See `Spans.span`."""
        if not self.on:
            yield arguments
            return
        with self._spans.span(lane, name, **arguments) as more:
            yield more

    def add(self, taken: Taken, actor: str = "", ahead_ns: int = 0, about: str = "") -> None:
        """Writes a span of `actor`, whose clock is `ahead_ns` of ours; `about` is told of a lane that is new."""
        if not self.on:
            return
        lane = lane_of(actor, taken.lane) if actor else taken.lane
        pid = self._lanes.get(lane) or self._open(lane, about)
        begin_us = round((taken.begin_ns - ahead_ns - self._start_ns) / 1e3, 1)
        event = {"ph": "X", "pid": pid, "tid": taken.row, "name": taken.name, "ts": begin_us}
        took_us = round((taken.end_ns - taken.begin_ns) / 1e3, 1)
        self._events.put({**event, "dur": took_us, "args": taken.arguments})

    def close(self) -> None:
        """Writes what is left; a second call does nothing. Raises RunFolderError when the disk refused."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._events.put(None)
        thread.join(_CLOSE_S)
        if self._error is not None:
            raise self._failed(self._error) from self._error

    def _open(self, lane: str, about: str) -> int:
        pid = self._lanes[lane] = len(self._lanes) + 1
        self._events.put({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": lane}})
        if about:
            self._events.put({"ph": "M", "pid": pid, "name": "process_labels", "args": {"labels": about}})
        return pid

    def _failed(self, error: OSError) -> RunFolderError:
        return RunFolderError(f"the trace {self._path} cannot be written: {error}; make room, or run.trace=false")

    def _write(self, path: Path) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                comma = ""
                while (event := self._events.get()) is not None:
                    file.write(comma + json.dumps(event, default=str))
                    comma = ",\n"
                    if self._events.empty():
                        file.flush()
                file.write("\n]\n")
        except OSError as error:
            self._error = error


def read_spans(path: str | Path) -> list[Span]:
    """The spans of a trace in the order in which they ended; of a run that was killed, all that were written whole."""
    lanes: dict[int, str] = {}
    spans: list[Span] = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line.removesuffix(","))
        except json.JSONDecodeError:  # a bracket, or the torn end
            continue
        if event["ph"] == "X":
            begin_s = event["ts"] / 1e6
            end_s = begin_s + event["dur"] / 1e6
            spans.append(Span(lanes[event["pid"]], event["tid"], event["name"], begin_s, end_s, event["args"]))
        elif event["name"] == "process_name":
            lanes[event["pid"]] = event["args"]["name"]
    return sorted(spans, key=lambda span: span.end_s)
