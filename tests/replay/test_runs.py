"""Whole runs of the three loops around a Replay: they end, and nothing above the bound is trained."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from forge import channel
from forge.batch import make_group, oldest_version
from replay.config import ReplayConfig
from replay.service import Replay

GRID = list(itertools.product(range(4), range(1, 4)))


def group(versions: list[list[int]], rewards: list[float]) -> TensorDict:
    """A group with one episode for each list of token versions."""
    tokens = [[1] * len(v) for v in versions]
    td = make_group([7, 8], tokens, [[-0.5] * len(v) for v in versions], versions, group_id=0)
    td["rewards"] = torch.tensor(rewards)
    return td


class Run:
    """The three loops of a run around a real Replay, with generation and transfers of random length."""

    def __init__(self, max_staleness: int, groups_per_step: int, steps: int, seed: int, **options: Any) -> None:
        self.rng = random.Random(seed)
        self.bound, self.steps = max_staleness, steps
        self.vanish = options.pop("vanish", False)
        cfg = ReplayConfig(max_staleness, reserve_timeout_s=30, sample_timeout_s=30, **options)
        self.replay = Replay(cfg, groups_per_step=groups_per_step, degenerate="drop")
        self.published = self.held = self.lost = 0
        self.news = asyncio.Event()
        self.staleness: list[int] = []

    async def some_turns(self, most: int) -> None:
        for _ in range(self.rng.randrange(most + 1)):
            await asyncio.sleep(0)

    async def rollout(self) -> None:
        while ticket := await self.replay.reserve():
            versions: list[list[int]] = [[], []]
            for _ in range(self.rng.randint(1, 3)):
                for episode in versions:
                    episode.append(self.held)
                await self.some_turns(8)
            if self.vanish and ticket.seq % 5 == 0:
                self.lost += 1
                continue
            match self.rng.randrange(8):
                case 0:
                    await self.replay.fail(ticket)
                case 1:
                    await self.replay.add(ticket, group(versions, [1.0, 1.0]))
                case _:
                    await self.replay.add(ticket, group(versions, [0.0, 1.0]))

    async def train(self) -> None:
        for version in range(self.steps):
            batch = await self.replay.sample(version, num_shards=2)
            assert batch is not None
            shards = [channel.take(handle) for handle in batch.handles]
            self.staleness += [version - oldest_version(shard) for shard in shards]
            assert max(self.staleness) <= self.bound
            assert batch.stats["staleness/max"] == max(self.staleness[-2:])
            assert batch.stats["groups/expired"] == 0, "an honest group got too old"
            if not self.vanish:
                assert batch.stats["episodes/dropped"] == 2 * batch.stats["groups/degenerate"]
            await self.some_turns(20)
            self.published = version + 1
            self.news.set()
        await self.replay.close()

    async def sync(self) -> None:
        while self.held < self.steps:
            await self.news.wait()
            self.news.clear()
            newest = self.published
            await self.some_turns(40)
            self.held = newest
            await self.replay.release(newest)

    async def go(self, num_producers: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.train())
            tasks.create_task(self.sync())
            for _ in range(num_producers):
                tasks.create_task(self.rollout())


KINDS: dict[str, dict[str, Any]] = {
    "strict": {"policy": "strict"},
    "fifo": {},
    "half a window": {"window": 0.5},
    "a full window": {"window": 1.0},
    "uniform": {"policy": "uniform"},
    "staleness": {"policy": "staleness", "max_uses": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("max_staleness", "groups_per_step"), GRID)
def test_runs_of_any_length_end_and_never_train_above_the_bound(
    max_staleness: int, groups_per_step: int, kind: str
) -> None:
    async def main() -> None:
        stalest = 0
        for steps in (1, 2, max_staleness + 1, max_staleness + 2, 12):
            for num_producers in (1, 7):
                simulated = Run(max_staleness, groups_per_step, steps, seed=steps * num_producers, **KINDS[kind])
                async with asyncio.timeout(60):
                    await simulated.go(num_producers)
                assert len(simulated.staleness) == 2 * steps
                stalest = max(stalest, *simulated.staleness)
        left = math.ceil(max_staleness * (1 - KINDS[kind].get("window", 0.0)))
        assert left <= stalest <= max_staleness, "the runs never came near the bound"

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_runs_whose_rollout_loops_lose_groups_end_too(kind: str) -> None:
    async def main() -> None:
        simulated = Run(1, 2, steps=30, seed=1, vanish=True, straggler_timeout_s=0.05, **KINDS[kind])
        async with asyncio.timeout(60):
            await simulated.go(4)
        assert simulated.lost > 4, "never more than the slots"
        assert (await simulated.replay.stats())["total/groups_straggled"] > 0, (
            "more groups were lost than there are slots"
        )

    asyncio.run(main())
