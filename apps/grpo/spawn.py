"""Spawns the actors of a GRPO run and connects them; nothing here runs once the loops do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from transformers import AutoTokenizer, GenerationConfig

from actors.critic import CriticConfig
from actors.critic_mesh import CriticActor, TrainerWithCritic
from actors.generator import GeneratorActor, GeneratorConfig, Progress
from actors.generators import Generators, Replica
from actors.lora import targets_of_model
from actors.model import load_config, pick_dtype
from actors.reference import ReferenceActor, ReferenceClient
from actors.reward_model import RewardModelActor, RewardModelClient
from actors.reward_pools import RewardPools, start_rewards
from actors.rollout import References, RewardModels, Rewards
from actors.router_replay import check_routed
from actors.tensor_parallel import check_tensor_parallel
from actors.trainer import ModelSpec, TrainerConfig
from actors.trainer_mesh import TrainerActor, TrainerMesh
from actors.turns import Turns
from actors.value_model import check_vocabulary
from apps.grpo.config import AppConfig
from apps.grpo.evaluation import Evaluators, start_evaluators
from apps.grpo.fleet import Fleet, Lives
from apps.grpo.models import resolve_model
from forge.data import DataConfig, PromptStream, load_task, make_encoder
from forge.lasting import Spawn, lasting
from forge.run_log import RunLog
from forge.supervision import NOTICE_S, Guard
from replay.actor import ReplayActor, ReplayClient
from replay.events import Tokens
from replay.persistence import JournalPlace
from replay.staleness import num_slots
from weightsync import transports
from weightsync.config import WeightSyncConfig
from weightsync.sync import WeightSync

# What vLLM and the libraries that it loads warn of is nothing for a user of this app to act on.
QUIET = {
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
}


class Meshes(Lives, Protocol):
    """Where actors are spawned, as they are by `forge.mesh.Cluster`: a whole cluster, or one policy's part of it."""

    @property
    def device(self) -> Literal["cpu", "cuda"]: ...

    def procs(self, role: str) -> int: ...

    def replicas(self, role: str) -> int: ...

    def same_host(self, *roles: str) -> bool: ...

    async def spawn(self, role: str, actor_class: type[Any], *args: Any, **kwargs: Any) -> Any: ...


@dataclass
class Actors:
    """Everything that the loops talk to."""

    model: str
    decode: Callable[[Sequence[int]], str]
    generators: Generators
    reward: Rewards
    reference: References | None
    reward_model: RewardModels | None
    replay: ReplayClient
    trainer: TrainerMesh
    sync: WeightSync
    num_rollouts: int
    guards: list[Guard] = field(default_factory=list)
    """Of the replicas that are respawned when they die, generators excepted."""
    fleet: Fleet | None = None
    """The generators as those that come, go and die."""
    trainer_guard: Guard | None = None
    """The trainer's, which is armed with the loops (`apps/grpo/recovery.py`)."""
    evaluators: Evaluators | None = None
    _told: Counter[str] = field(default_factory=Counter)

    def restarts(self) -> dict[str, int]:
        """Restarts since this was asked last, as `extra/restarts/<role>`; see `forge.metrics.Meter.include`."""
        guards = self._all_guards()
        now = Counter({f"extra/restarts/{guard.role}": 0 for guard in guards if guard.armed})
        for guard in guards:
            now[f"extra/restarts/{guard.role}"] += guard.restarts
        new = {key: now[key] - self._told[key] for key in now}
        self._told = now
        return new

    def _all_guards(self) -> list[Guard]:
        return [*self.guards, *(self.fleet.guards if self.fleet else [])]

    async def shut_down(self) -> dict[str, int]:
        """Lets engines and reward workers end by themselves; returns the generators' peak memory, in bytes."""
        for guard in self._all_guards():
            guard.disarm()
        memory = await self.generators.peak_memory()
        await self.generators.shutdown()
        if self.evaluators is not None:
            memory |= await self.evaluators.generators.peak_memory()
            await self.evaluators.generators.shutdown()
        await self.replay.shut_down()
        if isinstance(self.reward, RewardPools):
            await self.reward.shutdown()
        return memory


