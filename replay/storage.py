"""Complete groups as the replay keeps them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from forge.advantages import is_degenerate
from forge.errors import SchemaError


@dataclass(slots=True)
class Record:
    """A complete group and what the bookkeeping needs of it, read once when it is added."""

    group: TensorDict
    oldest: list[int]
    """Of each episode: the oldest version that sampled one of its tokens; -1 when it trains no token."""
    newest: int
    """The newest version in the group; -1 when it trains no token."""
    num_tokens: int
    """Tokens that the policy produced (`loss_mask`)."""
    rewards: list[float]
    degenerate: bool
    """All rewards equal, so that no advantage says anything."""
    lengths: list[int]
    """Of each episode, prompt included, tokens."""
    magnitude: float
    """Mean absolute advantage of the episodes."""
    nbytes: int
    """Memory that the group takes."""

    def is_stale(self, policy_version: int, max_staleness: int) -> bool:
        """Whether an episode holds a token older than the bound allows at `policy_version`."""
        return any(0 <= version < policy_version - max_staleness for version in self.oldest)


def summarize(group: TensorDict) -> Record:
    """The Record of a valid Group `[G]`. Raises SchemaError when a reward is not finite."""
    mask, versions = group["loss_mask"], group["token_versions"]
    never = torch.iinfo(torch.int64).max
    oldest = torch.where(mask, versions, never).amin(1).tolist()
    rewards = group["rewards"].tolist()
    if not all(map(math.isfinite, rewards)):
        raise SchemaError(f"rewards must be finite, got {rewards}; a reward of nan would reach every weight")
    return Record(
        group=group,
        oldest=[-1 if version == never else version for version in oldest],
        newest=int(torch.where(mask, versions, -1).max()),
        num_tokens=int(mask.sum()),
        rewards=rewards,
        degenerate=bool(is_degenerate(group["rewards"])),
        lengths=group["lengths"].tolist(),
        magnitude=float(group["advantages"].abs().mean()),
        nbytes=group.bytes(),
    )
