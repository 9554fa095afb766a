"""The replay dies in a running run, again and again: what was answered is not forgotten, what was not is done once."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from forge import channel
from forge.batch import make_group
from forge.data import PromptStream
from forge.errors import ActorFailed, RunFolderError
from forge.lasting import MOST_LIVES, lasting
from forge.supervision import FailurePolicy, Guard, Supervisor
from replay.actor import ReplayClient
from replay.config import ReplayConfig
from replay.events import Tokens
from replay.persistence import JournalPlace
from replay.recovery import newest_base, recover, versions
from replay.service import Replay
from replay.staleness import Known, Ticket

B, S = 2, 2
POLICY = FailurePolicy(on_failure="respawn", max_restarts=1000, heartbeat_s=0)


def prompts() -> PromptStream:
    return PromptStream([{"prompt": f"p{i}"} for i in range(5)], lambda row: (row["prompt"], [1]), seed=1)


def make(folder: Path, known: Known | None = None, resume_from: int | None = None, **options: Any) -> Replay:
    deadlines = {"reserve_timeout_s": 60.0, "sample_timeout_s": 60.0, "journal_interval_s": 0.1}
    return Replay(
        ReplayConfig(**{"max_staleness": S, **deadlines, **options}),
        groups_per_step=B,
        start_version=resume_from or 0,
        prompts=prompts(),
        journal=JournalPlace(str(folder / "journal"), "a run", resume_from),
        known=known,
    )


def group(ticket: Ticket) -> TensorDict:
    version = ticket.version
    made = make_group([1], [[7, 8], [9]], [[-1.0, -2.0], [-3.0]], [[version] * 2, [version]], group_id=ticket.seq)
    made["rewards"] = torch.tensor([float(ticket.seq), -1.0])
    return made


def seqs_of(handle: Any) -> list[int]:
    return sorted(set(channel.open(handle)["group_id"].tolist()))


def stop_dead(replay: Replay) -> None:
    """As a SIGKILL leaves it: what was written is in the files, the rest is gone, the lock is free."""
    journal = replay._persistence._journal
    if journal is None:
        return
    journal._writer.failure = RunFolderError("killed")
    journal._closed = True
    journal._hurry.set()
    journal._wake.set()
    journal._thread.join()
    os.close(journal._lock)


class Mesh:
    """One life: a replay of this process that can be killed."""

    def __init__(self, world: World) -> None:
        self._world, self.dead = world, False
        self.replay: Replay | None = None
        self.calls: set[asyncio.Task[Any]] = set()

    def __getattr__(self, name: str) -> Any:
        return Endpoint(self, name)

    async def answer(self, name: str, args: tuple[Any, ...]) -> Any:
        if name == "setup":
            self.replay = make(self._world.folder, *args, **self._world.options)
            return await self.replay.setup()
        return await getattr(self.replay, name.removesuffix("_replay"))(*args)

    def kill(self) -> None:
        self.dead = True
        if self.replay is not None:
            stop_dead(self.replay)
        for call in self.calls:
            call.cancel()


@dataclass
class Endpoint:
    mesh: Mesh
    name: str

    async def call_one(self, *args: Any) -> Any:
        await asyncio.sleep(0)  # the way there
        if not self.mesh.dead:
            call = asyncio.create_task(self.mesh.answer(self.name, args))
            call.add_done_callback(lambda done: done.cancelled() or done.exception())  # the dead are heard by nobody
            self.mesh.calls.add(call)
            await asyncio.wait([call])
            self.mesh.calls.discard(call)
            await asyncio.sleep(0)  # the way back
            if not self.mesh.dead:
                return call.result()
        return await asyncio.Event().wait()  # nobody answers


@dataclass
class World:
    """A run without processes: rollout loops, a train loop, and who kills the replay."""

    folder: Path
    rng: random.Random
    options: dict[str, Any] = field(default_factory=dict)
    meshes: list[Mesh] = field(default_factory=list)
    working: set[int] = field(default_factory=set)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    added: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    batches: list[list[int]] = field(default_factory=list)
    unmarked: int = 0
    closing: bool = False
    oldest: int = 0
    """The version that the journal reaches back to."""

    async def start(self) -> ReplayClient:
        def give_up(name: str, reason: str) -> None:
            pytest.fail(f"{name}: {reason}")

        self.supervisor = Supervisor(lambda mesh: None, give_up)
        guards: list[Guard] = []

        async def spawn(name: str, *, guard: Guard) -> Mesh:
            guard.bind(name, name, lambda mesh, reason: None)
            self.supervisor.watch(guard)
            self.meshes.append(Mesh(self))
            return self.meshes[-1]

        self.client = ReplayClient(await lasting(spawn, POLICY, lambda text: None, guards)("replay"), answer_s=60.0)
        self.guard = guards[0]
        await self.client.setup()
        return self.client

    def kill(self) -> None:
        mesh = self.meshes[-1]
        if not mesh.dead:
            mesh.kill()
            assert self.supervisor.takes(self.guard.mesh, "killed")

    async def rollouts(self) -> None:
        while (ticket := await self.client.reserve()) is not None:
            seq = ticket.seq
            assert seq not in self.working | self.added | self.failed, f"group {seq} was given out twice"
            self.working.add(seq)
            self.tickets[seq] = ticket
            for offset in range(self.rng.randrange(3)):
                await asyncio.sleep(self.rng.uniform(0, 0.002))
                one = torch.tensor([offset]).int()
                await self.client.progress([Tokens(seq, 0, offset, one, -one.float(), one * 0)])
            if self.rng.random() < 0.1:
                await self.client.fail(ticket)
                self.failed.add(seq)
            else:
                await self.client.add(ticket, group(ticket))
                if not self.closing:  # from then on groups are thrown away
                    self.added.add(seq)
            self.working.discard(seq)

    async def train(self, steps: int) -> None:
        version = 0
        while version < steps:
            batch = await self.client.sample(version)
            assert batch is not None
            assert batch.stats["staleness/max"] <= S
            seqs = seqs_of(batch.handles[0])
            if version == len(self.batches):
                self.batches.append(seqs)
            assert seqs == self.batches[version]
            version += 1
            await self.client.release(len(self.batches))
            if self.rng.random() < 0.2:
                await self.checkpoint(version)
            if self.rng.random() < 0.2:
                back = self.rng.randint(max(0, len(self.batches) - 2), len(self.batches))
                if back >= self.oldest:
                    assert await self.client.rewind(back) == list(range(back, len(self.batches)))
                    version = back

    async def checkpoint(self, version: int) -> None:
        await self.client.mark(version)
        try:
            number = await self.client.marked()
        except ActorFailed:
            self.unmarked += 1
            return
        if self.rng.random() < 0.3:
            await self.client.prune(number)
            self.oldest = version

    async def killer(self, kills: int) -> None:
        killed = 0
        while killed < kills:
            await asyncio.sleep(self.rng.expovariate(1 / 0.03))
            restarting = self.guard.attempt is not None
            if killed <= len(self.batches) and not (restarting and self.rng.random() < 0.7):
                self.kill()
                killed += 1

    async def run(self, steps: int, kills: int) -> None:
        client = await self.start()
        async with asyncio.TaskGroup() as tasks:
            rollouts = [tasks.create_task(self.rollouts()) for _ in range(5)]
            killer = tasks.create_task(self.killer(kills))
            await self.train(steps)
            await killer
            self.closing = True
            await client.close()
            await asyncio.wait(rollouts)
        self.guard.disarm()
        await client.shut_down()
        await self.supervisor.close()

    def check(self) -> None:
        """Invariant d, over all lives."""
        trained = Counter(seq for batch in self.batches for seq in batch)
        stream = prompts()
        drawn = [stream.draw() for _ in range(max(self.tickets) + 1)]
        for seq, ticket in self.tickets.items():
            assert (ticket.prompt.epoch, ticket.prompt.id) == (drawn[seq].epoch, drawn[seq].id)
        if self.options.get("max_uses", 1) == 1:
            assert max(trained.values()) == 1, "a group was trained twice"
        assert set(trained) <= self.added
        for version in versions(self.folder / "journal"):  # a resume from any checkpoint is exact
            state = recover(self.folder / "journal", version).state
            told = [(batch.version, sorted(batch.seqs)) for batch in state.again]
            assert told == list(enumerate(self.batches))[version:]
            waiting = {entry.seq for entry in state.entries.values() if entry.group is not None}
            assert self.added <= set(trained) | waiting, "a group that was acknowledged is lost"


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 120))


@pytest.mark.parametrize("seed", range(4))
def test_no_kill_loses_or_repeats_anything(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, random.Random(seed), {"policy": "uniform", "max_uses": 2} if seed == 3 else {})
    run(lambda: world.run(steps=25, kills=8))
    assert len(world.meshes) > 4
    world.check()


async def pair(client: ReplayClient) -> list[Ticket]:
    tickets = [await client.reserve() for _ in range(B)]
    assert all(tickets)
    return [ticket for ticket in tickets if ticket is not None]


def test_the_next_life_knows_who_works_on_what(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path, random.Random(0))
        client = await world.start()
        first, second = await pair(client)
        world.kill()  # within the journal's 20 ms: it knows of neither
        await client.add(first, group(first))
        third = await client.reserve()
        assert third is not None
        assert third.seq == 2
        await client.add(second, group(second))
        batch = await client.sample(0)
        assert batch is not None
        assert seqs_of(batch.handles[0]) == [0, 1]
        world.kill()
        await client.add(third, group(third))
        assert (await client.stats())["replay/next_version"] == 1
        assert (await client.stats())["replay/queued_groups"] == 1
        await client.close()
        world.kill()
        assert await client.reserve() is None
        await world.supervisor.close()
        world.meshes[-1].kill()

    run(scenario)


def test_one_that_dies_before_it_has_begun_begins_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path, random.Random(0))
        starting = asyncio.create_task(world.start())
        while not world.meshes:  # noqa: ASYNC110
            await asyncio.sleep(0)
        world.kill()
        client = await starting
        assert world.meshes[0].replay is None
        tickets = await pair(client)
        assert [ticket.seq for ticket in tickets] == [0, 1]
        for ticket in tickets:
            await client.add(ticket, group(ticket))
        assert await client.sample(0) is not None
        await client.shut_down()
        await world.supervisor.close()

    run(scenario)


def test_who_waits_outlives_any_number_of_deaths(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path, random.Random(0))
        client = await world.start()
        tickets = await pair(client)
        waiting = asyncio.create_task(client.sample(0))
        for life in range(1, MOST_LIVES + 2):
            while len(world.meshes) < life or not world.meshes[-1].calls:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            world.kill()
        for ticket in tickets:
            await client.add(ticket, group(ticket))
        assert await waiting is not None
        await client.shut_down()
        await world.supervisor.close()

    run(scenario)


def test_what_was_marked_is_lost_with_its_life_and_the_next_mark_works(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path, random.Random(0))
        client = await world.start()
        for ticket in await pair(client):
            await client.add(ticket, group(ticket))
        assert await client.sample(0) is not None
        await client.mark(1)
        world.kill()
        with pytest.raises(ActorFailed, match="died before its state for the checkpoint was on the disk"):
            await client.marked()
        await client.mark(1)
        number = await client.marked()
        await client.prune(number)
        await client.close()
        await client.shut_down()
        assert newest_base(tmp_path / "journal") == 1
        await world.supervisor.close()

    run(scenario)


def test_a_batch_that_was_never_opened_comes_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path, random.Random(0))
        client = await world.start()
        for ticket in await pair(client):
            await client.add(ticket, group(ticket))
        lost = await client.sample(0)
        assert lost is not None
        world.kill()
        assert await client.rewind(0) == [0]
        world.kill()
        again = await client.sample(0)
        assert again is not None
        assert again.stats == lost.stats
        assert seqs_of(again.handles[0]) == seqs_of(lost.handles[0])
        await client.shut_down()
        await world.supervisor.close()

    run(scenario)
