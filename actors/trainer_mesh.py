"""The trainer on its mesh: one actor a rank, and all of them as the controller sees them."""

from __future__ import annotations

import asyncio
import contextvars
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from monarch.actor import Actor, concurrent_endpoint, context, endpoint

from actors.trainer import ModelSpec, StepResult, Trainer, TrainerConfig, process_group_backend
from forge import channel
from forge.errors import ConfigError
from forge.launch import NODE_IP_ENV
from forge.losses import LossConfig
from forge.mesh import within
from weightsync.config import WeightSyncConfig
from weightsync.offer import Endpoint, Offer, RankOffer
from weightsync.publisher import Publisher, combine
from weightsync.sync import Needed

T = TypeVar("T")
_ANSWER_S = 60.0
"""How long an actor may take to answer what costs it nothing, seconds."""
_TRANSFERS = 8
"""Replicas that a rank sends to at the same time."""
_NOTHING_OFFERED: tuple[int, int, list[RankOffer]] = (-1, -1, [])


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
        # Checksums, deltas and transfers run beside it, and never in its way.
        self._behind = ThreadPoolExecutor(_TRANSFERS, "weights")

    async def _run(self, work: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> T:
        # Monarch's calls find their actor in the context.
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(thread or self._thread, lambda: context.run(work))

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

    # Concurrent endpoints, all of them: a transfer starts while a step runs. One thread keeps their order.

    @concurrent_endpoint
    async def step(self, shards: Sequence[Any]) -> StepResult:
        """`shards[rank]` is the handle of this rank's share of the batch."""
        trainer = self._ready
        return await self._run(lambda: trainer.step(channel.open(shards[trainer.rank])))

    @concurrent_endpoint
    async def connect(self, dtype: str, sync: WeightSyncConfig, transport: str, folder: str) -> Endpoint:
        return await self._run(lambda: self._ready.connect(dtype, sync, transport, folder))

    @concurrent_endpoint
    async def snapshot(self, version: int, buffer: int) -> tuple[float, RankOffer | None]:
        publisher = self._ready.publisher
        return await self._run(lambda: (publisher.snapshot(version, buffer), publisher.offer_at_once(version, buffer)))

    @concurrent_endpoint
    async def add_peer(self, peer: str, needed: Needed) -> None:
        self._ready.publisher.add_peer(peer, needed)

    @concurrent_endpoint
    async def offer(self, version: int, buffer: int, base: int) -> RankOffer:
        return await self._behind_training(lambda publisher: publisher.offer(version, buffer, base))

    @concurrent_endpoint
    async def prepare(self, offer: Offer) -> dict[str, Any]:
        return await self._behind_training(lambda publisher: publisher.prepare(offer))

    @concurrent_endpoint
    async def send(self, peer: str, offer: Offer) -> None:
        await self._behind_training(lambda publisher: publisher.send(peer, offer))

    async def _behind_training(self, work: Callable[[Publisher], T]) -> T:
        publisher = self._ready.publisher
        return await self._run(lambda: work(publisher), self._behind)

    @concurrent_endpoint
    async def save(self, folder: str, source: str) -> None:
        await self._run(lambda: self._ready.save(folder, source))

    @concurrent_endpoint
    async def stage_state(self, folder: str) -> None:
        await self._run(lambda: self._ready.state.stage(Path(folder), self._ready.policy_version))

    @concurrent_endpoint
    async def wait_state(self, timeout_s: float) -> None:
        state = self._ready.state
        await self._run(lambda: state.wait(timeout_s), self._behind)

    @concurrent_endpoint
    async def load_state(self, folder: str) -> int:
        return await self._run(lambda: self._ready.load_state(folder))

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self._trainer is not None:
            self._trainer.close()


class TrainerMesh:
    """All ranks of the trainer as the controller sees them; the source of weight sync."""

    def __init__(
        self,
        mesh: Any,
        config: TrainerConfig,
        world: int,
        publish_dtype: str,
        sync: WeightSyncConfig | None = None,
        *,
        transport: str = "memory",
        folder: str = "",
    ) -> None:
        if world < 1:
            raise ConfigError(f"the trainer needs at least one process, got {world}")
        self._mesh, self._config, self._publish_dtype = mesh, config, publish_dtype
        self._sync, self._transport, self._folder = sync or WeightSyncConfig(), transport, folder
        self.world = world
        self._offered = _NOTHING_OFFERED

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

    async def connect(self) -> Endpoint:
        """All ranks lay out what they publish; `WeightSync` calls this once."""
        call = self._mesh.connect.call(self._publish_dtype, self._sync, self._transport, self._folder)
        (_, self._endpoint), *_ = await call
        return self._endpoint

    async def add_peer(self, peer: str, needed: Needed) -> None:
        await self._mesh.add_peer.call(peer, needed)

    async def snapshot(self, version: int, buffer: int) -> float:
        results = [result for _, result in await self._mesh.snapshot.call(version, buffer)]
        self._offered = version, buffer, [share for _, share in results if share is not None]
        return max(seconds for seconds, _ in results)

    async def offer(self, version: int, buffer: int, base: int) -> Offer:
        """What receivers are told of a snapshot, put together from all ranks; runs behind training."""
        *snapshot, shares = self._offered
        if snapshot == [version, buffer] and shares:
            self._offered = _NOTHING_OFFERED  # a second try is computed anew
        else:
            shares = [share for _, share in await self._mesh.offer.call(version, buffer, base)]
        offer = combine(shares, self._endpoint, version, buffer, base)
        if self._transport == "file":
            (_, where), *_ = await self._mesh.prepare.call(offer)
            offer = replace(offer, where=where)
        return offer

    async def send(self, peer: str, offer: Offer) -> None:
        if self._transport == "collective":
            await self._mesh.send.call(peer, offer)

    async def save(self, folder: str, source: str) -> None:
        call = self._mesh.save.call(folder, source)
        await within(self._config.step_timeout_s, f"the checkpoint {folder} to be written", call)

    async def stage_state(self, folder: str) -> None:
        """Copies all that training goes on from; it is on its way to `folder` then, behind training."""
        call = self._mesh.stage_state.call(folder)
        await within(self._config.step_timeout_s, f"the trainer's state to be copied for {folder}", call)

    async def wait_state(self) -> None:
        """Until the state that was staged last is on the disk. Raises RunFolderError when it cannot be written."""
        timeout_s = self._config.step_timeout_s
        await within(timeout_s + _ANSWER_S, "the trainer's state to be written", self._mesh.wait_state.call(timeout_s))

    async def load_state(self, folder: str) -> int:
        """Goes on from the state in `folder`; returns its policy version. Any number of ranks may have written it."""
        call = self._mesh.load_state.call(folder)
        (_, version), *_ = await within(self._config.start_timeout_s, f"the trainer to load {folder}", call)
        return version
