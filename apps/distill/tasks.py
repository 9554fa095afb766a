"""What stands where an app with rollouts has a reward: distillation has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.reward_worker import Sample


def nothing(sample: Sample) -> float:
    """0. Name a real one in reward.functions to watch it rise."""
    return 0.0
