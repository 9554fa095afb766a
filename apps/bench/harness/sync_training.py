"""Training with a weight sync after every step, and training while the receiver stands still."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from actors.generators import Replica
from actors.trainer_mesh import TrainerMesh
from apps.bench.harness import rates
from apps.bench.harness.llamas import VOCAB
from apps.bench.harness.sync_fleet import (
    CLIENTS,
    GENERATOR,
    MAX_LEN,
    PROMPT_TOKENS,
    TRAINER,
    CpuMeter,
    Fleet,
    Live,
    load,
    say,
)
from forge import channel
from forge.batch import collate, make_group
from weightsync.config import WeightSyncConfig

MOST_MB = 300
"""Larger models are not trained here: a step of theirs takes a minute on one core."""
NONE, SYNC = "no sync", "a sync every step"
_GROUP, _EPISODE = 8, 64
_NUM_BATCHES = 4
_TOKENS, _FEWEST_TOKENS = 2048, 512


def recorded_batches(mb: int) -> list[TensorDict]:
    """Batches as a replay hands them out, of random tokens: fewer tokens for larger models, whose steps take longer."""
    tokens = max(_FEWEST_TOKENS, min(_TOKENS, _TOKENS * 12 // mb))
    rng = random.Random(0)
    return [_batch(rng, tokens // (_GROUP * _EPISODE)) for _ in range(_NUM_BATCHES)]


def _batch(rng: random.Random, groups: int) -> TensorDict:
    made = []
    for number in range(max(1, groups)):
        prompt = [rng.randrange(2, VOCAB) for _ in range(PROMPT_TOKENS)]
        length = _EPISODE - PROMPT_TOKENS
        completions = [[rng.randrange(2, VOCAB) for _ in range(length)] for _ in range(_GROUP)]
        likely = [[-math.log(VOCAB)] * length for _ in range(_GROUP)]
        group = make_group(prompt, completions, likely, [[0] * length for _ in range(_GROUP)], group_id=number)
        group["advantages"] = torch.tensor([1.0, -1.0] * (_GROUP // 2))
        made.append(group)
    return collate(made)


class Steps:
    """A trainer that is fed from recorded batches."""

    def __init__(self, fleet: Fleet, trainer: TrainerMesh) -> None:
        self._trainer = trainer
        self._batches = recorded_batches(fleet.mb)
        self._count = 0

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self._batches[0]["tokens"].numel()

    async def one(self) -> None:
        """The next step."""
        batch = self._batches[self._count % _NUM_BATCHES]
        self._count += 1
        await self._trainer.step([await asyncio.to_thread(channel.put, batch)])


@dataclass
class Blocks:
    """A few steps in a row, again and again: their wall and CPU seconds, a step each."""

    wall: list[float] = field(default_factory=list)
    trainer_cpu: list[float] = field(default_factory=list)
    generator_cpu: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)


async def measure(fleet: Fleet, replica: Replica, rounds: int) -> list[dict[str, Any]]:
    """A row for the idle generator and one for the serving one. Blocks with and without sync take turns."""
    rows = []
    async with Live(fleet, [replica], "memory", WeightSyncConfig()) as live:
        steps = Steps(fleet, fleet.source("memory", WeightSyncConfig()))
        await _calibrated(steps)
        per_block = await _calibrated(steps)
        for name in ("idle", "serving"):
            say(f"training, {fleet.mb} MB: generator {name}")
            lengths = [MAX_LEN - PROMPT_TOKENS] * CLIENTS if name == "serving" else []
            async with load(replica, lengths):
                blocks = {NONE: Blocks(), SYNC: Blocks()}
                for number in range(rounds):
                    for kind in rates.turns([NONE, SYNC], number):
                        await _block(fleet, live, steps, kind, per_block, blocks[kind])
            rows.append(_row(fleet.mb, name, steps.tokens, per_block, blocks[NONE], blocks[SYNC]))
    return rows


async def _calibrated(steps: Steps) -> int:
    """Steps of a block: two seconds' worth."""
    begin = time.perf_counter()
    await steps.one()
    return max(1, round(2.0 / (time.perf_counter() - begin)))


