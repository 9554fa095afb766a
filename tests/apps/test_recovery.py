"""The trainer dies and comes back, as the train loop sees it, among stand-ins that only note where they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from apps.grpo.recovery import Recovery
from forge.checkpoints import Checkpoints
from forge.errors import ActorFailed
from forge.lasting import Life
from forge.supervision import FailurePolicy, Guard, Supervisor


class FakeTrainer:
    num_shards = world = 1

    def __init__(self) -> None:
        self.life = Life("trainer", print)

    @property
    def lost(self) -> bool:
        return self.life.lost

    def lose(self, reason: str) -> None:
        self.life.lose(reason)

    async def until_lost(self) -> None:
        await self.life.ask(asyncio.get_running_loop().create_future())

    async def respawn(self) -> FakeTrainer:
        return FakeTrainer()

    async def setup(self) -> None: ...

    def succeed(self, successor: FakeTrainer) -> None:
        self.life = successor.life


class FakeReplay:
    """One whose next life answers what the one before was asked, behind the rewind: `next` is where it stands."""

    def __init__(self) -> None:
        self.next, self._lives_again = 0, asyncio.Event()

    async def sample(self, version: int, shards: int) -> None:
        await self._lives_again.wait()
        self.next = version + 1

    async def rewind(self, version: int) -> list[int]:
        self.next = version
        self._lives_again.set()
        return list(range(version, 3))


class FakeSync:
    published_version = 3

    def lose_source(self) -> None: ...

    async def reconnect(self) -> None: ...


class FakeSaver:
    async def settle(self) -> None: ...


def test_a_replay_that_died_too_stands_where_the_trainer_goes_on_whatever_it_answers_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        replay = FakeReplay()
        supervisor = Supervisor(lambda mesh: None, lambda name, why: pytest.fail(f"{name}: {why}"))
        guard, told = Guard(FailurePolicy(on_failure="respawn", heartbeat_s=0), print), list[str]()
        guard.bind("trainer", "trainer_0", lambda mesh, reason: None)
        supervisor.watch(guard)
        fakes: tuple[Any, Any, Any, Any] = FakeTrainer(), replay, FakeSync(), FakeSaver()
        recovery = Recovery(*fakes, Checkpoints(tmp_path / "checkpoints", 1), 0, told.append)
        recovery.arm(guard)
        sampling = asyncio.create_task(recovery.sample(3))
        await asyncio.sleep(0.01)
        assert supervisor.takes("trainer_0", "killed")
        with pytest.raises(ActorFailed, match="trainer failed: killed") as caught:
            await sampling
        assert await recovery.restored(caught.value) == 0
        assert replay.next == 0
        assert told == ["the trainer goes on from version 0; 3 steps are trained again"]
        await supervisor.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))