async def spawn_actors(
    cfg: AppConfig,
    cluster: Meshes,
    log: RunLog,
    reward: Rewards | None = None,
    *,
    teacher: str | None = None,
    stop: Sequence[int] = (),
) -> Actors:
    """All actors of the run of `log`, set up side by side; in the state of its checkpoint where it is resumed.

    A `reward` of the caller's own takes the place of the configured functions, whose actor is not spawned then. Where
    the loss needs a reference, it is the folder `teacher`; by default the model that is trained, as it was. Tokens of
    `stop` end an answer besides those of the model.
    """
    note = log.note
    note(f"preparing model {cfg.model}")
    model = await asyncio.to_thread(resolve_model, cfg.model)
    tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, model)
    first = make_prompts(cfg.data, tokenizer, cfg.seed).peek()
    spec = model_spec(cfg, model, cluster.device)
    generator = await asyncio.to_thread(generator_config, cfg, model)

    turns = Turns(_longest_turn_s(cfg)) if cfg.mesh.colocate else None

    same_host = cluster.same_host("trainer", "generator", *(("evaluator",) if cfg.evaluation.every else ()))
    transport = transports.choose(cfg.weightsync.transport, same_host=same_host, device=_staging(cfg, spec), note=note)
    if cfg.weightsync.delta and (spec.dtype == "float32" or transport in transports.MAPPED):
        note(f"weightsync.delta saves nothing here: {spec.dtype} weights by {transport}; all of them travel")
    note(f"starting the actors ({spec.dtype} on {cluster.device}); an engine takes 15 to 40 s")
    async with asyncio.TaskGroup() as tasks:
        state = log.resumed.path / "trainer" if log.resumed else None
        weights = str(log.folder.absolute / "weights")
        training = Guard(cfg.failure_policy("trainer"), note)
        options: dict[str, Any] = {"transport": transport, "folder": weights, "turns": turns, "guard": training}
        train = partial(start_trainer, cfg, cluster, spec, state, **options)
        trainer = tasks.create_task(training.start(train))
        ends = sorted({*stop_ids(tokenizer, model), *stop})
        start = partial(_start_generator, cfg, cluster, spec, generator, ends, first.token_ids, turns, trainer)
        policy = cfg.failure_policy("generator")
        guards = [Guard(policy, note) for _ in range(cfg.mesh.generator.replicas)]
        others: list[Guard] = []

        def again(role: str) -> Spawn:
            return lasting(cluster.spawn, cfg.failure_policy(role), note, others)

        replicas = [tasks.create_task(guard.start(partial(start, i, guard))) for i, guard in enumerate(guards)]
        evaluators = tasks.create_task(start_evaluators(cfg, cluster, spec, generator, tokenizer, ends, QUIET, note))
        replay = tasks.create_task(_start_replay(cfg, again("replay"), model, log))
        rewards = tasks.create_task(_start_reward(cfg, again("reward"), reward))
        scorer = again("reward_model")
        judge = tasks.create_task(_start_reward_model(cfg, scorer, spec)) if cfg.reward.model else None
        frozen, referring = replace(spec, path=teacher or spec.path), again("reference")
        reference = (
            tasks.create_task(start_reference(cfg.trainer, cluster, frozen, referring))
            if cfg.loss.needs_reference
            else None
        )
    generators, tested = Generators([task.result() for task in replicas], turns), evaluators.result()
    source = await training.start(train) if training.died else trainer.result()  # it waited for the engines
    sync = WeightSync(source, generators.replicas, _patient(cfg), notice_s=NOTICE_S)
    fleet = Fleet(cluster, start, generators, sync, policy, note, cfg.mesh.generator.places)
    for index, (guard, task) in enumerate(zip(guards, replicas, strict=True)):
        fleet.take(index, guard, task.result())
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
        reward_model=judge.result() if judge else None,
        replay=replay.result(),
        trainer=source,
        sync=sync,
        num_rollouts=num_slots(cfg.replay.max_staleness, cfg.grpo.groups_per_step, cfg.replay.window),
        guards=[training, *others, *(tested.guards if tested else [])],
        fleet=fleet,
        trainer_guard=training,
        evaluators=tested,
    )


