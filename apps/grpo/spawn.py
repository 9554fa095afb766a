"""Spawns the actors of a GRPO run and connects them; nothing here runs once the loops do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.generator import GeneratorActor, Generators, Replica
from actors.model import pick_dtype
from actors.reference import ReferenceActor, ReferenceClient
from actors.reward import RewardActor, RewardClient
from actors.rollout import References
from actors.trainer import ModelSpec, TrainerActor, TrainerMesh
from replay.actor import ReplayActor, ReplayClient
from transformers import AutoTokenizer, GenerationConfig
from weightsync.sync import WeightSync

from apps.grpo.config import AppConfig
from apps.grpo.models import resolve_model
from forge.data import PromptStream, load_task, make_encoder
from forge.mesh import Cluster

# vLLM and what it loads tell a user of this app nothing that is theirs to act on.
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": "-all"}


@dataclass
class Actors:
    """Everything that the loops talk to."""

    model: str
    prompts: PromptStream
    decode: Callable[[Sequence[int]], str]
    generators: Generators
    reward: RewardClient
    reference: References | None
    replay: ReplayClient
    trainer: TrainerMesh
    sync: WeightSync
    num_rollouts: int

    async def save_and_shut_down(self, checkpoint: Path | None) -> dict[str, int]:
        """Writes the final model, lets engines and reward workers end by themselves; peak memory by role, in bytes."""
        stats = await self.generators.stats()
        if checkpoint is not None:
            await self.trainer.save(str(checkpoint), self.model)
        await asyncio.gather(self.generators.shutdown(), self.reward.shutdown())
        return {f"generator_{i}": s.peak_rss_bytes for i, s in enumerate(stats)}


async def spawn_actors(cfg: AppConfig, cluster: Cluster, note: Callable[[str], None]) -> Actors:
    """All actors of the run, set up side by side. `note` is told what is being waited for."""
    note(f"preparing model {cfg.model}")
    model = await asyncio.to_thread(resolve_model, cfg.model)
    tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, model)
    prompts = PromptStream(load_task(cfg.data), make_encoder(tokenizer, cfg.data.template_args), cfg.seed, shuffle=cfg.data.shuffle)
    dtype = str(pick_dtype(cfg.dtype, cluster.device)).removeprefix("torch.")
    sampling = cfg.generator.sampling
    spec = ModelSpec(model, dtype, cluster.device, sampling.temperature, sampling.top_p, sampling.top_k)

    note(f"starting the actors ({dtype} on {cluster.device}); an engine takes 15 to 40 s")
    trainer = await _spawn_trainer(cfg, cluster, spec)
    generators = await _spawn_generators(cfg, cluster, spec, tokenizer)
    reward = RewardClient(await cluster.spawn("reward", RewardActor, cfg.reward, inline=cfg.mesh.debug))
    reference = await _spawn_reference(cfg, cluster, spec) if cfg.loss.kl_weight else None
    grpo = cfg.grpo
    replay = ReplayClient(
        await cluster.spawn("replay", ReplayActor, cfg.replay, grpo.groups_per_step, grpo.degenerate)
    )
    warm_up = prompts.peek().token_ids
    await asyncio.gather(
        trainer.setup(), generators.setup(warm_up), reward.setup(), *([reference.setup()] if reference else [])
    )
    sync = WeightSync(trainer, generators.replicas)
    await sync.connect()
    num_rollouts = grpo.groups_per_step * (cfg.replay.max_staleness + 1)
    decode = make_decoder(tokenizer)
    return Actors(model, prompts, decode, generators, reward, reference, replay, trainer, sync, num_rollouts)


async def _spawn_trainer(cfg: AppConfig, cluster: Cluster, spec: ModelSpec) -> TrainerMesh:
    world = cluster.procs("trainer")
    mesh = await cluster.spawn("trainer", TrainerActor, cfg.trainer, cfg.loss, spec, world=world, seed=cfg.seed)
    return TrainerMesh(mesh, cfg.trainer, world, spec.dtype)


async def _spawn_generators(cfg: AppConfig, cluster: Cluster, spec: ModelSpec, tokenizer: Any) -> Generators:
    replicas = []
    for index in range(cluster.replicas("generator")):
        mesh = await cluster.spawn(
            "generator",
            GeneratorActor,
            cfg.generator,
            spec.path,
            spec.dtype,
            seed=cfg.seed + index,
            stop_ids=stop_ids(tokenizer, spec.path),
            procs=cluster.procs("generator"),
            replica=index,
            env=QUIET,
        )
        replicas.append(Replica(mesh, f"generator_{index}"))
    return Generators(replicas)


async def _spawn_reference(cfg: AppConfig, cluster: Cluster, spec: ModelSpec) -> ReferenceClient:
    mesh = await cluster.spawn(
        "reference", ReferenceActor, spec, microbatch_tokens=cfg.trainer.microbatch_tokens
    )
    return ReferenceClient(mesh)


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
