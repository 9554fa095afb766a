"""The configuration of reward-model training: that of training on rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.reward_trainer import check_options
from apps.sft.config import OfflineConfig
from forge.data import DataConfig
from forge.errors import ConfigError
from forge.losses import LossConfig


@dataclass
class RewardModelConfig(OfflineConfig):
    """A reward model from pairs."""

    data: DataConfig = field(default_factory=lambda: DataConfig(task="apps.dpo.tasks:reverse_digits"))
    """The rows, each with `prompt` or `messages`, `chosen` and `rejected`."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Not read: the loss is that of Bradley and Terry. Leave it as it is."""

    def validate(self) -> None:
        """Raises ConfigError before any process starts."""
        super().validate()
        check_options(self.trainer)
        if self.loss != LossConfig():
            raise ConfigError("section loss is set, which a reward model does not read: its loss is Bradley-Terry's")