def model_spec(cfg: AppConfig, model: str, device: str) -> ModelSpec:
    """What the trainer loads from the folder `model`, with the sampling of the generators.

    Raises ConfigError when the model cannot be divided among `trainer.tensor_parallel` ranks, or has no routers whose
    choices `generator.keep_routes` could record.
    """
    check_tensor_parallel(model, cfg.trainer.tensor_parallel)
    if cfg.generator.keep_routes:
        check_routed(load_config(model))
    dtype, generator = str(pick_dtype(cfg.dtype, device)).removeprefix("torch."), cfg.generator
    sampler = (generator.temperature, generator.top_p, generator.top_k)
    return ModelSpec(model, dtype, device, *sampler, keep_routes=generator.keep_routes)


def generator_config(cfg: AppConfig, model: str) -> GeneratorConfig:
    """The section generator; where the trainer trains adapters, with room for those of the model in folder `model`."""
    lora, generator = cfg.trainer.lora, cfg.generator
    if not lora.rank:
        return generator
    targets = {*generator.lora_targets, *targets_of_model(model, lora)}
    return replace(generator, lora_rank=max(generator.lora_rank, lora.rank), lora_targets=sorted(targets))


def _longest_turn_s(cfg: AppConfig) -> float:
    """How long a turn of a colocated run may take: the engines' sleep, a step, their waking, a flip before all that."""
    return cfg.trainer.step_timeout_s + 3 * cfg.weightsync.deadline_s


def _patient(cfg: AppConfig) -> WeightSyncConfig:
    """The section weightsync as the controller follows it: in a colocated run an update may have to wait for a turn."""
    sync = cfg.weightsync
    return replace(sync, deadline_s=sync.deadline_s + _longest_turn_s(cfg)) if cfg.mesh.colocate else sync


def _staging(cfg: AppConfig, spec: ModelSpec) -> str:
    """The kind of device that the trainer's snapshots lie on."""
    return spec.device if cfg.weightsync.staging == "device" else "cpu"


async def start_trainer(
    cfg: AppConfig,
    cluster: Meshes,
    spec: ModelSpec,
    state: Path | None = None,
    *,
    transport: str = "memory",
    folder: str = "",
    turns: Turns | None = None,
    guard: Guard | None = None,
) -> TrainerMesh:
    """The trainer on its mesh, in the saved `state` where there is one; `folder` is where the file transport writes.

    With `turns` it leaves a GPU to the generators in between. With `guard` another takes its place when it dies,
    see `TrainerMesh.respawn`.
    """
    critic, sections = await _critic(cfg, spec.path), (cfg.trainer, cfg.loss, spec)
    own = critic is not None and cfg.mesh.critic.procs is not None
    options: dict[str, Any] = {"world": cluster.procs("trainer"), "seed": cfg.seed}
    own_options: dict[str, Any] = {
        "critic": critic,
        "critic_inside": not own,
        "offload": turns is not None and spec.device == "cuda",
    }

    async def spawn() -> tuple[Any, Callable[[str], None] | None]:
        mesh = await cluster.spawn("trainer", TrainerActor, *sections, **own_options, **options, guard=guard)
        return mesh, guard.reporter() if guard else None

    kind: Callable[..., TrainerMesh] = TrainerMesh
    if own:

        async def spawn_critic() -> Any:
            return await cluster.spawn("critic", CriticActor, critic, *sections, **options, guard=guard)

        kind = partial(TrainerWithCritic, spawn_critic)
    world, folder = options["world"], cfg.weightsync.folder or folder
    mesh, report = await spawn()
    where: dict[str, Any] = {"transport": transport, "folder": folder, "turns": turns}
    trainer = kind(mesh, cfg.trainer, world, spec.dtype, cfg.weightsync, **where, report=report, spawn=spawn)
    if guard is not None:
        guard.lose = trainer.lose
    await trainer.start()
    await trainer.setup()
    if state is not None:
        await trainer.load_state(str(state))
    return trainer


async def _critic(cfg: AppConfig, policy: str) -> CriticConfig | None:
    """The section critic with its model as a folder, where there is a critic. Raises ConfigError."""
    if not cfg.has_critic or not cfg.critic.model:
        return cfg.critic if cfg.has_critic else None
    model = await asyncio.to_thread(resolve_model, cfg.critic.model)
    await asyncio.to_thread(check_vocabulary, model, policy, option="critic.model")
    return replace(cfg.critic, model=model)


