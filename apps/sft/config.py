"""The configuration tree of the apps that train on rows that are there: no generator, no replay, no rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from actors.sharding import count_shards
from actors.trainer import TrainerConfig
from apps.grpo.models import check_model
from forge.data import DataConfig
from forge.errors import ConfigError
from forge.losses import LOSSES, LossConfig
from forge.placement import MeshConfig, Placement, place
from forge.run_log import RunConfig, check_run


@dataclass
class BatchConfig:
    """What is trained in one step."""

    size: int = 64
    """Rows of the data in one step; a row of pairs counts once."""
    timeout_s: float = 1200.0
    """Seconds that the train loop waits for a batch before the run fails."""


@dataclass
class OfflineConfig:
    """What the apps have in common; each has a loss and a task of its own."""

    model: str = "smollm2"
    """What is trained: smollm2, tiny, nano, a Hugging Face folder, or a hub name such as org/name."""
    seed: int = 0
    """Seed of the rows' order and of what is random in training."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. auto: bfloat16 where the hardware is fast at it, else float32."""
    run: RunConfig = field(default_factory=RunConfig)
    """Where the run is written and what it shows."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Which role runs on which devices; generators there are none."""
    data: DataConfig = field(default_factory=DataConfig)
    """The rows."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """What is trained in one step."""
    loss: LossConfig = field(default_factory=LossConfig)
    """What the trainer minimises."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The optimizer."""

    def validate(self) -> None:
        """Raises ConfigError before any process starts."""
        check_model(self.model)
        check_run(self.run)
        for section in (self.data, self.trainer, self.loss):
            section.validate()
        for role in ("trainer", "reference"):
            if getattr(self.mesh, role).on_failure == "respawn":
                raise ConfigError(
                    f"mesh.{role}.on_failure is respawn: this app ends with the {role}, and --resume goes on; use end"
                )
        least = max(1, self.trainer.updates)
        if self.batch.size < least:
            raise ConfigError(f"batch.size must be >= {least} (1, and trainer.updates), got {self.batch.size}")
        if not self.batch.timeout_s > 0:
            raise ConfigError(f"batch.timeout_s must be > 0, got {self.batch.timeout_s}; leave it out for the default")


@dataclass
class SftConfig(OfflineConfig):
    """Supervised fine-tuning."""

    data: DataConfig = field(default_factory=lambda: DataConfig(task="apps.sft.tasks:reverse_digits"))
    """The rows, each with `prompt` or `messages`, and `completion`."""
    loss: LossConfig = field(default_factory=lambda: LossConfig(name="nll"))
    """What the trainer minimises."""

    def validate(self) -> None:
        """Raises ConfigError before any process starts."""
        super().validate()
        check_loss(self.loss, "nll")


def check_loss(loss: LossConfig, own: str) -> None:
    """Raises ConfigError for a loss, or an option of it, that looks at who sampled: nobody did."""
    if loss.name in LOSSES and loss.name != own:
        raise ConfigError(f"loss.name is {loss.name}, which is no loss for this data; use {own}, or one of your own")
    if loss.correction != "none" or loss.per_token:
        raise ConfigError(
            f"loss.correction is {loss.correction}, loss.token_advantages {loss.token_advantages}: both are about "
            "sampled tokens, and these rows were not sampled; use none and episode"
        )


def plan_run(cfg: OfflineConfig, torchrun_slots: int | None, num_hosts: int = 1) -> Placement:
    """Checks the whole configuration and says where every role goes; raises ConfigError. Starts nothing."""
    cfg.validate()
    roles = ["trainer", *(["reference"] if cfg.loss.needs_reference else [])]
    placement = place(cfg.mesh, torchrun_slots=torchrun_slots, num_hosts=num_hosts, roles=roles)
    shares = count_shards(placement.roles["trainer"].procs, cfg.trainer.tensor_parallel)
    if cfg.batch.size < shares:
        raise ConfigError(
            f"batch.size is {cfg.batch.size}, the trainer's ranks divide it into {shares}; each share needs a row"
        )
    return placement
