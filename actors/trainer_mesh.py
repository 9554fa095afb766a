"""The trainer on its mesh: one actor a rank, and all of them as the controller sees them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from monarch.actor import concurrent_endpoint, endpoint

from actors.ranks import RankActor, set_up
from actors.trainer import ModelSpec, StepResult, Trainer, TrainerConfig
from actors.turns import Turns
from forge import channel
from forge.errors import ConfigError
from forge.lasting import Life
from forge.losses import LossConfig
from forge.mesh import within
from weightsync.config import WeightSyncConfig
from weightsync.offer import Endpoint, Offer, RankOffer
from weightsync.publisher import Publisher, combine
from weightsync.sync import Needed

T = TypeVar("T")
Report = Callable[[str], None]
_ANSWER_S = 60.0
"""How long an actor may take to answer what costs it nothing, seconds."""
_TRANSFERS = 8
"""Replicas that a rank sends to at the same time."""
_NOTHING_OFFERED: tuple[int, int, list[RankOffer]] = (-1, -1, [])


class TrainerActor(RankActor):
    """Monarch shell of `Trainer`, one actor a rank. `options` are the trainer's own."""

    def __init__(self, config: TrainerConfig, loss: LossConfig, spec: ModelSpec, *, world: int, **options: Any) -> None:
        super().__init__(world, "trainer")
        self._arguments, self._options = (config, loss, spec), options
        self._trainer: Trainer | None = None
        # Checksums, deltas and transfers run beside it, and never in its way.
        self._behind = ThreadPoolExecutor(_TRANSFERS, "weights")

    @property
    def _ready(self) -> Trainer:
        assert self._trainer is not None, "setup comes first"
        return self._trainer

    @endpoint
    async def setup(self, address: str) -> None:
        self._trainer = await self._run(lambda: self._build(address))

    def _build(self, address: str) -> Trainer:
        self._join(address, self._arguments[2].device)
        return Trainer(*self._arguments, rank=self._rank, world=self._world, **self._options)

    # Concurrent endpoints, all of them: a transfer starts while a step runs. One thread keeps their order.

    @concurrent_endpoint
    async def step(self, shards: Sequence[Any]) -> StepResult:
        """`shards[dp_rank]` is the handle of this rank's share of the batch."""
        return await self._here(lambda trainer: trainer.step(channel.open(shards[trainer.dp_rank])))

    async def _here(self, work: Callable[[Trainer], T]) -> T:
        """Runs `work` with the trainer on its device."""
        return await self._run(lambda: self._on_device(work))

    def _on_device(self, work: Callable[[Trainer], T]) -> T:
        with self._ready.here():
            return work(self._ready)

    @concurrent_endpoint
    async def connect(self, dtype: str, sync: WeightSyncConfig, transport: str, folder: str) -> Endpoint:
        return await self._run(lambda: self._ready.connect(dtype, sync, transport, folder))

    @concurrent_endpoint
    async def snapshot(self, version: int, buffer: int) -> tuple[float, RankOffer | None]:
        publisher = self._ready.publisher
        return await self._run(lambda: (publisher.snapshot(version, buffer), publisher.offer_at_once(version, buffer)))

    @concurrent_endpoint
    async def add_peer(self, peer: str, needed: Needed) -> None:
        await self._behind_training(lambda publisher: publisher.add_peer(peer, needed))

    @concurrent_endpoint
    async def remove_peer(self, peer: str) -> None:
        await self._behind_training(lambda publisher: publisher.remove_peer(peer))

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
        await self._here(lambda trainer: trainer.save(folder, source))

    @concurrent_endpoint
    async def stage_state(self, folder: str) -> None:
        await self._here(lambda trainer: trainer.stage_state(folder))

    @concurrent_endpoint
    async def wait_state(self, timeout_s: float) -> None:
        trainer = self._ready
        await self._run(lambda: trainer.wait_state(timeout_s), self._behind)

    @concurrent_endpoint
    async def load_state(self, folder: str) -> int:
        return await self._here(lambda trainer: trainer.load_state(folder))

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self._trainer is not None:
            self._trainer.close()


