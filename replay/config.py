"""The replay's part of a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from forge.errors import ConfigError


@dataclass
class ReplayConfig:
    """How far generation may run ahead of training, and in which order groups are trained."""

    max_staleness: int = 1
    """Policy versions, at most, between an episode's oldest token and the trainer that consumes it; 0 is
    strictly on-policy, which is the synchronous baseline."""
    policy: str = "fifo"
    """Which groups a batch takes first: fifo (complete ones first), strict (waits for the oldest), uniform, advantage,
    staleness, or module:function of your own."""
    window: float = 0.0
    """Share of max_staleness that is kept for groups that run long: so many fewer are admitted, and those that are
    complete in time are trained within (1 - window) * max_staleness versions, rounded up. 0 admits all that the
    bound allows; 1 one batch at a time."""
    straggler_timeout_s: float = 600.0
    """Seconds that the train loop waits for groups that must be in its batch before they are dropped; from
    sample_timeout_s on the run fails first."""
    max_uses: int = 1
    """Batches that a group may be part of, within its bound."""
    memory_bytes: int = 0
    """Bytes of groups that the replay may hold; 0 stands for a quarter of the machine's memory."""
    reserve_timeout_s: float = 1200.0
    """Seconds that a rollout loop waits for a free slot before the run fails, naming who holds the slots."""
    sample_timeout_s: float = 1200.0
    """Seconds that the train loop waits for a batch before the run fails, naming the missing groups."""
    max_degenerate_in_a_row: int = 256
    """Groups, dropped one after the other because all their rewards are equal, before the run fails."""
    journal: bool = True
    """Write finished groups and the tokens of unfinished ones to the run folder, for a resume after a crash."""
    record: bool = False
    """Keep the whole journal, from which apps/grpo/rerun.py trains the same batches again without generators."""
    journal_interval_s: float = 1.0
    """Seconds, at most, between two writes of the journal."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError(
                f"replay.max_staleness must be >= 0, got {self.max_staleness}; use 0 for strictly on-policy"
            )
        if not 0 <= self.window <= 1:
            raise ConfigError(
                f"replay.window must lie in [0, 1], got {self.window}; 0 admits all that max_staleness allows"
            )
        if self.memory_bytes < 0:
            raise ConfigError(f"replay.memory_bytes must be >= 0, got {self.memory_bytes}; 0 is a quarter of memory")
        for name in (
            "straggler_timeout_s",
            "max_uses",
            "reserve_timeout_s",
            "sample_timeout_s",
            "max_degenerate_in_a_row",
            "journal_interval_s",
        ):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"replay.{name} must be > 0, got {value}; leave it out for the default")
