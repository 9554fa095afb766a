"""The replay's process is killed under load, for real."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from monarch.actor import concurrent_endpoint
from tensordict import TensorDict

from forge import channel
from forge.batch import make_group
from forge.errors import ChannelError
from forge.lasting import ask, lasting
from forge.launch import Hosts
from forge.mesh import Cluster, MeshConfig, plan_placement
from forge.supervision import FailurePolicy, Guard
from replay.actor import ReplayActor, ReplayClient
from replay.config import ReplayConfig
from replay.persistence import JournalPlace
from replay.staleness import Ticket

B, KILLS = 2, 10


def group(ticket: Ticket) -> TensorDict:
    """Two episodes of 3000 tokens: too large to travel inside a message."""
    rows = [[1] * 3000] * 2
    made = make_group([7], rows, [[-0.5] * 3000] * 2, [[ticket.version] * 3000] * 2, group_id=ticket.seq)
    made["rewards"] = torch.tensor([0.0, 1.0])
    return made


class KilledActor(ReplayActor):
    """Says whom to kill."""

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()


async def rollouts(client: ReplayClient, added: set[int]) -> None:
    while (ticket := await client.reserve()) is not None:
        await asyncio.sleep(0.01)
        await client.add(ticket, group(ticket))
        assert ticket.seq not in added
        added.add(ticket.seq)


async def next_batch(client: ReplayClient, version: int) -> list[int]:
    """Asked for again where it died with the replay's memory before it was opened."""
    while True:
        batch = await client.sample(version)
        assert batch is not None
        try:
            return sorted(set(channel.take(batch.handles[0])["group_id"].tolist()))
        except ChannelError:
            assert await client.rewind(version) == [version]


async def killed_under_load(cluster: Cluster, folder: Path) -> None:
    guards, lives = list[Guard](), list[str]()
    policy = FailurePolicy(on_failure="respawn", max_restarts=KILLS)
    spawn = lasting(cluster.spawn, policy, lives.append, guards)
    cfg, place = ReplayConfig(max_staleness=1), JournalPlace(str(folder / "journal"), "a run")
    mesh: Any = await spawn("replay", KilledActor, cfg, B, journal=place)
    client = ReplayClient(mesh, answer_s=120)
    await client.setup()
    added, batches = set[int](), list[list[int]]()
    async with asyncio.TaskGroup() as tasks:
        working = [tasks.create_task(rollouts(client, added)) for _ in range(4)]
        for kill in range(KILLS):
            os.kill(await ask(mesh, lambda mesh: mesh.pid.call_one()), signal.SIGKILL)
            for _ in range(3):
                batches.append(await next_batch(client, len(batches)))
                await client.release(len(batches))
            assert guards[0].restarts >= kill
        await client.close()
        await asyncio.wait(working)
    guards[0].disarm()
    await client.shut_down()
    trained = [seq for batch in batches for seq in batch]
    assert len(trained) == len(set(trained)) == 3 * KILLS * B
    assert set(trained) <= added
    assert max(added) < len(trained) + 2 * B, "a ticket was lost"
    assert guards[0].restarts == KILLS


@pytest.mark.soak
def test_ten_kills_under_load_lose_and_repeat_nothing(hosts: Hosts, tmp_path: Path) -> None:
    plan = plan_placement(MeshConfig(), device="cpu", slots=2, torchrun_slots=None, roles=("trainer", "generator"))

    async def main() -> None:
        async with Cluster(hosts, plan) as cluster, asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(cluster.watch())
            await asyncio.wait_for(killed_under_load(cluster, tmp_path), 300)
            watching.cancel()

    asyncio.run(main())
