"""The configuration tree of the GRPO app: one section a room, each declared where it is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from actors.generator import GeneratorConfig
from actors.reward import RewardConfig
from actors.trainer import TrainerConfig
from apps.grpo.models import check_model
from forge.advantages import ADVANTAGES
from forge.data import DataConfig
from forge.errors import ConfigError
from forge.losses import LossConfig
from forge.pairing import check_pairing, check_supplied
from forge.placement import MeshConfig, Placement, place
from forge.registry import lookup
from forge.report import RunConfig, check_run
from forge.token_advantages import TOKEN_ADVANTAGES
from replay.config import ReplayConfig
from weightsync.config import WeightSyncConfig

DEFAULT_PRESET = Path(__file__).with_name("smollm2.yaml")
TRAINER_SUPPLIES = frozenset[str]()
"""Optional inputs of a loss that the trainer makes, by their names in `forge.pairing.needed_inputs`."""


@dataclass
class GrpoConfig:
    """Groups: how many samples of one prompt, how many prompts a step, what their rewards become."""

    group_size: int = 8
    """Episodes sampled for one prompt, at least 2."""
    batch_size: int = 64
    """Episodes trained in one step; a multiple of group_size."""
    advantage: str = "grpo"
    """How rewards of a group become advantages: grpo, dr_grpo, rloo, or module:function of your own."""
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
        if self.group_size < 2:
            raise ConfigError(
                f"grpo.group_size must be >= 2, got {self.group_size}; a group of one has no advantage over itself"
            )
        if self.batch_size < 1 or self.batch_size % self.group_size:
            near = max(1, round(self.batch_size / self.group_size)) * self.group_size
            raise ConfigError(
                f"grpo.batch_size must be a positive multiple of grpo.group_size {self.group_size}, "
                f"got {self.batch_size}; use {near}"
            )
        if self.oversample < 0:
            raise ConfigError(f"grpo.oversample must be >= 0, got {self.oversample}; 0 begins group_size episodes")
        if self.advantage in TOKEN_ADVANTAGES:
            raise ConfigError(
                f"grpo.advantage {self.advantage} is made per token and whitened over the batch, which the trainer "
                f"does not do yet; use one of {', '.join(ADVANTAGES)}"
            )
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
    weightsync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """How new weights reach the generators."""

    def validate(self) -> None:
        """Raises ConfigError before any process starts."""
        check_model(self.model)
        check_run(self.run)
        sections = (self.data, self.generator, self.reward, self.grpo, self.trainer, self.loss, self.weightsync)
        for section in sections:
            section.validate()
        check_pairing(self.loss, self.replay.max_staleness)
        check_supplied(self.loss, TRAINER_SUPPLIES)
        if self.run.resume and not self.replay.journal:
            raise ConfigError(
                f"run.resume is {self.run.resume}, replay.journal false: prompts would begin anew and the buffer would "
                "be lost; leave replay.journal true"
            )
        if self.replay.record and not self.replay.journal:
            raise ConfigError("replay.record is true, replay.journal false: the journal is the record; leave it true")
        if self.generator.max_model_len > self.trainer.microbatch_tokens:
            raise ConfigError(
                f"trainer.microbatch_tokens is {self.trainer.microbatch_tokens}, generator.max_model_len "
                f"{self.generator.max_model_len}: one episode would not fit; raise the former or lower the latter"
            )


def plan_run(cfg: AppConfig, torchrun_slots: int | None, num_hosts: int = 1) -> Placement:
    """Checks the whole configuration and says where every role goes; raises ConfigError. Starts nothing."""
    cfg.validate()
    roles = ["trainer", "generator", *(["reference"] if cfg.loss.kl_weight else [])]
    placement = place(cfg.mesh, torchrun_slots=torchrun_slots, num_hosts=num_hosts, roles=roles)
    if placement.device == "cpu" and not cfg.generator.enforce_eager:
        raise ConfigError(
            "generator.enforce_eager is false on a CPU, where compiled code may keep the old weights after an update; "
            "use true"
        )
    world = placement.roles["trainer"].procs
    if cfg.grpo.batch_size < world:
        raise ConfigError(
            f"grpo.batch_size is {cfg.grpo.batch_size}, the trainer has {world} ranks; each rank needs an episode"
        )
    return placement
