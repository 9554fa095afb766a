"""A trainer and generators on real Monarch actors, as a run has them, that tests can look into.

Importable in actor processes as a user's module would be.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from typing import Any

import torch
from monarch.actor import concurrent_endpoint
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from actors.generator import GeneratorActor, GeneratorConfig
from actors.generators import Replica
from actors.trainer import ModelSpec, Trainer, TrainerConfig
from actors.trainer_mesh import TrainerActor, TrainerMesh
from actors.vllm_engine import Completion, Sampling
from apps.grpo.spawn import QUIET
from forge.launch import Hosts
from forge.losses import LossConfig
from forge.mesh import Cluster, MeshConfig, RoleConfig, plan_placement
from weightsync.config import KvMode, WeightSyncConfig
from weightsync.offer import Offer
from weightsync.sync import Applied, WeightSync

MAX_LEN = 256
TEMPERATURE = 2.0
"""Of the sampler: noisy weights are rather sure of what comes next, and laws show in tokens that are not."""


class FleetTrainer(TrainerActor):
    """A rank of a trainer whose weights tests change as they like, the same way on every rank."""

    def _build(self, address: str) -> Trainer:
        trainer = super()._build(address)
        self._disk = {name: _full(p).clone() for name, p in trainer.policy.hf.named_parameters()}
        return trainer

    @concurrent_endpoint
    async def perturb(self, seed: int) -> None:
        """The weights on disk plus noise; seed 0 restores them."""
        await self._run(lambda: self._perturb(seed))

    @concurrent_endpoint
    async def touch(self, seed: int) -> None:
        """Changes one parameter of a few dozen numbers, and with it what the model says."""
        await self._run(lambda: self._touch(seed))

    @concurrent_endpoint
    async def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """What the policy says about the tokens of `completion`, under its weights of now."""
        return await self._run(lambda: self._logprobs(list(prompt), list(completion)))

    def _perturb(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self._ready.policy.hf.named_parameters():
            disk = self._disk[name]
            noise = torch.randn(disk.shape, generator=generator)
            _assign(parameter, disk + 0.5 * noise * disk.std() if seed else disk)

    def _touch(self, seed: int) -> None:
        norm = self._ready.policy.hf.base_model.norm.weight
        _assign(norm, _full(norm) * (1 + torch.rand(norm.shape, generator=torch.Generator().manual_seed(seed))))

    def _logprobs(self, prompt: list[int], completion: list[int]) -> list[float]:
        policy = self._ready.policy
        tokens = torch.tensor([[*prompt, *completion]])
        positions = torch.arange(tokens.shape[1])[None]
        policy.eval()
        with torch.no_grad():
            logprobs, _ = policy(tokens, positions, positions >= len(prompt))
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what a backward pass would do
        return list(logprobs.tolist())


def _full(parameter: torch.Tensor) -> torch.Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _assign(parameter: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.to_local().copy_(whole.to_local())
        else:
            parameter.copy_(value)


class FleetGenerator(GeneratorActor):
    """A generator whose engine tests reach."""

    @concurrent_endpoint
    async def complete(
        self, prompts: Sequence[Sequence[int]], length: int, temperature: float = TEMPERATURE
    ) -> list[Completion]:
        engine, sampling = self._generator._engine, Sampling(temperature)
        requests = (
            engine.generate(prompt, sampling, max_tokens=length, seed=seed, stop_ids=[])
            for seed, prompt in enumerate(prompts)
        )
        return list(await asyncio.gather(*requests))

    @concurrent_endpoint
    async def steps(self, count: int) -> None:
        """Returns after `count` more tokens of the longest request that runs, once one has any."""
        begun = await self._longest(1)
        await self._longest(begun + count)

    async def _longest(self, least: int) -> int:
        """Tokens that the longest running request has, once those are `least`."""
        engine = self._generator._engine
        while (longest := max((len(c.token_ids) for c in engine.sampled().values()), default=0)) < least:
            await engine._engine.collective_rpc("check_health")
        return longest

    @concurrent_endpoint
    async def why_no_shadow(self) -> str:
        return self._generator._engine.why_no_shadow

    @concurrent_endpoint
    async def set_kv_mode(self, mode: KvMode) -> None:
        self._generator._engine.kv_mode = mode


class RecordingTrainer(TrainerMesh):
    """Remembers of which kind its offers were."""

    kinds: list[str]

    async def offer(self, version: int, buffer: int, base: int) -> Offer:
        offer = await super().offer(version, buffer, base)
        self.kinds.append(offer.kind)
        return offer


class RecordingReplica(Replica):
    """Counts the replicas that flip at the same time, and says when its own flip begins.

    With `stages_after` it ends its staging when the flip of that other one has begun.
    """

    flips = 0
    most_flips = 0
    stages_after: RecordingReplica | None = None

    def __init__(self, mesh: Any, name: str, config: GeneratorConfig) -> None:
        super().__init__(mesh, name, config)
        self.flip_begins = asyncio.Event()

    async def stage(self, offer: Offer) -> float:
        seconds = await super().stage(offer)
        if self.stages_after is not None:
            await self.stages_after.flip_begins.wait()
        return seconds

    async def flip(self, version: int) -> float:
        cls = RecordingReplica
        cls.flips += 1
        cls.most_flips = max(cls.flips, cls.most_flips)
        self.flip_begins.set()
        try:
            return await super().flip(version)
        finally:
            cls.flips -= 1


class Fleet:
    """A trainer of `world` ranks and up to `num_replicas` generators of `tp` workers, on one event loop."""

    def __init__(
        self, hosts: Hosts, model: str, world: int, tp: int, num_replicas: int = 1, *, shadow: bool = True
    ) -> None:
        self.world, self.tp, self.model, self.shadow = world, tp, model, shadow
        self.version = 0
        self.replicas: list[RecordingReplica] = []
        mesh = MeshConfig(trainer=RoleConfig(procs=world), generator=RoleConfig(procs=tp, replicas=num_replicas))
        roles = ("trainer", "generator")
        placement = plan_placement(mesh, device="cpu", slots=2, torchrun_slots=None, roles=roles, num_hosts=1)
        self._runner = asyncio.Runner()
        self._cluster = Cluster(hosts, placement)
        self._runner.run(self._cluster.__aenter__())

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 280.0) -> Any:
        """The result of `work`; the death of an actor is an error at once."""
        return self._runner.run(self._watched(work, timeout_s))

    async def _watched(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            tasks = [asyncio.ensure_future(self._cluster.watch()), asyncio.ensure_future(work)]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                return done.pop().result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def start(self) -> None:
        """Starts the trainer and the first generator."""
        spec = ModelSpec(self.model, "float32", temperature=TEMPERATURE)
        config = TrainerConfig()
        self.trainer_actors = await self._cluster.spawn(
            "trainer", FleetTrainer, config, LossConfig(), spec, world=self.world, seed=0
        )
        trainer = TrainerMesh(self.trainer_actors, config, self.world, "float32")
        await asyncio.gather(trainer.setup(), self.start_replica())

    async def start_replica(self) -> RecordingReplica:
        index = len(self.replicas)
        config = GeneratorConfig(max_model_len=MAX_LEN, max_new_tokens=8, kv_cache_bytes=64 << 20)
        name = f"generator_{index}"
        actors = await self._cluster.spawn(
            "generator",
            FleetGenerator,
            config,
            self.model,
            "float32",
            seed=0,
            stop_ids=[],
            procs=self.tp,
            sync=WeightSyncConfig(shadow=self.shadow),
            replica=index,
            env=QUIET,
        )
        replica = RecordingReplica(actors, name, config)
        await replica.setup([7, 8, 9])
        self.replicas.append(replica)
        return replica

    async def why_no_shadow(self) -> str:
        """Of the first generator."""
        why: str = await self.replicas[0].mesh.why_no_shadow.call_one()
        return why

    async def perturb(self, seed: int) -> None:
        await self.trainer_actors.perturb.call(seed)

    async def restore(self) -> None:
        await self.perturb(0)

    async def touch(self, seed: int) -> None:
        await self.trainer_actors.touch.call(seed)

    async def logprobs(self, prompt: Sequence[int], completion: Completion) -> torch.Tensor:
        """Of a completion's tokens, under the trainer's weights of now."""
        (_, values), *_ = await self.trainer_actors.logprobs.call(prompt, completion.token_ids)
        return torch.tensor(values)

    @contextlib.asynccontextmanager
    async def syncing(
        self, transport: str = "memory", folder: str = "", replicas: Sequence[Replica] | None = None, **options: Any
    ) -> AsyncIterator[Syncing]:
        """A new WeightSync between the trainer and `replicas` (default: all), and its loop."""
        config = WeightSyncConfig(transport=transport, **options)  # type: ignore[arg-type]
        config.validate()
        trainer = RecordingTrainer(
            self.trainer_actors, TrainerConfig(), self.world, "float32", config, transport=transport, folder=folder
        )
        trainer.kinds = []
        sync = WeightSync(trainer, self.replicas if replicas is None else replicas, config)
        await sync.connect()
        syncing = Syncing(self, trainer, sync)
        loop = asyncio.create_task(sync.run(syncing.report))
        syncing.loop = loop
        try:
            yield syncing
            sync.close()
            await loop
        finally:
            loop.cancel()

    def close(self) -> None:
        try:
            self._runner.run(self._cluster.__aexit__(None, None, None))
        finally:
            self._runner.close()


class Syncing:
    """A WeightSync that runs."""

    loop: asyncio.Task[None]

    def __init__(self, fleet: Fleet, trainer: RecordingTrainer, sync: WeightSync) -> None:
        self._fleet, self.trainer, self.sync = fleet, trainer, sync
        self.applied: list[Applied] = []
        self._news = asyncio.Event()

    async def report(self, applied: Applied) -> None:
        self.applied.append(applied)
        self._news.set()

    async def publish(self) -> int:
        """The trainer's weights of now, as the next version."""
        self._fleet.version += 1
        await self.sync.publish(self._fleet.version)
        return self._fleet.version

    async def until(self, version: int) -> None:
        """Until every replica serves `version`."""
        while not self.applied or self.applied[-1].version < version:
            self._news.clear()
            await self.unless_it_ends(self._news.wait())

    async def update(self) -> str:
        """Publishes and waits until it serves; returns of which kind the offer was."""
        await self.until(await self.publish())
        return self.trainer.kinds[-1]

    async def unless_it_ends(self, awaitable: Awaitable[Any]) -> None:
        """Waits, or raises what the loop has ended with."""
        waiting = asyncio.ensure_future(awaitable)
        await asyncio.wait([waiting, self.loop], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await self.loop
