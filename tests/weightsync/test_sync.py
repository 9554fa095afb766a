"""Laws of publish and apply, on fakes that record who was called when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from forge.errors import WeightSyncError
from weightsync.plan import make_layout
from weightsync.publisher import Endpoint
from weightsync.sync import Applied, ApplyResult, WeightSync


class FakeTrainer:
    def __init__(self) -> None:
        self.buffers = [-1, -1]
        self.version = 0

    async def endpoint(self) -> Endpoint:
        return Endpoint(make_layout([("w", (2,), torch.float32)]), ())

    async def snapshot(self, buffer: int) -> float:
        await asyncio.sleep(0)
        self.version += 1
        self.buffers[buffer] = self.version
        return 0.0


class FakeReplica:
    """Reads its buffer twice, before and after it is allowed to go on; both must hold the version it was told."""

    def __init__(self, trainer: FakeTrainer, name: str = "generator_0") -> None:
        self.name, self.trainer = name, trainer
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.applied: list[int] = []
        self._applied = asyncio.Event()

    async def connect(self, endpoint: Endpoint) -> None: ...

    async def apply(self, version: int, buffer: int) -> ApplyResult:
        before = self.trainer.buffers[buffer]
        await self.may_go_on.wait()
        assert before == self.trainer.buffers[buffer] == version, "a buffer was overwritten while it was read"
        self.applied.append(version)
        self._applied.set()
        return ApplyResult(0.0, 0.0)

    async def until(self, version: int) -> None:
        while version not in self.applied:
            self._applied.clear()
            await self._applied.wait()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_a_stopped_replica_never_holds_up_a_publish_and_the_newest_version_wins() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        replica = FakeReplica(trainer)
        sync = WeightSync(trainer, [replica])
        seen: list[Applied] = []

        async def on_applied(applied: Applied) -> None:
            seen.append(applied)

        loop = asyncio.create_task(sync.run(on_applied))
        replica.may_go_on.clear()
        for version in range(1, 11):
            await sync.publish(version)
            await asyncio.sleep(0)
        replica.may_go_on.set()
        await replica.until(10)
        sync.close()
        await loop
        assert replica.applied == [1, 10]
        assert [a.version for a in seen] == [1, 10]
        assert sync.skipped == 8
        assert sync.applied_version == 10

    run(scenario)


def test_a_version_is_reported_only_when_every_replica_holds_it() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        fast, slow = FakeReplica(trainer, "generator_0"), FakeReplica(trainer, "generator_1")
        slow.may_go_on.clear()
        sync = WeightSync(trainer, [fast, slow])
        seen: list[int] = []

        async def on_applied(applied: Applied) -> None:
            seen.append(applied.version)

        loop = asyncio.create_task(sync.run(on_applied))
        await sync.publish(1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert fast.applied == [1]
        assert seen == []
        slow.may_go_on.set()
        sync.close()
        await loop
        assert seen == [1]

    run(scenario)


def test_a_replica_that_hangs_fails_at_the_deadline_by_name() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        replica = FakeReplica(trainer, "generator_3")
        replica.may_go_on.clear()
        sync = WeightSync(trainer, [replica], deadline_s=0.05)
        await sync.connect()

        async def on_applied(applied: Applied) -> None:
            raise AssertionError("a failed update was reported as done")

        loop = asyncio.create_task(sync.run(on_applied))
        await sync.publish(1)
        with pytest.raises(WeightSyncError, match=r"0\.05 s for generator_3 to apply version 1 \(64 bytes\)"):
            await loop
        assert sync.applied_version == 0

    run(scenario)


def test_versions_only_grow() -> None:
    async def scenario() -> None:
        sync = WeightSync(FakeTrainer(), [])
        await sync.publish(1)
        with pytest.raises(WeightSyncError, match="version 1 was published after 1"):
            await sync.publish(1)

    run(scenario)
