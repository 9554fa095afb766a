"""The configurations of DPO: on pairs that are there, and on the rollout loop of GRPO."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.sharding import count_shards
from apps.grpo.config import AppConfig
from apps.grpo.config import plan_run as plan_rollouts
from apps.sft.config import OfflineConfig, check_loss
from forge.data import DataConfig
from forge.errors import ConfigError
from forge.losses import LossConfig
from forge.placement import Placement


def dpo_loss() -> LossConfig:
    """The section loss of DPO."""
    return LossConfig(name="dpo", aggregation="seq_mean_token_sum")


@dataclass
class DpoConfig(OfflineConfig):
    """DPO on pairs that are there."""

    data: DataConfig = field(default_factory=lambda: DataConfig(task="apps.dpo.tasks:reverse_digits"))
    """The rows, each with `prompt` or `messages`, `chosen` and `rejected`."""
    loss: LossConfig = field(default_factory=dpo_loss)
    """What the trainer minimises; loss.params takes beta and label_smoothing."""

    def validate(self) -> None:
        """Raises ConfigError before any process starts."""
        super().validate()
        check_loss(self.loss, "dpo")


def plan_online(cfg: AppConfig, torchrun_slots: int | None, num_hosts: int = 1) -> Placement:
    """`apps.grpo.config.plan_run`, and what pairs need besides. Raises ConfigError."""
    if cfg.loss.needs.together != 2:
        raise ConfigError(f"loss.name is {cfg.loss.name}, which is no loss of pairs; use dpo, or one of your own")
    if cfg.grpo.degenerate != "drop":
        raise ConfigError(
            "grpo.degenerate is keep: a group of equal rewards has neither a best nor a worst episode; use drop"
        )
    placement = plan_rollouts(cfg, torchrun_slots, num_hosts)
    shares = count_shards(placement.roles["trainer"].procs, cfg.trainer.tensor_parallel)
    if cfg.grpo.groups_per_step < shares:
        raise ConfigError(
            f"grpo.batch_size / grpo.group_size is {cfg.grpo.groups_per_step}, as many pairs a step, and the trainer's "
            f"ranks divide them into {shares}; each share needs a pair"
        )
    return placement