async def _start_reward_model(cfg: AppConfig, spawn: Spawn, spec: ModelSpec) -> RewardModelClient:
    model = await asyncio.to_thread(resolve_model, cfg.reward.model)
    await asyncio.to_thread(check_vocabulary, model, spec.path, option="reward.model")
    mesh = await spawn(
        "reward_model",
        RewardModelActor,
        replace(spec, path=model),
        microbatch_tokens=cfg.trainer.microbatch_tokens,
        turns=cfg.reward.model_turns,
    )
    client = RewardModelClient(mesh, cfg.reward, cfg.trainer)
    await client.setup()
    return client


async def _start_generator(
    cfg: AppConfig,
    cluster: Meshes,
    spec: ModelSpec,
    generator: GeneratorConfig,
    stop: list[int],
    warm_up: list[int],
    turns: Turns | None,
    behind: asyncio.Task[TrainerMesh],
    index: int,
    guard: Guard,
) -> Replica:
    """Replica number `index`, whose engine runs; in the weights on the disk."""
    sleep_mode = turns is not None and spec.device == "cuda"
    if turns is not None:
        await asyncio.wait([behind])  # vLLM measures what is free when it starts: the trainer has left the device then
    mesh = await cluster.spawn(
        "generator",
        GeneratorActor,
        generator,
        spec.path,
        spec.dtype,
        seed=cfg.seed + index,
        stop_ids=stop,
        procs=cluster.procs("generator"),
        # A shadow would lie where vLLM's sleep does not find it, and memory is what turns are taken for.
        sync=replace(cfg.weightsync, shadow=False) if sleep_mode else cfg.weightsync,
        sleep_mode=sleep_mode,
        replica=index,
        env=QUIET,
        guard=guard,
    )
    replica = Replica(mesh, f"generator_{index}", generator, turns, cfg.weightsync.deadline_s, report=guard.reporter())
    await replica.setup(warm_up)
    if turns is not None:
        turns.add(replica)
    return replica


async def _start_reward(cfg: AppConfig, spawn: Spawn, own: Rewards | None) -> Rewards:
    return own if own is not None else await start_rewards(cfg.reward, spawn, inline=cfg.mesh.debug)


async def _start_replay(cfg: AppConfig, spawn: Spawn, model: str, log: RunLog) -> ReplayClient:
    journal = None
    if cfg.replay.journal:
        run = f"{cfg.data.task}, group_size {cfg.grpo.group_size}, seed {cfg.seed}"
        journal = JournalPlace(str(log.folder.absolute / "journal"), run, log.start if cfg.run.resume else None)
    mesh = await spawn(
        "replay",
        ReplayActor,
        cfg.replay,
        cfg.grpo.groups_per_step,
        cfg.grpo.degenerate,
        start_version=log.start,
        row_tokens=cfg.trainer.microbatch_tokens,
        together=cfg.loss.needs.together,
        readers=cfg.trainer.tensor_parallel,
        seed=cfg.seed,
        prompts=partial(open_prompts, cfg.data, model, cfg.seed),
        journal=journal,
    )
    replay = ReplayClient(mesh, start_version=log.start)
    if told := await replay.setup():
        log.note(told)
    return replay


def make_prompts(data: DataConfig, tokenizer: Any, seed: int) -> PromptStream:
    """The task's prompts, as `tokenizer` encodes them."""
    return PromptStream(load_task(data), make_encoder(tokenizer, data.template_args), seed, shuffle=data.shuffle)


def open_prompts(data: DataConfig, model: str, seed: int) -> PromptStream:
    """The same for a process that has no tokenizer of `model` yet."""
    return make_prompts(data, AutoTokenizer.from_pretrained(model), seed)


async def start_reference(
    trainer: TrainerConfig, cluster: Meshes, spec: ModelSpec, spawn: Spawn | None = None
) -> ReferenceClient:
    """The frozen model of `spec`, which is a teacher where its folder is another than the trainer's.

    `spawn` takes the place of `cluster.spawn`.
    """
    mesh = await (spawn or cluster.spawn)(
        "reference", ReferenceActor, spec, microbatch_tokens=trainer.microbatch_tokens
    )
    client = ReferenceClient(mesh, trainer)
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
        part.tokens.kept,
    )
