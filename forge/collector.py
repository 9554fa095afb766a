"""Fetches what actors have measured of themselves (`forge.telemetry`) into the run's trace and rows.

    RunLog makes it ── Cluster.spawn: follow(name, actor) ──► a task for each actor asks once a second
                    ── Cluster ends: finish() ──► one last time

Who waits: a task of its own for each actor, so that a hung one holds up nobody's answers but its own. The train loop
never does: a row takes what has come. Without a trace they ask every five seconds.

Clocks: processes of one machine share CLOCK_MONOTONIC. The clock of another is read in every exchange, and is taken to
be ahead by what the exchange with the shortest round trip among the last `_WINDOW` says (Cristian, 1989): it is wrong
by half that round trip at most, which the lane's label in the trace says.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from typing import Any, ClassVar

from forge import telemetry
from forge.errors import SchemaError
from forge.tally import Tally, merged
from forge.telemetry import Report
from forge.trace import Trace

_EVERY_S, _EVERY_UNTRACED_S = 1.0, 5.0
_PATIENCE_S = 600.0
"""An actor that starts an engine answers no sooner."""
_WINDOW = 32
_FIRST_EXCHANGES = 8


class RemoteClock:
    """How far another machine's clock is ahead of ours, from exchanges."""

    def __init__(self) -> None:
        self._found: deque[tuple[int, int]] = deque(maxlen=_WINDOW)

    def exchange(self, sent_ns: int, theirs_ns: int, received_ns: int) -> None:
        """One question and its answer: our clock before, theirs in between, ours behind."""
        self._found.append((received_ns - sent_ns, theirs_ns - (sent_ns + received_ns) // 2))

    @property
    def num_exchanges(self) -> int:
        return len(self._found)

    @property
    def ahead_ns(self) -> int:
        """By the exchange with the shortest round trip."""
        return min(self._found)[1]

    @property
    def sure_ns(self) -> int:
        """`ahead_ns` is wrong by that much at most."""
        return min(self._found)[0] // 2


class Collector:
    """Of one run. Belongs to the event loop on which actors are spawned."""

    current: ClassVar[Collector | None] = None
    """Where a cluster of this process brings its actors; set while a run's log is open."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._tallies: dict[str, Tally] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending = asyncio.Event()
        self._error: SchemaError | None = None
        telemetry.drain(trace.on)

    def follow(self, name: str, actor: Any) -> None:
        """From now on its telemetry is fetched, where it has any; a later actor of that name takes its place."""
        if hasattr(actor, "telemetry"):
            self.forget(name)
            self._tasks[name] = asyncio.create_task(self._follow(name, actor))

    def forget(self, name: str) -> None:
        """It is dead."""
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()

    async def _follow(self, name: str, actor: Any) -> None:
        clock, own, last = RemoteClock(), telemetry.host_id(), False
        # An actor that does not answer has died or hangs, of which others tell.
        with suppress(Exception):
            while not last:
                last = self._ending.is_set()
                sent = time.monotonic_ns()
                async with asyncio.timeout(_PATIENCE_S):
                    answers = await actor.telemetry.call(self._trace.on)
                received, reports = time.monotonic_ns(), [report for _, report in answers]
                clock.exchange(sent, reports[0].now_ns, received)
                near = reports[0].host == own
                for rank, report in enumerate(reports):
                    self._take(f"{name}/{rank}" if len(reports) > 1 else name, report, None if near else clock)
                soon = not near and clock.num_exchanges < _FIRST_EXCHANGES
                # Without a trace only numbers are fetched; every call costs Monarch some memory for good.
                every_s = _EVERY_S if self._trace.on else _EVERY_UNTRACED_S
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), 0.01 if soon else every_s)

    def _take(self, name: str, report: Report, clock: RemoteClock | None) -> None:
        ahead_ns, about = 0, ""
        if clock is not None:
            ahead_ns = clock.ahead_ns
            about = f"clock {ahead_ns / 1e6:+.3f} ms, sure to {clock.sure_ns / 1e6:.3f} ms"
        for taken in report.spans:
            self._trace.add(taken, name, ahead_ns, about)
        if report.dropped:
            telemetry.record("extra/spans_dropped", report.dropped, "sum")
        try:
            merged(self._tallies, report.tallies)
        except SchemaError as error:
            self._error = self._error or error

    def lap(self) -> dict[str, float | int]:
        """The keys of all metrics that have come since the last lap. Raises SchemaError for one of two kinds."""
        self._take("", telemetry.drain(self._trace.on), None)
        if self._error is not None:
            raise self._error
        tallies, self._tallies = self._tallies, {}
        return {name: value for key in sorted(tallies) for name, value in tallies[key].row(key).items()}

    async def finish(self, seconds: float = 2.0) -> None:
        """Asks everybody one last time, while they live; waits `seconds` at most."""
        self._ending.set()
        tasks = list(self._tasks.values())
        self._tasks.clear()
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        self._take("", telemetry.drain(self._trace.on), None)
