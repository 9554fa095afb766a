"""The trainer is restored while the replay lives on: what was trained since comes once more, nothing else changes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from forge import channel
from forge.batch import make_group
from forge.channel import Pool
from forge.data import PromptStream
from forge.errors import ConfigError
from replay.config import ReplayConfig
from replay.events import Batch, Entry, ReplayState
from replay.persistence import JournalPlace
from replay.redo import redo
from replay.segments import JournalError
from replay.service import Replay, Rewound, SampledBatch
from replay.staleness import Ticket
from replay.storage import store

B, S = 2, 2


def prompts() -> PromptStream:
    return PromptStream([{"prompt": f"p{i}"} for i in range(5)], lambda row: (row["prompt"], [1]), seed=1)


def make(folder: Path, resume_from: int | None = None, **options: Any) -> Replay:
    config = {"max_staleness": S, "reserve_timeout_s": 20.0, "sample_timeout_s": 20.0, "journal_interval_s": 0.2}
    return Replay(
        ReplayConfig(**{**config, **options}),
        groups_per_step=B,
        start_version=resume_from or 0,
        prompts=prompts(),
        journal=JournalPlace(str(folder / "journal"), "a run", resume_from),
    )


def group(ticket: Ticket, version: int, width: int = 2) -> TensorDict:
    made = make_group(
        [1], [[7] * width, [9]], [[-1.0] * width, [-3.0]], [[version] * width, [version]], group_id=ticket.seq
    )
    made["rewards"] = torch.tensor([float(ticket.seq), -1.0])
    return made


def seqs_of(batch: SampledBatch | None) -> list[int]:
    assert batch is not None
    return sorted(set(channel.open(batch.handles[0])["group_id"].tolist()))


async def reserve(replay: Replay) -> Ticket:
    ticket = await replay.reserve()
    assert ticket is not None
    return ticket


async def train(replay: Replay, version: int, made_at: int | None = None) -> list[int]:
    """A batch of new groups."""
    for ticket in [await reserve(replay) for _ in range(B)]:
        await replay.add(ticket, group(ticket, version if made_at is None else made_at))
    trained = seqs_of(await replay.sample(version))
    await replay.release(version + 1)
    return trained


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_what_was_trained_since_is_served_as_it_was_and_nothing_else_moves(tmp_path: Path) -> None:
    async def scenario() -> None:
        replay = make(tmp_path)
        rows = []
        for version in range(3):
            for ticket in [await reserve(replay) for _ in range(B)]:
                await replay.add(ticket, group(ticket, version))
            batch = await replay.sample(version)
            assert batch is not None
            rows.append((channel.take(batch.handles[0]), batch.stats))
            await replay.release(version + 1)
        running = await reserve(replay)
        before = await replay.stats()
        assert await replay.rewind(1) == [1, 2]
        assert await replay.stats() == before
        for version in (1, 2):
            batch = await replay.sample(version)
            assert batch is not None
            again, (groups, stats) = channel.take(batch.handles[0]), rows[version]
            assert batch.stats == stats
            assert all(torch.equal(again[key], groups[key]) for key in groups.keys())  # noqa: SIM118 - a TensorDict iterates over rows
        assert await replay.stats() == before
        await replay.add(running, group(running, 3))
        assert await train(replay, 3) == [6, 7]
        assert await replay.rewind(4) == []
        await replay.shut_down()

    run(scenario)


def test_it_may_be_rewound_again_and_to_another_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        replay = make(tmp_path)
        trained = [await train(replay, version) for version in range(4)]
        assert await replay.rewind(1) == [1, 2, 3]
        assert seqs_of(await replay.sample(1)) == trained[1]
        assert await replay.rewind(0) == [0, 1, 2, 3]
        assert await replay.rewind(2) == [2, 3]
        assert [seqs_of(await replay.sample(version)) for version in (2, 3)] == trained[2:]
        trained.append(await train(replay, 4))
        assert await replay.rewind(3) == [3, 4]
        assert [seqs_of(await replay.sample(version)) for version in (3, 4)] == trained[3:]
        await replay.shut_down()

    run(scenario)


def test_a_sample_that_waits_is_void_and_leaves_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        replay = make(tmp_path)
        trained = await train(replay, 0)
        waiting = asyncio.create_task(replay.sample(1))
        await asyncio.sleep(0.01)
        assert await replay.rewind(0) == [0]
        with pytest.raises(Rewound, match="policy_version 1 was awaited"):
            await waiting
        assert seqs_of(await replay.sample(0)) == trained
        assert await train(replay, 1) == [2, 3]
        await replay.shut_down()

    run(scenario)


class Watched:
    """The channel, on a pool whose memory can be looked at."""

    def __init__(self) -> None:
        self.pool = Pool(inline_bytes=0)
        self.alloc, self.open = self.pool.alloc, self.pool.open
        self.close, self.withdraw = self.pool.close, self.pool.withdraw
        self.before_put: Callable[[], object] = lambda: None

    def put(self, td: TensorDict, readers: int = 1) -> Any:
        self.before_put()
        return self.pool.put(td, readers)

    def busy(self) -> int:
        self.pool.reclaim()
        return self.pool.stats().busy_bytes


@pytest.mark.parametrize("readers", [1, 2])
def test_batches_that_nobody_will_open_leave_no_memory_taken(tmp_path: Path, readers: int) -> None:
    async def scenario() -> None:
        own = Watched()
        replay = make(tmp_path)
        replay._channel, replay._readers = own, readers
        for version in range(2):
            for ticket in [await reserve(replay) for _ in range(B)]:
                await replay.add(ticket, group(ticket, version, width=2000))
            assert await replay.sample(version) is not None
            await replay.release(version + 1)
            await replay.rewind(version + 1)
            assert own.busy() == 0
        # One that is on its way while the trainer goes back.
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        own.before_put = lambda: loop.call_soon_threadsafe(asked.set)
        await replay.rewind(1)
        on_its_way = asyncio.create_task(replay.sample(1))
        await asked.wait()
        back = asyncio.create_task(replay.rewind(0))
        with contextlib.suppress(Rewound):
            await on_its_way
        assert await back == [0, 1]
        await replay.rewind(0)
        assert own.busy() == 0
        await replay.shut_down()
        own.pool.shutdown()

    run(scenario)


def test_without_a_journal_it_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        replay = Replay(ReplayConfig(), groups_per_step=B)
        with pytest.raises(ConfigError, match=r"from version 0 on: replay\.journal is false"):
            await replay.rewind(0)

    run(scenario)


def test_a_journal_that_was_pruned_too_far_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        replay = make(tmp_path)
        await train(replay, 0)
        await replay.mark(1)
        await replay.prune(await replay.marked())
        with pytest.raises(JournalError, match=r"no whole snapshot of version 0 or before, only of \[1\]"):
            await replay.rewind(0)
        assert await train(replay, 1) == [2, 3], "the run goes on where it was"
        await replay.shut_down()

    run(scenario)


def test_a_group_in_several_batches_keeps_its_number_of_uses() -> None:
    def entry(seq: int, uses: int) -> Entry:
        return Entry(seq, 0, group=store(group(Ticket(seq, 0), 0), seq).group, uses=uses)

    batches = [Batch(1, [0, 1]), Batch(2, [1, 2]), Batch(3, [1, 3])]
    state = ReplayState(1, 4, {seq: entry(seq, seq == 0) for seq in range(4)}, batches)
    left = redo(state, 2, 4)
    assert left.versions == [2, 3]
    assert {seq: entry.uses for seq, entry in left.entries.items()} == {1: 1, 2: 0, 3: 0}
    assert left.serve(3 - 1) is not None
    assert {seq: entry.uses for seq, entry in left.entries.items()} == {1: 2, 3: 0}
    assert left.serve(2) is None
    assert left.serve(4) is None
    assert left.entries == {}


@dataclass
class Run:
    """A replay, and a trainer that may go back."""

    replay: Replay
    tickets: list[Ticket] = field(default_factory=list)
    released: int = 0
    version: int = 0
    """Where the trainer stands; `batches` may reach further."""
    batches: list[list[int]] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    redone: int = 0

    async def step(self, what: str, pick: float) -> None:
        """What happens in a run, as far as it is possible now."""
        stats = await self.replay.stats()
        if what == "reserve" and stats["replay/free_slots"]:
            ticket = await reserve(self.replay)
            self.tickets.append(ticket)
            self.drawn.append(5 * ticket.prompt.epoch + ticket.prompt.id)
        elif what in ("add", "fail") and self.tickets:
            ticket = self.tickets.pop(int(pick * len(self.tickets)))
            await (
                self.replay.add(ticket, group(ticket, ticket.version)) if what == "add" else self.replay.fail(ticket)
            )
        elif what == "release" and self.released < len(self.batches):
            self.released += 1
            await self.replay.release(self.released)
        elif what == "sample":
            await self.sample()

    async def sample(self) -> None:
        new, buffer = self.version == len(self.batches), self.replay._buffer
        if new:
            buffer._advance(self.version)  # else groups that are too old to be used again count as ready
            if not buffer._is_ready(buffer._choose()):
                return
        batch = await self.replay.sample(self.version)
        assert batch is not None
        assert batch.stats["staleness/max"] <= S
        if new:
            self.batches.append(seqs_of(batch))
        else:
            assert seqs_of(batch) == self.batches[self.version]
            self.redone += 1
        self.version += 1

    async def rewind(self, version: int) -> None:
        assert await self.replay.rewind(version) == list(range(version, len(self.batches)))
        self.version = version

    async def mark(self) -> int:
        await self.replay.mark(self.version)
        assert await self.replay.marked() >= 0
        return self.version


async def rewound_and_undisturbed(folder: Path, seed: int, options: dict[str, Any]) -> None:
    rng, marked = random.Random(seed), 0
    there, twin = Run(make(folder / "there", **options)), Run(make(folder / "twin", **options))
    for _ in range(120):
        what = rng.choices(["reserve", "add", "sample", "release", "fail"], [6, 6, 4, 4, 1])[0]
        pick, behind = rng.random(), there.version < len(there.batches)
        await there.step(what, pick)
        if not behind or what != "sample":
            await twin.step(what, pick)
        if rng.random() < 0.08:
            await there.rewind(rng.randint(max(0, len(there.batches) - 4), len(there.batches)))
        if rng.random() < 0.08:
            marked = await there.mark()
    while there.version < len(there.batches):
        await there.sample()
    assert there.redone
    assert there.batches == twin.batches
    assert there.drawn == twin.drawn
    assert len(there.drawn) == len(set(there.drawn))
    assert await there.replay.stats() == await twin.replay.stats()
    await there.replay.shut_down()
    await twin.replay.shut_down()
    await resumed(folder / "there", marked, there, options)


async def resumed(folder: Path, marked: int, before: Run, options: dict[str, Any]) -> None:
    """A run that is resumed from a checkpoint, perhaps one of a trainer that was catching up, trains the same again."""
    after = Run(make(folder, marked, **options), version=marked, batches=before.batches)
    for _ in range(marked, len(before.batches)):
        await after.sample()
    now, then = await after.replay.stats(), await before.replay.stats()
    same = ("replay/queued_groups", "replay/running_groups", "replay/next_version")
    assert {key: now[key] for key in same} == {key: then[key] for key in same}
    assert {k: v for k, v in now.items() if k.startswith("total")} == {k: v for k, v in then.items() if "total" in k}
    await after.replay.shut_down()


@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_is_rewound_at_random_trains_what_an_undisturbed_one_does(tmp_path: Path, seed: int) -> None:
    options: dict[str, Any] = {} if seed % 2 else {"policy": "uniform", "max_uses": 2}
    run(lambda: rewound_and_undisturbed(tmp_path, seed, options))
