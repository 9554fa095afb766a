"""How long turns took: percentiles of any number of durations in fixed memory.

    recorder.record("browser", turn=3, queue_s=0.2, service_s=4.1)
    recorder.row("extra/env/")    {"extra/env/browser/service_p95_s": 4.1, "extra/env/browser/turn3/service_p95_s": ...}

Recorders of several processes add up exactly, and nothing grows with the count, see `forge.durations`. Queue time is
what passes before somebody begins to serve; service time is what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from forge.durations import PERCENTILES, Durations

OTHER = "other"
"""Stands for every name beyond the first `LatencyRecorder.max_names`."""
_SINGLE_TURNS = 8
_LATE_TURNS = ((16, "turn9-16"), (32, "turn17-32"))


@dataclass
class Wait:
    """Queue and service time of the same turns."""

    queue: Durations = field(default_factory=Durations)
    """From the request to the moment at which somebody begins to serve it."""
    service: Durations = field(default_factory=Durations)
    """From then to the answer."""

    def merge(self, other: Wait) -> None:
        """Adds what another one has counted."""
        self.queue.merge(other.queue)
        self.service.merge(other.service)


@dataclass(frozen=True)
class Line:
    """One line of a report; seconds."""

    name: str
    """Of the environment or tool."""
    turn: str
    """`turn_label`, or "all"."""
    part: Literal["queue", "service"]
    count: int
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


class LatencyRecorder:
    """Durations by name (of an environment, of a tool) and turn. Picklable; not for several threads at once."""

    def __init__(self, max_names: int = 64) -> None:
        """max_names: distinct names; durations of later ones go to `OTHER`."""
        self._max_names = max_names
        self._waits: dict[str, dict[str, Wait]] = {}

    def record(self, name: str, *, turn: int, queue_s: float, service_s: float) -> None:
        """Counts one turn; turn 0 is the reset."""
        wait = self._wait(name, turn_label(turn))
        wait.queue.add(queue_s)
        wait.service.add(service_s)

    def merge(self, other: LatencyRecorder) -> None:
        """Adds what another recorder has counted."""
        for name, turns in other._waits.items():
            for turn, wait in turns.items():
                self._wait(name, turn).merge(wait)

    def row(self, prefix: str = "extra/env/") -> dict[str, float | int]:
        """Metrics: p50, p95, p99 and maximum, queue and service apart, of each name over all turns and of each turn."""
        row: dict[str, float | int] = {}
        for line in self.lines():
            key = f"{prefix}{line.name}/" + ("" if line.turn == "all" else f"{line.turn}/")
            if line.part == "service":
                row[f"{key}count"] = line.count
            for statistic in ("p50_s", "p95_s", "p99_s", "max_s"):
                row[f"{key}{line.part}_{statistic}"] = getattr(line, statistic)
        return row

    def lines(self) -> Iterator[Line]:
        """A table: for each name first all its turns together, then each turn in order."""
        for name, turns in sorted(self._waits.items()):
            together = Wait()
            for wait in turns.values():
                together.merge(wait)
            yield from _lines(name, "all", together)
            for turn in sorted(turns, key=_first_turn):
                yield from _lines(name, turn, turns[turn])

    def _wait(self, name: str, turn: str) -> Wait:
        if name not in self._waits and len(self._waits) >= self._max_names:
            name = OTHER
        return self._waits.setdefault(name, {}).setdefault(turn, Wait())


def turn_label(turn: int) -> str:
    """One of a few labels: turn0 to turn8, then turn9-16, turn17-32, and turn33+ for all later ones."""
    if turn <= _SINGLE_TURNS:
        return f"turn{turn}"
    for last, label in _LATE_TURNS:
        if turn <= last:
            return label
    return f"turn{_LATE_TURNS[-1][0] + 1}+"


def _first_turn(label: str) -> int:
    return int(label.removeprefix("turn").rstrip("+").partition("-")[0])


def _lines(name: str, turn: str, wait: Wait) -> Iterator[Line]:
    parts: tuple[tuple[Literal["queue", "service"], Durations], ...] = (
        ("queue", wait.queue),
        ("service", wait.service),
    )
    for part, durations in parts:
        p50, p95, p99 = (durations.percentile(percent) for percent in PERCENTILES)
        yield Line(name, turn, part, durations.count, p50, p95, p99, durations.max_s)
