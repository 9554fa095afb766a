"""What updates do to requests that run: every way of making a version live, one engine, one load."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.generators import Replica
from apps.bench.harness.sync_actors import pss_bytes
from apps.bench.harness.sync_fleet import CLIENTS, MAX_LEN, PROMPT_TOKENS, Fleet, Live, load, say
from apps.bench.harness.token_gaps import Gaps, Trace, measure
from weightsync.config import WeightSyncConfig
from weightsync.offer import Endpoint, Offer
from weightsync.sync import Needed, Sink

KEEP, RECOMPUTE, DRAIN, ABORT = "keep", "recompute", "drain", "abort"
RELOAD, WHOLE = "reload", "whole"
MODES = {
    KEEP: "flip, old KV goes on",
    RECOMPUTE: "flip, running requests recompute their KV",
    DRAIN: "flip once the running requests have ended",
    ABORT: "running requests are aborted, and resumed after the flip",
    RELOAD: "no shadow: transfer behind decoding, load while paused",
    WHOLE: "paused for transfer (gloo) and load, as the field does it",
}
_FLIPS = (KEEP, RECOMPUTE, DRAIN, ABORT)
_BEFORE, _AFTER = 24, 12
"""Decode steps of the load before an update and after it, at least."""
_DRAIN_SPREAD = 32
"""Requests that are drained end one after the other, over so many decode steps."""
_ROOM = MAX_LEN - PROMPT_TOKENS


class PausingReplica:
    """A sink that stands still from before the transfer until after the load. `paused_s` is for how long, the last
    time.
    """

    def __init__(self, replica: Replica) -> None:
        self.name = replica.name
        self.paused_s = 0.0
        self._replica, self._begin = replica, 0.0

    async def connect(self, endpoint: Endpoint) -> Needed:
        return await self._replica.connect(endpoint)

    async def stage(self, offer: Offer) -> float:
        self._begin = time.perf_counter()
        await self._replica.mesh.pause.call_one()
        try:
            return await self._replica.stage(offer)
        except BaseException:
            await self._replica.mesh.resume.call_one()
            raise

    async def flip(self, version: int) -> float:
        try:
            await self._replica.flip(version)
        finally:
            await self._replica.mesh.resume.call_one()
        self.paused_s = time.perf_counter() - self._begin
        return self.paused_s


@dataclass(frozen=True)
class Pace:
    """How fast this engine is, in seconds: a decode step of the load, an update from publish to applied."""

    step_s: float
    update_s: float

    def lengths(self, mode: str) -> list[int]:
        """Tokens of each client's requests. They outlast the update; where it drains them, they end soon after it."""
        during = math.ceil(self.update_s / self.step_s)
        if mode == DRAIN:
            spread = [_DRAIN_SPREAD * n // (CLIENTS - 1) for n in range(CLIENTS)]
            return [min(_ROOM, _BEFORE + during + more) for more in spread]
        return [min(_ROOM, 2 * (_BEFORE + _AFTER + during))] * CLIENTS


@dataclass(frozen=True)
class Update:
    """One update of a mode: what the weight sync says of it, and what the tokens say."""

    pause_s: float
    stage_s: float
    total_s: float
    gaps: Gaps


class Pauses:
    """One model's engine under one load."""

    def __init__(self, fleet: Fleet, replica: Replica) -> None:
        self._fleet, self._replica = fleet, replica

    async def run(self, updates: int) -> list[dict[str, Any]]:
        """A row for each mode."""
        modules = await self._ask(self._replica.mesh.num_modules.call_one())
        rows = []
        async with self._live(self._replica, "memory", WeightSyncConfig()) as live:
            pace = await self._pace(live)
            for mode in _FLIPS:
                await self._set_mode(mode, shadow=True)
                rows.append(self._row(mode, await self._updates(live, mode, pace, updates), modules))
        await self._set_mode(KEEP, shadow=False)
        async with self._live(self._replica, "memory", WeightSyncConfig(shadow=False)) as live:
            rows.append(self._row(RELOAD, await self._updates(live, RELOAD, pace, updates), modules))
        # The field checks nothing, and neither does this.
        bare = WeightSyncConfig(shadow=False, checksums=False)
        async with self._live(PausingReplica(self._replica), "collective", bare) as live:
            rows.append(self._row(WHOLE, await self._updates(live, WHOLE, pace, updates), modules))
        return rows

    def _live(self, sink: Sink, transport: str, config: WeightSyncConfig) -> Live:
        return Live(self._fleet, [sink], transport, config)

    async def _set_mode(self, kv: str, *, shadow: bool) -> None:
        why = await self._ask(self._replica.mesh.set_mode.call_one(kv, shadow))
        if shadow and why:
            raise RuntimeError(f"there is nothing to flip to: {why}")

    async def _pace(self, live: Live) -> Pace:
        """From updates that count for nothing: the first ones pay for memory that later ones find."""
        await self._update(live, [_ROOM] * CLIENTS)
        update = await self._update(live, [_ROOM] * CLIENTS)
        return Pace(update.gaps.step, update.total_s)

    async def _updates(self, live: Live, mode: str, pace: Pace, count: int) -> list[Update]:
        say(f"pause, {self._fleet.mb} MB: {mode}")
        return [await self._update(live, pace.lengths(mode)) for _ in range(count)]

    async def _update(self, live: Live, lengths: Sequence[int]) -> Update:
        """One version while the clients' requests run."""
        mesh = self._replica.mesh
        await self._ask(mesh.forget.call_one())
        async with load(self._replica, lengths):
            await self._ask(mesh.steps.call_one(_BEFORE, CLIENTS))
            begin = time.perf_counter()
            applied = await live.update()
            total_s = time.perf_counter() - begin
            await self._ask(mesh.steps.call_one(_AFTER, CLIENTS))
        trace: Trace = await self._ask(mesh.trace.call_one())
        return Update(applied.pause_s, applied.stage_s, total_s, measure(trace))

    def _row(self, mode: str, updates: Sequence[Update], modules: int) -> dict[str, Any]:
        """Medians over the updates, and the worst."""
        gaps = [update.gaps for update in updates]
        staging = [gap.staging / gap.step for gap in gaps if gap.staging is not None]
        return {
            "part": "pause",
            "mb": self._fleet.mb,
            "name": mode,
            "how": MODES[mode],
            "modules": modules,
            "pause_ms": _ms([u.pause_s for u in updates]),
            "pause_max_ms": _ms([max(u.pause_s for u in updates)]),
            "stage_ms": _ms([u.stage_s for u in updates]),
            "step_ms": _ms([gap.step for gap in gaps]),
            "before_steps_max": round(max(gap.before / gap.step for gap in gaps), 2),
            "staging_steps": round(statistics.median(staging), 2) if staging else None,
            "gap_ms": _ms([gap.flip for gap in gaps]),
            "gap_steps": round(statistics.median(gap.flip / gap.step for gap in gaps), 2),
            "gap_steps_max": round(max(gap.flip / gap.step for gap in gaps), 2),
            "update_ms": _ms([u.total_s for u in updates]),
            "update_gap_ms": _ms([gap.update for gap in gaps]),
            "update_gap_max_ms": _ms([max(gap.update for gap in gaps)]),
            "engine_mb": round(sum(map(pss_bytes, self._fleet.engine_pids())) / 1e6),
            "updates": len(updates),
        }

    async def _ask(self, call: Any) -> Any:
        return await self._fleet.ask(call, "the generator to answer")


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)
