"""The configuration of training in environments: GRPO's, the environments' and the episodes'."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from actors.environments.config import EnvironmentConfig
from actors.environments.episodes import EpisodesConfig
from actors.reward import RewardConfig
from apps.grpo.config import AppConfig
from apps.grpo.config import plan_run as plan_rollouts
from apps.worlds.kinds import shares_of
from forge.errors import ConfigError
from forge.placement import Placement


@dataclass
class WorldsRewardConfig(RewardConfig):
    """What an episode is worth besides what its environment says."""

    needed: ClassVar[bool] = False
    """The environment gives rewards of its own."""


@dataclass
class WorldsConfig(AppConfig):
    """GRPO in environments."""

    reward: WorldsRewardConfig = field(default_factory=WorldsRewardConfig)
    """Added to the environment's rewards, if anything is named."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """The environment, whose tasks are the metadata of data.task's rows."""
    environments: dict[str, EnvironmentConfig] = field(default_factory=dict)
    """Several kinds by name, in place of environment; a task's `environment` names its own. Each has a mesh of its own,
    environment_<name>."""
    quotas: dict[str, float] = field(default_factory=dict)
    """Share of all groups by kind of environment, see apps/worlds/kinds.py; kinds without one divide the rest equally.
    Empty: tasks come as data.task has them."""
    episodes: EpisodesConfig = field(default_factory=EpisodesConfig)
    """How episodes are played."""
    tool_parser: str = ""
    """vLLM's parser of the tool calls that the model makes, such as hermes; empty: it makes none."""
    chat_template: str = ""
    """A template to use in place of the tokenizer's own."""

    @property
    def kinds(self) -> dict[str, EnvironmentConfig]:
        """All kinds by name, which is that of their mesh, too."""
        return self.environments or {"environment": self.environment}

    def validate(self) -> None:
        """Raises ConfigError before any process starts."""
        super().validate()
        if self.environments and self.environment.path:
            raise ConfigError(
                f"environment.path is {self.environment.path}, environments names {', '.join(self.environments)}; use "
                "one of the two"
            )
        for name, kind in self.kinds.items():
            if not name.isidentifier():
                raise ConfigError(f"environments has {name!r}; name kinds with letters, digits and underscores")
            kind.validate(f"environments.{name}" if self.environments else "environment")
        if self.quotas:
            shares_of(list(self.kinds), self.quotas)
        self.episodes.validate()
        turns = [name for name, pool in self.reward.pools.items() if pool.turns]
        if turns and not self.loss.per_token:
            raise ConfigError(
                f"reward.pools.{turns[0]}.turns is true, loss.token_advantages {self.loss.token_advantages}, which "
                "reads no reward of a turn; use reinforce_pp or gae"
            )


def plan_run(cfg: WorldsConfig, torchrun_slots: int | None, num_hosts: int = 1) -> Placement:
    """`apps.grpo.config.plan_run` for it."""
    return plan_rollouts(cfg, torchrun_slots, num_hosts)
