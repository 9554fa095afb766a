"""A run in one process, without a model: real replay, journal, checkpoints and prompts; a generator and a trainer that
keep books. bench/crash.py and a test kill it and start it again; nothing here knows about that.

    python -m apps.bench.harness.crash_run FOLDER STEPS '{"token_s": 0.001}'
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forge import channel
from forge.batch import make_group
from forge.checkpoints import Checkpoints, Saver
from forge.data import PromptStream
from replay.config import ReplayConfig
from replay.events import Tokens
from replay.persistence import JournalPlace
from replay.service import Replay
from replay.staleness import Ticket

ROWS = 37
GROUPS_PER_STEP = 3
GROUP_SIZE = 2
MAX_STALENESS = 2


@dataclass(frozen=True)
class Pace:
    """How fast all goes, in seconds; `every` is in steps, `lengths` are the tokens that an episode may have."""

    token_s: float = 0.001
    step_s: float = 0.01
    progress_s: float = 0.01
    journal_s: float = 0.05
    every: int = 3
    lengths: tuple[int, ...] = (3, 5, 8, 40)


class Trainer:
    """Its state is the list of the prompts that it was trained on, batch by batch."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.seen: list[list[int]] = []
        self._saving: asyncio.Task[None] | None = None

    async def stage_state(self, folder: str) -> None:
        text = json.dumps(self.seen)

        async def write() -> None:
            await asyncio.sleep(random.random() * 0.03)
            await asyncio.to_thread(_write, Path(folder), text)

        self._saving = asyncio.create_task(write())

    async def wait_state(self) -> None:
        assert self._saving is not None
        await self._saving

    async def step(self, batch: Any) -> int:
        td = channel.open(batch.handles[0])
        starts = [0, *td["lengths"].cumsum(0)[:-1].tolist()]
        # Packed episodes come in any order; all of a group begin with its prompt.
        prompts = {int(group): int(td["tokens"][at]) for group, at in zip(td["group_id"], starts, strict=True)}
        self.seen.append(list(prompts.values()))
        await asyncio.sleep(self._pace.step_s)
        return len(self.seen)


def _write(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "seen.json").write_text(text)


class Generator:
    """Makes token `place * 1000 + position`, and writes down that it did before anybody hears of it."""

    def __init__(self, folder: Path, pace: Pace) -> None:
        self.version = 0
        self.pace = pace
        self._log = open(folder / "generated.log", "a", buffering=1)  # noqa: SIM115
        self._fresh: list[Tokens] = []

    async def episode(self, ticket: Ticket, place: int, length: int) -> tuple[list[int], list[int]]:
        begun = ticket.begun.get(place)
        tokens = [] if begun is None else begun.tokens.tolist()
        versions = [] if begun is None else begun.versions.tolist()
        for position in range(len(tokens), length):
            await asyncio.sleep(self.pace.token_s)
            self._log.write(f"{ticket.seq} {place} {position}\n")
            tokens.append(place * 1000 + position)
            versions.append(self.version)
            columns = (torch.tensor(tokens[-1:]).int(), torch.tensor([-1.0]), torch.tensor(versions[-1:]).int())
            finish = "length" if position + 1 == length else ""
            self._fresh.append(Tokens(ticket.seq, place, position, *columns, finish))
        return tokens, versions

    def progress(self) -> list[Tokens]:
        fresh, self._fresh = self._fresh, []
        return fresh


async def rollout_loop(replay: Replay, generator: Generator) -> None:
    while (ticket := await replay.reserve()) is not None:
        rng = random.Random(ticket.seq)
        lengths = [rng.choice(generator.pace.lengths) for _ in range(GROUP_SIZE)]
        made = await asyncio.gather(*(generator.episode(ticket, g, n) for g, n in enumerate(lengths)))
        for place, (tokens, _) in enumerate(made):
            assert tokens == [place * 1000 + position for position in range(lengths[place])], "a token is not its own"
        logprobs = [[-1.0] * n for n in lengths]
        prompt = [ticket.prompt.epoch * 1000 + ticket.prompt.id]
        group = make_group(prompt, [m[0] for m in made], logprobs, [m[1] for m in made], group_id=ticket.seq)
        group["rewards"] = torch.arange(GROUP_SIZE).float()
        await replay.add(ticket, group)


async def main(folder: Path, steps: int, pace: Pace) -> None:
    """Begins or goes on with the run in `folder`, up to `steps`."""
    checkpoints = Checkpoints(folder / "checkpoints")
    found = checkpoints.latest()
    trainer, generator = Trainer(pace), Generator(folder, pace)
    if found is not None:
        trainer.seen = json.loads((found.path / "trainer" / "seen.json").read_text())
        assert len(trainer.seen) == found.version
    version = generator.version = len(trainer.seen)
    resumed = version if (folder / "journal").exists() else None
    replay = Replay(
        ReplayConfig(MAX_STALENESS, journal_interval_s=pace.journal_s, reserve_timeout_s=30, sample_timeout_s=30),
        groups_per_step=GROUPS_PER_STEP,
        start_version=version,
        prompts=make_prompts(),
        journal=JournalPlace(str(folder / "journal"), "crash", resumed),
    )
    saver = Saver(checkpoints, trainer, replay, pace.every)
    print("running", flush=True)
    slots = GROUPS_PER_STEP * (MAX_STALENESS + 1)
    loops = [asyncio.create_task(rollout_loop(replay, generator)) for _ in range(slots)]

    async def progress_loop() -> None:
        while True:
            await asyncio.sleep(pace.progress_s)
            await replay.progress(generator.progress())

    loops.append(asyncio.create_task(progress_loop()))
    while version < steps:
        batch = await replay.sample(version)
        assert batch is not None
        assert batch.stats["staleness/max"] <= MAX_STALENESS
        version = await trainer.step(batch)
        await saver.after_step(version)
        generator.version = version
        await replay.release(version)
    await saver.finish(version)
    await replay.close()
    for loop in loops:
        loop.cancel()
    await replay.shut_down()


def make_prompts() -> PromptStream:
    """The stream that every run begins with."""
    return PromptStream([{"prompt": str(i)} for i in range(ROWS)], lambda row: (row["prompt"], [1]), seed=3)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), Pace(**json.loads(sys.argv[3]))))
