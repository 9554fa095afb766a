"""Group advantages: how much better an episode did than the others of its prompt.

Each kind is a function from rewards `[P, G]` (P prompts, G episodes of each) to advantages `[P, G]`,
so one of your own is one function: add it to ADVANTAGES, or name it as `module:function` in the
configuration. A group whose rewards are all equal teaches nothing and gets 0 from every kind but `none`. Rewards of
turns and tokens, REINFORCE++ and GAE are in `forge/token_advantages.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forge.errors import ConfigError, SchemaError
from forge.registry import lookup

STD_EPS = 1e-6


def grpo(rewards: Tensor) -> Tensor:
    """`(R - mean) / (std + 1e-6)`, sample std (ddof 1). `[P, G]` -> `[P, G]`."""
    return dr_grpo(rewards) / (rewards.std(dim=-1, keepdim=True, correction=1) + STD_EPS)


def dr_grpo(rewards: Tensor) -> Tensor:
    """`R - mean`; pair it with the aggregation seq_mean_token_sum_norm. `[P, G]` -> `[P, G]`."""
    return rewards - rewards.mean(dim=-1, keepdim=True)


def rloo(rewards: Tensor) -> Tensor:
    """`R_i - mean of the others`. `[P, G]` -> `[P, G]`."""
    size = rewards.shape[-1]
    return dr_grpo(rewards) * (size / (size - 1))


def none(rewards: Tensor) -> Tensor:
    """The rewards themselves, for REINFORCE++ and PPO, whose baseline is not the group. `[P, G]` -> `[P, G]`."""
    return rewards


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "none": none}


def is_degenerate(rewards: Tensor) -> Tensor:
    """Whether all rewards of a group are equal: `[..., G]` -> bool `[...]`.

    Compares max with min: eight rewards of 0.35 have a float std that is not 0. A group of one is
    degenerate.
    """
    return rewards.amax(dim=-1) == rewards.amin(dim=-1)


def advantages(rewards: Tensor, kind: str, group_size: int) -> Tensor:
    """Advantage of each episode, `[N]` -> `[N]`; consecutive runs of `group_size` are one group.

    Computed in float64, returned in the dtype of `rewards`. Raises ConfigError for an unknown
    `kind` or a group size below 1, SchemaError when N is not a multiple of the group size or a
    reward is not finite.
    """
    function = lookup(kind, ADVANTAGES, "grpo.advantage")
    if group_size < 1:
        raise ConfigError(f"group_size must be >= 1, got {group_size}")
    if rewards.dim() != 1 or rewards.shape[0] % group_size:
        shape = list(rewards.shape)
        raise SchemaError(f"rewards has shape {shape}, expected [N] with N a multiple of {group_size}")
    if not bool(rewards.isfinite().all()):
        index = int((~rewards.isfinite()).nonzero()[0, 0])
        raise SchemaError(f"rewards[{index}] is {rewards[index].item()}; a reward must be a finite number")
    groups = rewards.to(torch.float64).view(-1, group_size)
    if function is none:
        return rewards.clone()
    if group_size == 1:  # std and the mean of the others do not exist
        return torch.zeros_like(rewards)
    zero = is_degenerate(groups)[:, None]
    return torch.where(zero, 0.0, function(groups)).view(-1).to(rewards.dtype)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """What DAPO adds to the reward of a completion of `lengths` tokens, `[N]` -> `[N]`, at most 0 (Yu et al. 2025).

    `min(-(L - (max_length - buffer)) / buffer * factor, 0)`: 0 up to `buffer` tokens before the budget `max_length`,
    then falling to -factor at it. Raises ConfigError for a buffer that does not lie in [1, max_length].
    """
    if not 1 <= buffer <= max_length:
        raise ConfigError(f"buffer must lie in [1, {max_length}], got {buffer}; a fifth of max_length is usual")
    over = lengths.to(torch.float64) - (max_length - buffer)
    return (-over / buffer * factor).clamp(max=0.0).to(torch.float32)
