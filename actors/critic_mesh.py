"""The critic on a mesh of its own, and a trainer that has one and looks like any other.

    shards ──► critic: values ──► shards with values ──► trainer: step ┐
                   └────────────────────────────► critic: step         ┴ side by side, then the result of both

The critic has as many ranks as the trainer: rank r of either works on shard r of a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from monarch.actor import concurrent_endpoint, endpoint
from tensordict import TensorDict

from actors.critic import Critic, CriticConfig, beside
from actors.ranks import RankActor, set_up
from actors.sharding import make_mesh
from actors.trainer import ModelSpec, StepResult, TrainerConfig, solo_process_group
from actors.trainer_mesh import TrainerMesh
from actors.updates import RankGroup
from forge import channel
from forge.batch import is_packed
from forge.losses import LossConfig
from forge.memory import peak_rss_bytes
from forge.mesh import within
from forge.packing import flatten


class CriticActor(RankActor):
    """Monarch shell of `Critic`, one actor a rank."""

    def __init__(
        self,
        config: CriticConfig,
        trainer: TrainerConfig,
        loss: LossConfig,
        spec: ModelSpec,
        *,
        world: int,
        seed: int,
    ) -> None:
        super().__init__(world, "critic")
        self._arguments = (config, trainer, loss, spec)
        self._sharing = trainer.tensor_parallel  # ranks that have the same shard
        self._seed = seed
        self._batch: TensorDict | None = None
        self._critic: Critic | None = None

    @property
    def _ready(self) -> Critic:
        assert self._critic is not None, "setup comes first"
        return self._critic

    @endpoint
    async def setup(self, address: str) -> None:
        self._critic = await self._run(lambda: self._build(address))

    def _build(self, address: str) -> Critic:
        *_, spec = self._arguments
        self._join(address, spec.device)
        mesh, ranks = None, RankGroup()
        if self._world > 1 or spec.dtype != "float32":
            if not dist.is_initialized():
                solo_process_group(spec.device)
            mesh = make_mesh(spec.device, self._world, self._sharing)
            ranks = RankGroup(self._world // self._sharing, mesh.get_group("dp"))
        return Critic(*self._arguments, ranks=ranks, mesh=mesh, rank=self._rank, seed=self._seed)

    @concurrent_endpoint
    async def values(self, shards: Sequence[Any]) -> Any:
        """The handle of this rank's shard with `values`, on which `step` trains; None where another rank gives it."""
        return await self._run(lambda: self._with_values(shards[self._rank // self._sharing]))

    def _with_values(self, shard: Any) -> Any:
        batch = channel.open(shard)
        flat = batch if is_packed(batch) else flatten(batch)
        self._batch = flat.copy()
        self._batch["values"] = self._ready.values(flat)
        return None if self._rank % self._sharing else channel.put(self._batch, self._sharing)

    @concurrent_endpoint
    async def step(self) -> tuple[dict[str, float | None], int]:
        """One step on the batch of the last `values`; what metrics.jsonl says of it, and this process's peak memory."""
        return await self._run(self._step)

    def _step(self) -> tuple[dict[str, float | None], int]:
        batch, self._batch = self._batch, None
        assert batch is not None, "values come before a step"
        return self._ready.step(batch), peak_rss_bytes()

    @concurrent_endpoint
    async def stage_state(self, folder: str) -> None:
        await self._run(lambda: self._ready.state.stage(Path(folder), self._ready.version))

    @concurrent_endpoint
    async def wait_state(self, timeout_s: float) -> None:
        state = self._ready.state
        await asyncio.to_thread(state.wait, timeout_s)

    @concurrent_endpoint
    async def load_state(self, folder: str) -> int:
        return await self._run(lambda: self._ready.load_state(folder))

    @concurrent_endpoint
    async def save(self, folder: str) -> None:
        await self._run(lambda: self._ready.save(folder))
        if self._world > 1:
            await self._run(dist.barrier)


class TrainerWithCritic(TrainerMesh):
    """The ranks of the trainer and those of its critic, as one trainer."""

    def __init__(self, spawn_critic: Callable[[], Awaitable[Any]], *args: Any, **kwargs: Any) -> None:
        """`spawn_critic` gives the mesh of CriticActors, which lives and dies with the trainer; all else is
        TrainerMesh's."""
        super().__init__(*args, **kwargs)
        self._spawn_critic = spawn_critic
        self._critic: Any = None

    async def start(self) -> None:
        self._critic = await self._spawn_critic()

    async def respawn(self) -> TrainerMesh:
        other = await super().respawn()
        assert isinstance(other, TrainerWithCritic)
        await other.start()
        return other

    def succeed(self, successor: TrainerMesh) -> None:
        super().succeed(successor)
        assert isinstance(successor, TrainerWithCritic)
        self._critic = successor._critic

    async def beat(self) -> None:
        """All ranks of both answer."""
        await asyncio.gather(super().beat(), self._critic.beat.call())

    async def setup(self) -> None:
        """Loads both models."""
        call = self._ask(set_up(self._critic, self.world, self._config.start_timeout_s, "critic"))
        await asyncio.gather(super().setup(), call)

    async def step(self, shards: Sequence[Any]) -> StepResult:
        """Values first, then one step of both. Memory is the sum over the ranks of both."""
        limit = self._config.step_timeout_s
        answers = await within(limit, "the critic's values", self._ask(self._critic.values.call(shards)))
        handles = [handle for _, handle in sorted(answers, key=lambda answer: answer[0].rank)]
        valued = [handle for handle in handles if handle is not None]
        call = within(limit, "the critic's step", self._ask(self._critic.step.call()))
        result, learned = await asyncio.gather(super().step(valued), call)
        steps = [step for _, step in learned]
        memory = result.peak_rss_bytes + sum(peak for _, peak in steps)
        return replace(result, metrics=result.metrics | steps[0][0], peak_rss_bytes=memory)

    async def save(self, folder: str, source: str) -> None:
        """Both as Hugging Face checkpoints, the critic beside the policy."""
        place = str(beside(folder))
        call = within(
            self._config.step_timeout_s,
            f"the checkpoint {place} to be written",
            self._ask(self._critic.save.call(place)),
        )
        await asyncio.gather(super().save(folder, source), call)

    async def stage_state(self, folder: str) -> None:
        place = str(beside(folder))
        limit, what = self._config.step_timeout_s, f"the critic's state to be copied for {place}"
        call = within(limit, what, self._ask(self._critic.stage_state.call(place)))
        await asyncio.gather(super().stage_state(folder), call)

    async def wait_state(self) -> None:
        limit = self._config.step_timeout_s
        call = within(limit, "the critic's state to be written", self._ask(self._critic.wait_state.call(limit)))
        await asyncio.gather(super().wait_state(), call)

    async def load_state(self, folder: str) -> int:
        place = str(beside(folder))
        load = self._ask(self._critic.load_state.call(place))
        call = within(self._config.start_timeout_s, f"the critic to load {place}", load)
        version, _ = await asyncio.gather(super().load_state(folder), call)
        return version
