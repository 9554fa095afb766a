"""The configuration of training an agent: GRPO's, the agent's and the gateway's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from actors.environments.groups import GroupPolicy
from actors.gateway.agents import AgentConfig
from actors.gateway.config import GatewayConfig
from apps.grpo.config import AppConfig, plan_whole_groups
from apps.worlds.config import WorldsRewardConfig
from forge.errors import ConfigError
from forge.placement import Placement
from replay.staleness import num_slots


@dataclass
class AgentAppConfig(AppConfig):
    """GRPO for an agent."""

    reward: WorldsRewardConfig = field(default_factory=WorldsRewardConfig)
    """Stays empty: the agent gives the reward, or its check."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """The agent, whose tasks are the metadata of data.task's rows."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    """The server that it speaks to. Temperature, top_p and the room for tokens follow the section generator."""
    episodes: GroupPolicy = field(default_factory=GroupPolicy)
    """What becomes of a group one of whose agents fails."""
    tool_parser: str = ""
    """vLLM's parser of the tool calls that the model makes, such as hermes; empty: it makes none."""
    chat_template: str = ""
    """A template to use in place of the tokenizer's own."""

    def validate(self) -> None:
        """Raises ConfigError before any process starts."""
        super().validate()
        self.agent.validate()
        self.episodes.validate()
        gateway_config(self).validate()
        named = [self.reward.model, *(one.path for one in self.reward.functions), *self.reward.pools]
        if any(named):
            raise ConfigError(
                f"section reward names {', '.join(filter(None, named))}: it scores rows, of which a session may have "
                "several; leave it empty and have the agent score itself"
            )
        if self.gateway.journal:
            raise ConfigError(
                f"gateway.journal is {self.gateway.journal!r}: the agents end with this run, so nobody goes on with "
                "what it keeps; leave it empty"
            )
        sessions = self.num_rollouts * (self.grpo.group_size + self.grpo.oversample)
        if sessions > self.gateway.max_sessions:
            raise ConfigError(
                f"gateway.max_sessions is {self.gateway.max_sessions}, {sessions} may be open at once: "
                f"{self.num_rollouts} groups of grpo.group_size and grpo.oversample; raise the former"
            )

    @property
    def num_rollouts(self) -> int:
        """Groups under way at once."""
        return num_slots(self.replay.max_staleness, self.grpo.groups_per_step, self.replay.window)


def gateway_config(cfg: AgentAppConfig) -> GatewayConfig:
    """The section gateway, its sampling and its room for tokens those of the generators. Pure."""
    generator = cfg.generator
    return replace(
        cfg.gateway,
        temperature=generator.temperature,
        top_p=generator.top_p,
        max_tokens=min(cfg.gateway.max_tokens, generator.max_model_len),
    )


def plan_run(cfg: AgentAppConfig, torchrun_slots: int | None, num_hosts: int = 1) -> Placement:
    """`apps.grpo.config.plan_whole_groups` for it."""
    return plan_whole_groups(cfg, torchrun_slots, num_hosts)
