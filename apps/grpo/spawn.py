"""Spawns the actors of a GRPO run and connects them; nothing here runs once the loops do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from actors.generator import GeneratorActor, Generators, Replica
from actors.model import pick_dtype
from actors.reference import ReferenceActor, ReferenceClient
from actors.reward import RewardActor, RewardClient
from actors.rollout import References, Rewards
from actors.trainer import ModelSpec
from actors.trainer_mesh import TrainerActor, TrainerMesh
from apps.grpo.config import AppConfig
from apps.grpo.models import resolve_model
from forge.data import PromptStream, load_task, make_encoder
from forge.mesh import Cluster
from replay.actor import ReplayActor, ReplayClient
from weightsync import transports
from weightsync.sync import WeightSync

# vLLM and what it loads tell a user of this app nothing that is theirs to act on.
QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
}


@dataclass
class Actors:
    """Everything that the loops talk to."""

    model: str
    prompts: PromptStream
    decode: Callable[[Sequence[int]], str]
    generators: Generators
    reward: Rewards
    reference: References | None
    replay: ReplayClient
    trainer: TrainerMesh
    sync: WeightSync
    num_rollouts: int

    async def shut_down(self) -> dict[str, int]:
        """Lets engines and reward workers end by themselves; returns the generators' peak memory, in bytes."""
        memory = await self.generators.peak_memory()
        await self.generators.shutdown()
        if isinstance(self.reward, RewardClient):
            await self.reward.shutdown()
        return memory


async def spawn_actors(
    cfg: AppConfig, cluster: Cluster, folder: Path, note: Callable[[str], None], reward: Rewards | None = None
) -> Actors:
    """All actors of the run in `folder`, set up side by side. `note` is told what is being waited for.

    A `reward` of the caller's own takes the place of the configured functions, whose actor is not spawned then.
    """
    note(f"preparing model {cfg.model}")
    model = await asyncio.to_thread(resolve_model, cfg.model)
    tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, model)
    encode = make_encoder(tokenizer, cfg.data.template_args)
    prompts = PromptStream(load_task(cfg.data), encode, cfg.seed, shuffle=cfg.data.shuffle)
    dtype = str(pick_dtype(cfg.dtype, cluster.device)).removeprefix("torch.")
    sampling = cfg.generator.sampling
    spec = ModelSpec(model, dtype, cluster.device, sampling.temperature, sampling.top_p, sampling.top_k)

    same_host = cluster.same_host("trainer", "generator")
    transport = transports.choose(cfg.weightsync.transport, same_host=same_host, device=_staging(cfg, spec), note=note)
    if cfg.weightsync.delta and (spec.dtype == "float32" or transport in transports.MAPPED):
        note(f"weightsync.delta saves nothing here: {spec.dtype} weights by {transport}; all of them travel")
    note(f"starting the actors ({dtype} on {cluster.device}); an engine takes 15 to 40 s")
    async with asyncio.TaskGroup() as tasks:
        trainer = tasks.create_task(_start_trainer(cfg, cluster, spec, transport, folder))
        stop = stop_ids(tokenizer, model)
        replicas = [
            tasks.create_task(_start_generator(cfg, cluster, spec, index, stop, prompts.peek().token_ids))
            for index in range(cluster.replicas("generator"))
        ]
        replay = tasks.create_task(_start_replay(cfg, cluster))
        rewards = tasks.create_task(_start_reward(cfg, cluster, reward))
        reference = tasks.create_task(_start_reference(cfg, cluster, spec)) if cfg.loss.kl_weight else None
    generators = Generators([task.result() for task in replicas])
    sync = WeightSync(trainer.result(), generators.replicas, cfg.weightsync)
    await sync.connect()
    return Actors(
        model=model,
        prompts=prompts,
        decode=make_decoder(tokenizer),
        generators=generators,
        reward=rewards.result(),
        reference=reference.result() if reference else None,
        replay=replay.result(),
        trainer=trainer.result(),
        sync=sync,
        num_rollouts=cfg.grpo.groups_per_step * (cfg.replay.max_staleness + 1),
    )


def _staging(cfg: AppConfig, spec: ModelSpec) -> str:
    """The kind of device that the trainer's snapshots lie on."""
    return spec.device if cfg.weightsync.staging == "device" else "cpu"


def _weights_folder(cfg: AppConfig, folder: Path) -> str:
    return cfg.weightsync.folder or str((folder / "weights").absolute())


async def _start_trainer(
    cfg: AppConfig, cluster: Cluster, spec: ModelSpec, transport: str, folder: Path
) -> TrainerMesh:
    world = cluster.procs("trainer")
    mesh = await cluster.spawn("trainer", TrainerActor, cfg.trainer, cfg.loss, spec, world=world, seed=cfg.seed)
    weights = _weights_folder(cfg, folder)
    trainer = TrainerMesh(mesh, cfg.trainer, world, spec.dtype, cfg.weightsync, transport=transport, folder=weights)
    await trainer.setup()
    return trainer


async def _start_generator(
    cfg: AppConfig, cluster: Cluster, spec: ModelSpec, index: int, stop: list[int], warm_up: list[int]
) -> Replica:
    mesh = await cluster.spawn(
        "generator",
        GeneratorActor,
        cfg.generator,
        spec.path,
        spec.dtype,
        seed=cfg.seed + index,
        stop_ids=stop,
        procs=cluster.procs("generator"),
        sync=cfg.weightsync,
        replica=index,
        env=QUIET,
    )
    replica = Replica(mesh, f"generator_{index}", cfg.generator)
    await replica.setup(warm_up)
    return replica


async def _start_reward(cfg: AppConfig, cluster: Cluster, own: Rewards | None) -> Rewards:
    if own is not None:
        return own
    client = RewardClient(await cluster.spawn("reward", RewardActor, cfg.reward, inline=cfg.mesh.debug))
    await client.setup()
    return client


async def _start_replay(cfg: AppConfig, cluster: Cluster) -> ReplayClient:
    grpo = cfg.grpo
    return ReplayClient(await cluster.spawn("replay", ReplayActor, cfg.replay, grpo.groups_per_step, grpo.degenerate))


async def _start_reference(cfg: AppConfig, cluster: Cluster, spec: ModelSpec) -> ReferenceClient:
    mesh = await cluster.spawn("reference", ReferenceActor, spec, microbatch_tokens=cfg.trainer.microbatch_tokens)
    client = ReferenceClient(mesh, cfg.trainer)
    await client.setup()
    return client


def stop_ids(tokenizer: Any, model: str) -> list[int]:
    """The tokens that end a completion: the model's generation config, else the tokenizer's end of text."""
    try:
        ids = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        ids = None
    ids = tokenizer.eos_token_id if ids is None else ids
    return [ids] if isinstance(ids, int) else list(ids or [])


def make_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Token ids to the text that rewards see, without special tokens."""
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
