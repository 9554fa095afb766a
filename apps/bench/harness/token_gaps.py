"""From the moments at which an engine made tokens to what an update did to the requests that ran; pure.

Times are seconds on the clock that all processes of a host share. A client has one request running at any time: when
one ends it asks for the next, so that the wait between the two counts as a gap of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Window = tuple[float, float]
"""From when to when."""


@dataclass(frozen=True)
class Trace:
    """What an engine did around one update: the time of every step and the clients whose requests got a token by it;
    and when the update staged and flipped.
    """

    steps: list[tuple[float, list[str]]]
    stage: Window
    flip: Window


@dataclass(frozen=True)
class Gaps:
    """What an update did, in seconds. Before it: the median gap between two tokens of a client, and the longest.

    `staging` is the median while the version was staged, None where it decoded nothing then. `flip` is the longest gap
    around the flip, `update` the longest from the start of the staging to just after the flip.
    """

    step: float
    before: float
    staging: float | None
    flip: float
    update: float


def gaps_of(steps: Iterable[tuple[float, Sequence[str]]]) -> list[Window]:
    """Every gap between two tokens of one client."""
    times: dict[str, list[float]] = {}
    for time, clients in steps:
        for client in clients:
            times.setdefault(client, []).append(time)
    return [gap for ticks in times.values() for gap in pairwise(ticks)]


def measure(trace: Trace) -> Gaps:
    """Raises ValueError when the trace has too little to say: tokens must come before, around and after the update."""
    everyone = {client for _, clients in trace.steps for client in clients}
    begin = max(min(time for time, clients in trace.steps if c in clients) for c in everyone) if everyone else 0.0
    gaps = gaps_of(trace.steps)
    before = [end - start for start, end in gaps if begin <= start and end <= trace.stage[0]]
    if len(before) < 2:
        raise ValueError(f"{len(before)} gaps between tokens before the update; let the load run for longer before it")
    step = statistics.median(before)
    # The step before the flip and the one after it belong to it: it starts in the one and cools caches for the other.
    around: Window = (trace.flip[0], trace.flip[1] + step)
    flip, update = _overlapping(gaps, around), _overlapping(gaps, (trace.stage[0], around[1]))
    if not flip:
        raise ValueError("no token came after the flip; let the load run for longer after it")
    staging = [end - start for start, end in gaps if trace.stage[0] <= start and end <= trace.flip[0]]
    return Gaps(
        step=step,
        before=max(before),
        staging=statistics.median(staging) if staging else None,
        flip=max(flip),
        update=max(update),
    )


def _overlapping(gaps: Sequence[Window], window: Window) -> list[float]:
    return [end - start for start, end in gaps if end >= window[0] and start <= window[1]]
