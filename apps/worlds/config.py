"""The configuration of training in an environment: GRPO's, the environment's and the episodes'."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.environments.config import EnvironmentConfig
from actors.environments.episodes import EpisodesConfig
from actors.reward import RewardConfig, RewardFunction, Sample
from apps.grpo.config import AppConfig
from apps.grpo.config import plan_run as plan_rollouts
from forge.placement import Placement


def from_the_world(sample: Sample) -> float:
    """Stands where a reward function has to be named; the environment gives the rewards."""
    raise NotImplementedError


@dataclass
class WorldsConfig(AppConfig):
    """GRPO in an environment."""

    reward: RewardConfig = field(
        default_factory=lambda: RewardConfig(functions=[RewardFunction("apps.worlds.config:from_the_world")])
    )
    """Its model, if one is named, scores besides the environment; its functions are not called."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """The environment, whose tasks are the metadata of data.task's rows."""
    episodes: EpisodesConfig = field(default_factory=EpisodesConfig)
    """How episodes are played."""
    tool_parser: str = ""
    """vLLM's parser of the tool calls that the model makes, such as hermes; empty: it makes none."""
    chat_template: str = ""
    """A template to use in place of the tokenizer's own."""

    def validate(self) -> None:
        """Raises ConfigError before any process starts."""
        super().validate()
        self.environment.validate()
        self.episodes.validate()


def plan_run(cfg: WorldsConfig, torchrun_slots: int | None, num_hosts: int = 1) -> Placement:
    """`apps.grpo.config.plan_run` for it."""
    return plan_rollouts(cfg, torchrun_slots, num_hosts)
