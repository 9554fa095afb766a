"""Adapter-only sync: a few megabytes into a free slot of an engine that keeps what it decodes with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from actors.generators import Replica
from apps.bench.harness.sync_actors import RANK
from apps.bench.harness.sync_fleet import CLIENTS, MAX_LEN, PROMPT_TOKENS, Fleet, Live, load, say
from weightsync.config import WeightSyncConfig

ADAPTERS = {
    "q, v": ("q_proj", "v_proj"),
    "all linear": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
"""What is adapted: PEFT's default for a Llama, and everything that can be."""
NUMBER = 1
"""Of the generator that serves them: another engine than the one that flips."""
_WARM_UP, _UPDATES = 3, 20


async def measure(fleet: Fleet) -> list[dict[str, Any]]:
    """A row for each adapter, with the engine idle and serving."""
    say(f"adapters, {fleet.mb} MB: starting a generator for them")
    replica = await fleet.generator(NUMBER, ADAPTERS["all linear"])
    rows = []
    for name, targets in ADAPTERS.items():
        say(f"adapters, {fleet.mb} MB: {name}")
        await fleet.ask(fleet.trainer.adapt.call_one(targets), "the trainer to adapt")
        async with Live(fleet, [replica], "memory", WeightSyncConfig()) as live:
            await _updates(live, replica, _WARM_UP)
            for state in ("idle", "serving"):
                lengths = [MAX_LEN - PROMPT_TOKENS] * CLIENTS if state == "serving" else []
                async with load(replica, lengths):
                    if lengths:
                        await fleet.ask(replica.mesh.steps.call_one(4, CLIENTS), "the clients' first tokens")
                    rows.append(_row(fleet.mb, name, state, live.nbytes, await _updates(live, replica, _UPDATES)))
    return rows


async def _updates(live: Live, replica: Replica, count: int) -> list[tuple[float, float, float]]:
    """Seconds of each update: the publish, the worker's part, and from publish to applied."""
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        stall_s = await live.publish()
        await live.applied()
        total_s = time.perf_counter() - begin
        found.append((stall_s, await replica.mesh.staged_s.call_one(), total_s))
    return found


def _row(mb: int, name: str, state: str, nbytes: int, updates: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    stalls, transfers, totals = zip(*updates, strict=True)
    return {
        "part": "adapters",
        "mb": mb,
        "name": f"{name}, {state}",
        "rank": RANK,
        "adapter_mb": round(nbytes / 1e6, 2),
        "stall_ms": _ms(stalls),
        "transfer_ms": _ms(transfers),
        "transfer_max_ms": _ms([max(transfers)]),
        "applied_ms": _ms(totals),
        "applied_max_ms": _ms([max(totals)]),
        "updates": len(updates),
    }


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)
