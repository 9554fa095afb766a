"""What a process measures of itself, kept in its memory until the controller fetches it: spans and metrics.

    with span("weights", "flip", version=3): ...            # in any code of any actor
    record("extra/generator/request_s", 0.8, "percentiles")

    actor ── Beating.telemetry ──► forge.collector ──► trace.json, and the row of the step

Nobody waits: both calls touch memory only, and the controller asks from a task of its own, once a second. Spans are
kept from the first time that a controller that writes a trace asks; until then, and without one, `span` does nothing.
Actors of one process (all of them, under mesh.debug) share one memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.metrics import known
from forge.tally import Kind, Tally
from forge.trace import Spans, Taken

MOST_SPANS = 20_000
"""Spans that are kept between two fetches; older ones are dropped, and counted."""


@dataclass(frozen=True)
class Report:
    """What a process has measured since it was asked last."""

    host: str
    """Tells machines, which have one monotonic clock each, apart."""
    now_ns: int
    """Of that clock."""
    spans: list[Taken]
    dropped: int
    tallies: dict[str, Tally]


class Telemetry:
    """The memory of one process; for any number of threads."""

    def __init__(self, most_spans: int = MOST_SPANS) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Taken] = deque(maxlen=most_spans)
        self._dropped = 0
        self._tallies: dict[str, Tally] = {}
        self._spans = Spans(self._keep)
        self._on = False

    def _keep(self, taken: Taken) -> None:
        with self._lock:
            self._dropped += len(self._kept) == self._kept.maxlen
            self._kept.append(taken)

    def span(self, lane: str, name: str, **arguments: Any) -> AbstractContextManager[dict[str, Any]]:
        """See `span`."""
        return self._spans.span(lane, name, **arguments) if self._on else nullcontext(arguments)

    def record(self, key: str, value: float, kind: Kind) -> None:
        """See `record`."""
        with self._lock:
            tally = self._tallies.get(key)
            if tally is None:
                tally = self._tallies[known(key)] = Tally(kind)
            tally.add(value)

    def drain(self, spans: bool) -> Report:
        """All since the last time; from now on spans are kept, or are not."""
        with self._lock:
            self._on = spans
            kept, dropped, tallies = list(self._kept), self._dropped, self._tallies
            self._kept.clear()
            self._dropped, self._tallies = 0, {}
        return Report(host_id(), time.monotonic_ns(), kept, dropped, tallies)


def host_id() -> str:
    """The boot of this machine's kernel: processes that share it share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


_here = Telemetry()


def span(lane: str, name: str, **arguments: Any) -> AbstractContextManager[dict[str, Any]]:
    """The body as a span of this process, in one of its lanes; the body may add to the arguments it is given.

    On a GPU a span ends when its work has been handed over, unless the body reads a result.
    """
    return _here.span(lane, name, **arguments)


def record(key: str, value: float, kind: Kind) -> None:
    """Counts `value` under `key` in the row of the step; see `forge.tally` for what a kind becomes.

    A step's row has what had been fetched when it was written: up to five seconds less than its end, one with a
    trace. Raises SchemaError for a key without one of the prefixes of `forge.metrics`.
    """
    _here.record(key, value, kind)


def drain(spans: bool) -> Report:
    """See `Telemetry.drain`; for whoever fetches it."""
    return _here.drain(spans)
