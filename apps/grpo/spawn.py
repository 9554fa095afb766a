"""Spawns the actors of a GRPO run and connects them; nothing here runs once the loops do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from actors.generator import GeneratorActor, Generators, Progress, Replica
from actors.model import pick_dtype
from actors.reference import ReferenceActor, ReferenceClient
from actors.reward import RewardActor, RewardClient
from actors.rollout import References, Rewards
from actors.trainer import ModelSpec
from actors.trainer_mesh import TrainerActor, TrainerMesh
from apps.grpo.config import AppConfig
from apps.grpo.models import resolve_model
from forge.data import DataConfig, PromptStream, load_task, make_encoder
from forge.mesh import Cluster
from forge.report import RunLog
from replay.actor import ReplayActor, ReplayClient
from replay.events import Tokens
from replay.persistence import JournalPlace
from replay.staleness import num_slots
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
        await self.replay.shut_down()
        if isinstance(self.reward, RewardClient):
            await self.reward.shutdown()
        return memory


async def spawn_actors(cfg: AppConfig, cluster: Cluster, log: RunLog, reward: Rewards | None = None) -> Actors:
    """All actors of the run of `log`, set up side by side; in the state of its checkpoint where it is resumed.

    A `reward` of the caller's own takes the place of the configured functions, whose actor is not spawned then.
    """
    note = log.note
    note(f"preparing model {cfg.model}")
    model = await asyncio.to_thread(resolve_model, cfg.model)
    tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, model)
    first = make_prompts(cfg.data, tokenizer, cfg.seed).peek()
    spec = model_spec(cfg, model, cluster.device)

    same_host = cluster.same_host("trainer", "generator")
    transport = transports.choose(cfg.weightsync.transport, same_host=same_host, device=_staging(cfg, spec), note=note)
    if cfg.weightsync.delta and (spec.dtype == "float32" or transport in transports.MAPPED):
        note(f"weightsync.delta saves nothing here: {spec.dtype} weights by {transport}; all of them travel")
    note(f"starting the actors ({spec.dtype} on {cluster.device}); an engine takes 15 to 40 s")
    async with asyncio.TaskGroup() as tasks:
        state = log.resumed.path / "trainer" if log.resumed else None
        weights = str(log.folder.absolute / "weights")
        trainer = tasks.create_task(start_trainer(cfg, cluster, spec, state, transport=transport, folder=weights))
        stop = stop_ids(tokenizer, model)
        replicas = [
            tasks.create_task(_start_generator(cfg, cluster, spec, index, stop, first.token_ids))
            for index in range(cluster.replicas("generator"))
        ]
        replay = tasks.create_task(_start_replay(cfg, cluster, model, log))
        rewards = tasks.create_task(_start_reward(cfg, cluster, reward))
        reference = tasks.create_task(_start_reference(cfg, cluster, spec)) if cfg.loss.kl_weight else None
    generators = Generators([task.result() for task in replicas])
    sync = WeightSync(trainer.result(), generators.replicas, cfg.weightsync)
    await sync.connect()
    if log.resumed is not None:
        note(f"bringing the generators to version {log.resumed.version}")
        await sync.start_at(log.resumed.version)
    return Actors(
        model=model,
        decode=make_decoder(tokenizer),
        generators=generators,
        reward=rewards.result(),
        reference=reference.result() if reference else None,
        replay=replay.result(),
        trainer=trainer.result(),
        sync=sync,
        num_rollouts=num_slots(cfg.replay.max_staleness, cfg.grpo.groups_per_step, cfg.replay.window),
    )


def model_spec(cfg: AppConfig, model: str, device: str) -> ModelSpec:
    """What the trainer loads from the folder `model`, with the sampling of the generators."""
    dtype, sampling = str(pick_dtype(cfg.dtype, device)).removeprefix("torch."), cfg.generator.sampling
    return ModelSpec(model, dtype, device, sampling.temperature, sampling.top_p, sampling.top_k)


def _staging(cfg: AppConfig, spec: ModelSpec) -> str:
    """The kind of device that the trainer's snapshots lie on."""
    return spec.device if cfg.weightsync.staging == "device" else "cpu"


async def start_trainer(
    cfg: AppConfig,
    cluster: Cluster,
    spec: ModelSpec,
    state: Path | None = None,
    *,
    transport: str = "memory",
    folder: str = "",
) -> TrainerMesh:
    """The trainer on its mesh, in the saved `state` where there is one; `folder` is where the file transport writes."""
    world = cluster.procs("trainer")
    mesh = await cluster.spawn("trainer", TrainerActor, cfg.trainer, cfg.loss, spec, world=world, seed=cfg.seed)
    folder = cfg.weightsync.folder or folder
    trainer = TrainerMesh(mesh, cfg.trainer, world, spec.dtype, cfg.weightsync, transport=transport, folder=folder)
    await trainer.setup()
    if state is not None:
        await trainer.load_state(str(state))
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


async def _start_replay(cfg: AppConfig, cluster: Cluster, model: str, log: RunLog) -> ReplayClient:
    journal = None
    if cfg.replay.journal:
        run = f"{cfg.data.task}, group_size {cfg.grpo.group_size}, seed {cfg.seed}"
        journal = JournalPlace(str(log.folder.absolute / "journal"), run, log.start if cfg.run.resume else None)
    mesh = await cluster.spawn(
        "replay",
        ReplayActor,
        cfg.replay,
        cfg.grpo.groups_per_step,
        cfg.grpo.degenerate,
        start_version=log.start,
        row_tokens=cfg.trainer.microbatch_tokens,
        seed=cfg.seed,
        prompts=partial(open_prompts, cfg.data, model, cfg.seed),
        journal=journal,
    )
    replay = ReplayClient(mesh)
    if told := await replay.setup():
        log.note(told)
    return replay


def make_prompts(data: DataConfig, tokenizer: Any, seed: int) -> PromptStream:
    """The task's prompts, as `tokenizer` encodes them."""
    return PromptStream(load_task(data), make_encoder(tokenizer, data.template_args), seed, shuffle=data.shuffle)


def open_prompts(data: DataConfig, model: str, seed: int) -> PromptStream:
    """The same for a process that has no tokenizer of `model` yet."""
    return make_prompts(data, AutoTokenizer.from_pretrained(model), seed)


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


def tokens_event(part: Progress) -> Tokens:
    """Progress of a generator's call, whose name is the group's number, as the journal keeps it."""
    return Tokens(
        int(part.request_id),
        part.place,
        part.offset,
        torch.tensor(part.tokens.token_ids, dtype=torch.int32),
        torch.tensor(part.tokens.logprobs, dtype=torch.float32),
        torch.tensor(part.tokens.versions, dtype=torch.int32),
        part.finish,
    )
