"""The trainer on its mesh: one actor a rank, and all of them as the controller sees them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from monarch.actor import Actor, context, endpoint

from actors.trainer import ModelSpec, StepResult, Trainer, TrainerConfig, process_group_backend
from forge import channel
from forge.errors import ConfigError
from forge.launch import NODE_IP_ENV
from forge.losses import LossConfig
from forge.mesh import within
from weightsync.publisher import Endpoint

T = TypeVar("T")


class TrainerActor(Actor):
    """Monarch shell of `Trainer`, one actor a rank. Work runs in a thread: the actor stays reachable."""

    def __init__(self, config: TrainerConfig, loss: LossConfig, spec: ModelSpec, *, world: int, seed: int) -> None:
        self._arguments = (config, loss, spec)
        self._world, self._seed = world, seed
        # Not `current_rank()`, which is relative to the slice that a message went to.
        self._rank = context().actor_instance.rank.rank
        self._trainer: Trainer | None = None
        # One thread for good: memory that a step frees is found again by the next one.
        self._thread = ThreadPoolExecutor(1, "trainer")

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @property
    def _ready(self) -> Trainer:
        assert self._trainer is not None, "setup comes first"
        return self._trainer

    @endpoint
    async def rendezvous(self) -> str:
        """Where the ranks meet: an address of this rank's node, with a free port."""
        ip = os.environ.get(NODE_IP_ENV, "127.0.0.1")
        with socket.socket() as probe:
            probe.bind((ip, 0))
            return f"tcp://{ip}:{probe.getsockname()[1]}"

    @endpoint
    async def setup(self, address: str) -> None:
        self._trainer = await self._run(lambda: self._build(address))

    def _build(self, address: str) -> Trainer:
        spec = self._arguments[2]
        if self._world > 1:
            dist.init_process_group(
                process_group_backend(spec.device), init_method=address, rank=self._rank, world_size=self._world
            )
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return Trainer(*self._arguments, rank=self._rank, world=self._world, seed=self._seed)

    @endpoint
    async def step(self, shards: Sequence[Any]) -> StepResult:
        """`shards[rank]` is the handle of this rank's share of the batch."""
        trainer = self._ready
        return await self._run(lambda: trainer.step(channel.open(shards[trainer.rank])))

    @endpoint
    async def connect(self, dtype: str) -> Endpoint:
        return await self._run(lambda: self._ready.connect(dtype))

    @endpoint
    async def snapshot(self, buffer: int) -> float:
        return await self._run(lambda: self._ready.snapshot(buffer))

    @endpoint
    async def save(self, folder: str, source: str) -> None:
        await self._run(lambda: self._ready.save(folder, source))

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self._trainer is not None:
            self._trainer.close()


class TrainerMesh:
    """All ranks of the trainer as the controller sees them; the source of weight sync."""

    def __init__(self, mesh: Any, config: TrainerConfig, world: int, publish_dtype: str) -> None:
        if world < 1:
            raise ConfigError(f"the trainer needs at least one process, got {world}")
        self._mesh, self._config, self._publish_dtype = mesh, config, publish_dtype
        self.world = world

    async def setup(self) -> None:
        """Loads the model on every rank; the ranks of one mesh form one process group."""
        address = ""
        if self.world > 1:
            meeting = within(
                self._config.start_timeout_s, "the trainer's ranks to answer", self._mesh.rendezvous.call()
            )
            (_, address), *_ = await meeting
        call = self._mesh.setup.call(address)
        await within(self._config.start_timeout_s, "the trainer to load the model", call)

    async def step(self, shards: Sequence[Any]) -> StepResult:
        """One step of all ranks; `shards[rank]` is a channel handle. Metrics are global, memory is the ranks' sum."""
        call = self._mesh.step.call(shards)
        results = [result for _, result in await within(self._config.step_timeout_s, "an optimizer step", call)]
        return replace(results[0], peak_rss_bytes=sum(r.peak_rss_bytes for r in results))

    async def endpoint(self) -> Endpoint:
        results = [result for _, result in await self._mesh.connect.call(self._publish_dtype)]
        return results[0]

    async def snapshot(self, buffer: int) -> float:
        return max(seconds for _, seconds in await self._mesh.snapshot.call(buffer))

    async def save(self, folder: str, source: str) -> None:
        call = self._mesh.save.call(folder, source)
        await within(self._config.step_timeout_s, f"the checkpoint {folder} to be written", call)
