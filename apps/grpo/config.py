"""The configuration tree of the GRPO app: one section a room, each declared where it is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from actors.critic import CriticConfig
from actors.evaluator import EvaluationConfig
from actors.generator import GeneratorConfig
from actors.reward import RewardConfig
from actors.sharding import count_shards
from actors.trainer import TrainerConfig
from apps.grpo.models import check_model
from forge.advantages import ADVANTAGES
from forge.data import DataConfig
from forge.errors import ConfigError
from forge.losses import LossConfig
from forge.pairing import check_pairing
from forge.placement import MeshConfig, Placement, place
from forge.registry import lookup
from forge.run_log import RunConfig, check_run
from forge.supervision import FailurePolicy
from replay.config import ReplayConfig
from weightsync.config import WeightSyncConfig

DEFAULT_PRESET = Path(__file__).with_name("smollm2.yaml")


@dataclass
class GrpoConfig:
    """Groups: how many samples of one prompt, how many prompts a step, what their rewards become."""

    group_size: int = 8
    """Episodes sampled for one prompt, at least 2; 1 with advantage none."""
    batch_size: int = 64
    """Episodes trained in one step; a multiple of group_size."""
    advantage: str = "grpo"
    """How rewards of a group become advantages: grpo, dr_grpo, rloo, none (the rewards themselves), or
    module:function of your own."""
    oversample: int = 0
    """Episodes begun for one prompt beyond group_size; the last to end are cut, so that no straggler holds a group."""
    degenerate: Literal["keep", "drop"] = "keep"
    """What happens to groups whose rewards are all equal: trained with advantage 0, or dropped and replaced."""

    @property
    def groups_per_step(self) -> int:
        """Groups in one batch."""
        return self.batch_size // self.group_size

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit."""
        alone = self.advantage == "none" and self.degenerate == "keep"
        if self.group_size < (1 if alone else 2):
            raise ConfigError(
                f"grpo.group_size must be >= 2, got {self.group_size}; a group of one has no advantage over itself, "
                "unless grpo.advantage is none and grpo.degenerate keep"
            )
        if self.batch_size < 1 or self.batch_size % self.group_size:
            near = max(1, round(self.batch_size / self.group_size)) * self.group_size
            raise ConfigError(
                f"grpo.batch_size must be a positive multiple of grpo.group_size {self.group_size}, "
                f"got {self.batch_size}; use {near}"
            )
        if self.oversample < 0:
            raise ConfigError(f"grpo.oversample must be >= 0, got {self.oversample}; 0 begins group_size episodes")
        lookup(self.advantage, ADVANTAGES, "grpo.advantage")