class TrainerMesh:
    """All ranks of the trainer as the controller sees them; the source of weight sync.

    Where another mesh takes the place of a dead one (`succeed`), calls of the dead one raise ActorFailed until then.
    """

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
        turns: Turns | None = None,
        report: Report | None = None,
        spawn: Callable[[], Awaitable[tuple[Any, Report | None]]] | None = None,
    ) -> None:
        """`turns` are those that it takes with the generators, where they share devices.

        Where somebody replaces it when it dies (`forge.supervision`), `report` takes the reason of a death that only
        failing calls tell of, and `spawn` gives another mesh and its `report`.
        """
        if world < 1:
            raise ConfigError(f"the trainer needs at least one process, got {world}")
        self._life, self._spawn = Life("trainer", report, ranks=world), spawn
        self._turns = turns
        self._mesh, self._config, self._publish_dtype = mesh, config, publish_dtype
        self._sync, self._transport, self._folder = sync or WeightSyncConfig(), transport, folder
        self.world = world
        self.num_shards = world // config.tensor_parallel
        self._offered = _NOTHING_OFFERED

    async def start(self) -> None:
        """What has to be there beside the mesh that it was made with."""

    @property
    def lost(self) -> bool:
        """Whether it has died, and another mesh is to take its place."""
        return self._life.lost

    def lose(self, reason: str) -> None:
        """Fails the calls that run, and all later ones, with ActorFailed."""
        self._life.lose(reason)

    async def until_lost(self) -> None:
        """Raises ActorFailed once it has died."""
        await self._life.ask(asyncio.get_running_loop().create_future())

    async def respawn(self) -> TrainerMesh:
        """The trainer on another mesh; to be set up, and to take the place of this one."""
        assert self._spawn is not None, "nobody said how to spawn another one"
        other = copy.copy(self)
        other._mesh, report = await self._spawn()
        other._offered = _NOTHING_OFFERED
        other._life = Life("trainer", report, ranks=self.world)
        return other

    def succeed(self, successor: TrainerMesh) -> None:
        """From now on this is `successor`."""
        self._mesh, self._life, self._offered = successor._mesh, successor._life, successor._offered

    async def beat(self) -> None:
        """All ranks answer."""
        await self._mesh.beat.call()

    async def setup(self) -> None:
        """Loads the model on every rank; the ranks of one mesh form one process group."""
        await self._life.ask(set_up(self._mesh, self.world, self._config.start_timeout_s, "trainer"))

    async def step(self, shards: Sequence[Any]) -> StepResult:
        """One step of all ranks; `shards` are `num_shards` channel handles, each for `tensor_parallel` readers.

        Metrics are global, memory is the ranks' sum.
        """
        assert len(shards) == self.num_shards, f"{len(shards)} shards for {self.num_shards} data-parallel ranks"
        async with self._turn("an optimizer step") as waited_s:
            call = self._ask(self._mesh.step.call(shards))
            results = [result for _, result in await within(self._config.step_timeout_s, "an optimizer step", call)]
        metrics = results[0].metrics | ({} if waited_s is None else {"extra/turn_wait_s": waited_s})
        return replace(results[0], metrics=metrics, peak_rss_bytes=sum(r.peak_rss_bytes for r in results))

    async def _ask(self, call: Awaitable[T]) -> T:
        return await self._life.ask(call)

    def _turn(self, what: str) -> contextlib.AbstractAsyncContextManager[float | None]:
        """Inside, the devices are the trainer's; yields the seconds until they were, None where nobody shares them."""
        return self._turns.training(what) if self._turns else contextlib.nullcontext()

    async def connect(self) -> Endpoint:
        """All ranks lay out what they publish; `WeightSync` calls this once."""
        call = self._mesh.connect.call(self._publish_dtype, self._sync, self._transport, self._folder)
        (_, self._endpoint), *_ = await self._ask(call)
        return self._endpoint

    async def add_peer(self, peer: str, needed: Needed) -> None:
        await self._ask(self._mesh.add_peer.call(peer, needed))

    async def remove_peer(self, peer: str) -> None:
        await self._ask(self._mesh.remove_peer.call(peer))

    async def snapshot(self, version: int, buffer: int) -> float:
        results = [result for _, result in await self._ask(self._mesh.snapshot.call(version, buffer))]
        self._offered = version, buffer, [share for _, share in results if share is not None]
        return max(seconds for seconds, _ in results)

    async def offer(self, version: int, buffer: int, base: int) -> Offer:
        """What receivers are told of a snapshot, put together from all ranks; runs behind training."""
        *snapshot, shares = self._offered
        if snapshot == [version, buffer] and shares:
            self._offered = _NOTHING_OFFERED  # a second try is computed anew
        else:
            shares = [share for _, share in await self._ask(self._mesh.offer.call(version, buffer, base))]
        offer = combine(shares, self._endpoint, version, buffer, base)
        if self._transport == "file":
            (_, where), *_ = await self._ask(self._mesh.prepare.call(offer))
            offer = replace(offer, where=where)
        return offer

    async def send(self, peer: str, offer: Offer) -> None:
        if self._transport == "collective":
            await self._ask(self._mesh.send.call(peer, offer))

    async def save(self, folder: str, source: str) -> None:
        what = f"the checkpoint {folder} to be written"
        async with self._turn(what):
            await within(self._config.step_timeout_s, what, self._ask(self._mesh.save.call(folder, source)))

    async def stage_state(self, folder: str) -> None:
        """Copies all that training goes on from; it is on its way to `folder` then, behind training."""
        what = f"the trainer's state to be copied for {folder}"
        async with self._turn(what):
            await within(self._config.step_timeout_s, what, self._ask(self._mesh.stage_state.call(folder)))

    async def wait_state(self) -> None:
        """Until the state that was staged last is on the disk. Raises RunFolderError when it cannot be written."""
        timeout_s = self._config.step_timeout_s
        call = self._ask(self._mesh.wait_state.call(timeout_s))
        await within(timeout_s + _ANSWER_S, "the trainer's state to be written", call)

    async def load_state(self, folder: str) -> int:
        """Goes on from the state in `folder`; returns its policy version. Any number of ranks may have written it."""
        what = f"the trainer to load {folder}"
        async with self._turn(what):
            call = self._ask(self._mesh.load_state.call(folder))
            (_, version), *_ = await within(self._config.start_timeout_s, what, call)
        return version
