"""The controller's handle on weights: publish without waiting, apply the newest, say when it serves.

    train loop ── publish(v) ──► snapshot into the buffer that nobody reads ──► pending = v  (newest wins)
    weight loop ── waits for pending ──► each replica stages v while it decodes, flips ──► on_applied(v)

With two buffers and at most one being read, a publish always finds a free one: the trainer never waits
for a receiver. A version that is overwritten before anybody read it is counted as skipped; nobody may wait
for one exact version, only for "this version or newer".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forge.errors import DeadlineExceeded, WeightSyncError
from forge.mesh import within
from weightsync.publisher import NUM_BUFFERS, Endpoint


class Source(Protocol):
    """The trainer as weight sync sees it; all its ranks at once."""

    async def endpoint(self) -> Endpoint: ...

    async def snapshot(self, buffer: int) -> float: ...


class Sink(Protocol):
    """One generator replica as weight sync sees it."""

    name: str

    async def connect(self, endpoint: Endpoint) -> None: ...

    async def apply(self, version: int, buffer: int) -> ApplyResult: ...


@dataclass(frozen=True)
class ApplyResult:
    """One replica's update: `stage_s` behind decoding, `pause_s` of standing still for the flip, seconds."""

    stage_s: float
    pause_s: float


@dataclass(frozen=True)
class Applied:
    """All serving replicas hold `version`. `pause_s` is the longest flip among them."""

    version: int
    stage_s: float
    pause_s: float
    skipped: int


class WeightSync:
    """Publishes versions of one source to several sinks.

    Call order: `connect` once, then `publish` from the train loop and `run` as a task of its own.
    `deadline_s` bounds each snapshot and each apply.
    """

    def __init__(self, source: Source, sinks: Sequence[Sink], *, deadline_s: float = 300.0) -> None:
        self._source = source
        self._sinks = list(sinks)
        self._deadline_s = deadline_s
        self._pending: tuple[int, int] | None = None
        self._reading: int | None = None
        self._newer = asyncio.Event()
        self._skipped = 0
        self._closed = False
        self._nbytes = 0
        self.published_version = 0
        self.applied_version = 0

    @property
    def skipped(self) -> int:
        """Versions that a newer one overtook before any replica read them."""
        return self._skipped

    async def connect(self) -> None:
        endpoint = await self._within(self._source.endpoint(), "the trainer's weight layout")
        self._nbytes = endpoint.layout.nbytes
        await self._within(
            asyncio.gather(*(sink.connect(endpoint) for sink in self._sinks)),
            f"{len(self._sinks)} generator replicas to map {self._nbytes} bytes of weights",
        )

    async def publish(self, version: int) -> float:
        """Snapshots `version`; returns the seconds that the trainer stood still for it."""
        if version <= self.published_version:
            raise WeightSyncError(f"version {version} was published after {self.published_version}; versions only grow")
        begin = time.perf_counter()
        if self._pending is not None:
            self._skipped += 1
            self._pending = None
            self._newer.clear()
        buffer = next(b for b in range(NUM_BUFFERS) if b != self._reading)
        await self._within(self._source.snapshot(buffer), f"the trainer's snapshot of version {version}")
        self.published_version = version
        self._pending = (version, buffer)
        self._newer.set()
        return time.perf_counter() - begin

    async def run(self, on_applied: Callable[[Applied], Awaitable[None]]) -> None:
        """The weight loop. Waits for a newer snapshot; returns after `close`."""
        while True:
            await self._newer.wait()
            if self._closed:
                return
            if self._pending is None:
                self._newer.clear()
                continue
            version, buffer = self._pending
            self._pending, self._reading = None, buffer
            self._newer.clear()
            try:
                results = await asyncio.gather(*(self._apply(sink, version, buffer) for sink in self._sinks))
            finally:
                self._reading = None
            self.applied_version = version
            applied = Applied(
                version,
                max((r.stage_s for r in results), default=0.0),
                max((r.pause_s for r in results), default=0.0),
                self._skipped,
            )
            await on_applied(applied)

    async def _apply(self, sink: Sink, version: int, buffer: int) -> ApplyResult:
        what = f"{sink.name} to apply version {version} ({self._nbytes} bytes)"
        try:
            return await self._within(sink.apply(version, buffer), what)
        except DeadlineExceeded as error:
            raise WeightSyncError(f"{error}; it goes on serving version {self.applied_version}") from error

    async def _within(self, awaitable: Awaitable[Any], what: str) -> Any:
        return await within(self._deadline_s, what, awaitable)

    def close(self) -> None:
        """Lets `run` return after the apply that is under way; a version that still waits is applied nowhere."""
        self._closed = True
        self._newer.set()
