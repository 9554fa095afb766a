"""Who did what when, as a file that Perfetto and chrome://tracing open: spans in lanes.

    trace = Trace(folder / "trace.json")
    with trace.span("generate", "group 4, episode 2", turn=1): ...
    trace.close()

Spans of one lane that overlap lie in rows below each other, each in the lowest that is free: how many rows are taken
is how many of them run. A span costs a few microseconds: a thread of its own writes, so nobody waits for a disk. The
file is whole up to a few spans after a crash as well, since readers of the format do without its last bracket.
Format: "Trace Event Format", JSON array, complete events ("X"), times in microseconds of the monotonic clock.
"""

from __future__ import annotations

import heapq
import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.errors import RunFolderError

_CLOSE_S = 30.0
TRAIN_LOOP, GENERATE = "train loop", "generate"
"""Lanes: what the train loop does, and turns that a generator has been asked for; every other is an environment's."""


@dataclass(frozen=True)
class Span:
    """One thing that took time; seconds from the start of the trace."""

    lane: str
    row: int
    name: str
    begin_s: float
    end_s: float
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Lane:
    number: int
    rows: int = 0
    free: list[int] = field(default_factory=list)

    def take(self) -> int:
        if self.free:
            return heapq.heappop(self.free)
        self.rows += 1
        return self.rows - 1


class Trace:
    """For one event loop. Without a `path` it does nothing."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises RunFolderError when the file cannot be made."""
        self._path, self._lanes = path, dict[str, _Lane]()
        self._start = time.monotonic()
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

    @contextmanager
    def span(self, lane: str, name: str, **arguments: Any) -> Iterator[None]:
        """The body, as one span of `lane`, also when it raises. arguments: plain values, shown with it."""
        if self._thread is None:
            yield
            return
        place = self._lanes.get(lane) or self._open(lane)
        row, begin = place.take(), self._now_us()
        try:
            yield
        finally:
            heapq.heappush(place.free, row)
            event = {"ph": "X", "pid": place.number, "tid": row, "name": name, "ts": begin}
            self._events.put({**event, "dur": self._now_us() - begin, "args": arguments})

    def close(self) -> None:
        """Writes what is left; a second call does nothing. Raises RunFolderError when the disk refused."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._events.put(None)
        thread.join(_CLOSE_S)
        if self._error is not None:
            raise self._failed(self._error) from self._error

    def _open(self, lane: str) -> _Lane:
        place = self._lanes[lane] = _Lane(len(self._lanes) + 1)
        self._events.put({"ph": "M", "pid": place.number, "name": "process_name", "args": {"name": lane}})
        return place

    def _now_us(self) -> float:
        return round((time.monotonic() - self._start) * 1e6, 1)

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
        if event["ph"] == "M":
            lanes[event["pid"]] = event["args"]["name"]
        else:
            begin_s = event["ts"] / 1e6
            end_s = begin_s + event["dur"] / 1e6
            spans.append(Span(lanes[event["pid"]], event["tid"], event["name"], begin_s, end_s, event["args"]))
    return spans