@dataclass
class AppConfig:
    """Asynchronous GRPO."""

    model: str = "smollm2"
    """The policy: smollm2, tiny, nano, a Hugging Face folder, or a hub name such as org/name."""
    seed: int = 0
    """Seed of prompts, sampling and weights."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of trainer and generators. auto: bfloat16 where the hardware is fast at it, else float32."""
    run: RunConfig = field(default_factory=RunConfig)
    """Where the run is written and what it shows."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Which role runs on which devices."""
    data: DataConfig = field(default_factory=DataConfig)
    """The task and its prompts."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """Sampling and the inference engine."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """What an episode is worth."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """How far generation may run ahead of training."""
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    """Groups and advantages."""
    loss: LossConfig = field(default_factory=LossConfig)
    """What the trainer minimises."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The optimizer."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic of PPO."""
    weightsync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """How new weights reach the generators."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation during training."""

    def validate(self) -> None:
        """Raises ConfigError before any process starts."""
        check_model(self.model)
        check_run(self.run)
        sections = (self.data, self.generator, self.reward, self.grpo, self.trainer, self.loss, self.critic)
        for section in (*sections, self.weightsync, self.evaluation):
            section.validate()
        check_pairing(self.loss, self.replay.max_staleness)
        if self.trainer.updates > self.grpo.groups_per_step:
            raise ConfigError(
                f"trainer.updates is {self.trainer.updates}, a batch has {self.grpo.groups_per_step} groups "
                "(grpo.batch_size / grpo.group_size) and each update needs one; lower the former"
            )
        if self.run.resume and not self.replay.journal:
            raise ConfigError(
                f"run.resume is {self.run.resume}, replay.journal false: prompts would begin anew and the buffer would "
                "be lost; leave replay.journal true"
            )
        if self.replay.record and not self.replay.journal:
            raise ConfigError("replay.record is true, replay.journal false: the journal is the record; leave it true")
        for role in ("trainer", "replay"):
            if getattr(self.mesh, role).on_failure == "respawn" and not self.replay.journal:
                raise ConfigError(
                    f"mesh.{role}.on_failure is respawn, replay.journal false: what a {role} goes on from is in the "
                    "journal; leave replay.journal true, or use end"
                )
        self._check_lora()
        if self.generator.keep_routes and self.trainer.compile:
            raise ConfigError(
                "generator.keep_routes and trainer.compile are both true: compiled routers choose for themselves; use "
                "one of the two"
            )
        self._check_scoring_models()
        self._check_colocated()
        if self.evaluation.every and not self.reward.needed:
            raise ConfigError(
                f"evaluation.every is {self.evaluation.every}, but episodes of this app get their rewards where they "
                "are played: an evaluation answers in one turn and has nobody to score it; leave it 0"
            )
        if self.generator.max_model_len > self.trainer.microbatch_tokens:
            raise ConfigError(
                f"trainer.microbatch_tokens is {self.trainer.microbatch_tokens}, generator.max_model_len "
                f"{self.generator.max_model_len}: one episode would not fit; raise the former or lower the latter"
            )

    def failure_policy(self, role: str) -> FailurePolicy:
        """The section mesh.<role> with its auto settled: what respawn is refused for is end."""
        mesh = self.mesh
        possible = not mesh.debug and not (mesh.colocate and role in ("trainer", "generator"))
        if role in ("trainer", "replay"):
            possible &= self.replay.journal
        if role == "trainer":  # without checkpoints it would go back to the first step
            possible &= self.run.checkpoint_every > 0
        own: FailurePolicy = getattr(mesh, role)
        return own.settled(possible=possible)

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic."""
        return self.loss.token_advantages == "gae"

    def _check_scoring_models(self) -> None:
        for option, name in (("critic.model", self.critic.model), ("reward.model", self.reward.model)):
            try:
                check_model(name or self.model)
            except ConfigError as error:
                raise ConfigError(f"{option}: {error}") from error
        if self.reward.model_turns and not self.loss.per_token:
            raise ConfigError(
                f"reward.model_turns is true, loss.token_advantages {self.loss.token_advantages}, which reads no "
                "reward of a turn; use reinforce_pp or gae"
            )

    def _check_colocated(self) -> None:
        sync = self.weightsync
        if not self.mesh.colocate:
            return
        if self.evaluation.every:
            raise ConfigError(
                f"mesh.colocate is true, evaluation.every {self.evaluation.every}: the engines of evaluations take no "
                "turns on the devices; leave the latter 0"
            )
        for option, value, other in (("staging", sync.staging, "device"), ("transport", sync.transport, "ipc")):
            if value == other:
                raise ConfigError(
                    f"mesh.colocate is true, weightsync.{option} {value}: the trainer keeps nothing on a device that "
                    "generators use; leave the latter at its default"
                )

    def _check_lora(self) -> None:
        rank, served = self.trainer.lora.rank, self.generator.lora_rank
        if not rank and served:
            raise ConfigError(
                f"generator.lora_rank is {served}, trainer.lora.rank 0: the trainer publishes all weights, which an "
                "engine that serves adapters does not take; set trainer.lora.rank, the generators follow it"
            )
        if rank and 0 < served < rank:
            raise ConfigError(
                f"trainer.lora.rank is {rank}, generator.lora_rank {served}: the adapters do not fit; leave the latter "
                "0, it follows the former"
            )
        if rank and self.weightsync.kv != "keep":
            raise ConfigError(
                f"weightsync.kv is {self.weightsync.kv} with trainer.lora.rank {rank}: a request keeps its adapter for "
                "life, there is no flip to treat it at; leave it keep"
            )


def plan_run(cfg: AppConfig, torchrun_slots: int | None, num_hosts: int = 1) -> Placement:
    """Checks the whole configuration and says where every role goes; raises ConfigError. Starts nothing."""
    cfg.validate()
    own_critic = cfg.has_critic and cfg.mesh.critic.procs is not None
    optional = {
        "critic": own_critic,
        "reference": cfg.loss.needs_reference,
        "reward_model": bool(cfg.reward.model),
        "evaluator": cfg.evaluation.every > 0,
    }
    roles = ["trainer", "generator", *(role for role, wanted in optional.items() if wanted)]
    placement = place(cfg.mesh, torchrun_slots=torchrun_slots, num_hosts=num_hosts, roles=roles)
    if placement.device == "cpu" and not cfg.generator.enforce_eager:
        raise ConfigError(
            "generator.enforce_eager is false on a CPU, where compiled code may keep the old weights after an update; "
            "use true"
        )
    world = placement.roles["trainer"].procs
    num_shards = count_shards(world, cfg.trainer.tensor_parallel)
    if cfg.grpo.batch_size < num_shards:
        raise ConfigError(
            f"grpo.batch_size is {cfg.grpo.batch_size}, the trainer's ranks divide it into {num_shards}; each share "
            "needs an episode"
        )
    if own_critic and cfg.mesh.critic.procs != world:
        raise ConfigError(
            f"mesh.critic.procs is {cfg.mesh.critic.procs}, the trainer has {world} ranks: each of them works on the "
            "share of one of the trainer's; use as many, or leave it out to have the critic in the trainer's processes"
        )
    return placement


def plan_whole_groups(cfg: AppConfig, torchrun_slots: int | None, num_hosts: int = 1) -> Placement:
    """`plan_run` for apps that train all episodes of a group, in no order. Raises ConfigError for a loss of pairs."""
    together = cfg.loss.needs.together
    if together > 1:
        raise ConfigError(
            f"loss.name is {cfg.loss.name}, which compares {together} episodes with each other, and groups are not cut "
            "into such; use apps/dpo/online.py for pairs of rollouts, or another loss"
        )
    return plan_run(cfg, torchrun_slots, num_hosts)