async def _block(fleet: Fleet, live: Live, steps: Steps, kind: str, count: int, into: Blocks) -> None:
    """`count` steps; with sync each has the staging of a version beside it, the first one too."""
    meter = CpuMeter(fleet, [TRAINER, GENERATOR])
    for _ in range(count):
        if kind == SYNC:
            into.stalls.append(await live.publish())
        await steps.one()
    wall, cpu = meter.read()
    if kind == SYNC:
        await live.applied()  # what is left of it is on the account of no block
    into.wall.append(wall / count)
    into.trainer_cpu.append(cpu[TRAINER] / count)
    into.generator_cpu.append(cpu[GENERATOR] / count)


def _row(mb: int, name: str, tokens: int, per_block: int, none: Blocks, sync: Blocks) -> dict[str, Any]:
    stall = statistics.median(sync.stalls)
    step = statistics.median(none.wall)
    return {
        "part": "training",
        "mb": mb,
        "name": f"generator {name}",
        "tokens": tokens,
        "steps_per_s": round(1 / step, 3),
        "sync_steps_per_s": round(1 / statistics.median(sync.wall), 3),
        "over_none": round(rates.ratio(none.wall, sync.wall), 4),
        "stall_ms": round(stall * 1e3, 3),
        "stall_only": round(step / (step + stall), 4),
        "trainer_cpu_ms": round(1e3 * statistics.median(none.trainer_cpu), 1),
        "sync_trainer_cpu_ms": round(1e3 * statistics.median(sync.trainer_cpu), 1),
        "generator_cpu_ms": round(1e3 * statistics.median(none.generator_cpu), 1),
        "sync_generator_cpu_ms": round(1e3 * statistics.median(sync.generator_cpu), 1),
        "rounds": len(none.wall),
        "steps_per_block": per_block,
    }


# --- the receiver stands still


async def measure_stopped(fleet: Fleet, replica: Replica, stop_s: float) -> list[dict[str, Any]]:
    """One row: the pace before, while every process of the generator's engine is stopped, and what comes after."""
    say(f"stop, {fleet.mb} MB: the engine stands still for {stop_s:g} s")
    async with Live(fleet, [replica], "memory", WeightSyncConfig(deadline_s=stop_s + 300)) as live:
        steps = Steps(fleet, fleet.source("memory", WeightSyncConfig()))
        await steps.one()
        before, before_cpu = await _train(fleet, live, steps, max(5.0, stop_s / 2))
        await live.applied()
        skipped = live.sync.skipped
        pids = fleet.engine_pids()
        _signal(pids, signal.SIGSTOP)
        try:
            during, during_cpu = await _train(fleet, live, steps, stop_s)
            stopped = sum(_state(pid) == "T" for pid in pids)
            held = live.sync.applied_version
        finally:
            _signal(pids, signal.SIGCONT)
        begin = time.perf_counter()
        applied = await live.applied()
        return [
            {
                "part": "stop",
                "mb": fleet.mb,
                "name": f"stopped for {stop_s:g} s",
                "processes": len(pids),
                "stopped": stopped,
                "steps_before": len(before),
                "steps_during": len(during),
                "before_steps_per_s": round(len(before) / sum(before), 3),
                "during_steps_per_s": round(len(during) / sum(during), 3),
                "during_over_before": round(statistics.median(before) / statistics.median(during), 4),
                "before_cpu_ms": round(before_cpu * 1e3, 1),
                "during_cpu_ms": round(during_cpu * 1e3, 1),
                "longest_step_ms": round(max(during) * 1e3, 1),
                "published": len(during),
                "skipped": live.sync.skipped - skipped,
                "newest": live.sync.published_version,
                "held": held,
                "applied": applied.version,
                "caught_up_s": round(time.perf_counter() - begin, 3),
            }
        ]


async def _train(fleet: Fleet, live: Live, steps: Steps, seconds: float) -> tuple[list[float], float]:
    """Steps for so many seconds, each with a publish after it: what each took, and the trainer's CPU seconds a step."""
    took: list[float] = []
    meter = CpuMeter(fleet, [TRAINER])
    end = time.perf_counter() + seconds
    while not took or time.perf_counter() < end:
        begin = time.perf_counter()
        await steps.one()
        await live.publish()
        took.append(time.perf_counter() - begin)
    _, cpu = meter.read()
    return took, cpu[TRAINER] / len(took)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
