"""Advantages per token: rewards of tokens, turns and episodes -> returns -> whitened over the whole batch.

    episode or turn rewards --episode_rewards, turn_rewards--> [B, T] --kl_penalised--> [B, T]
        --TOKEN_ADVANTAGES--> [B, T] --whiten, with the moments of all micro-batches and ranks--> advantages

Tokens outside the mask (a prompt, an answer of an environment, padding) are stepped over: no reward there is read,
nothing is discounted there, and what a token gets does not depend on how many of them lie behind it. Computed in
float64, returned in the dtype of the rewards, 0 outside the mask. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge.errors import ConfigError, SchemaError
from forge.kl import kl_divergence

WHITEN_EPS = 1e-8


@dataclass(frozen=True, kw_only=True)
class TokenRewards:
    """What a token advantage may read."""

    rewards: Tensor
    """`[B, T]`, the reward of each policy token."""
    loss_mask: Tensor
    """bool `[B, T]`."""
    values: Tensor | None = None
    """`[B, T]`, a critic's value of the state before each token."""
    gamma: float = 1.0
    """Discount of the next policy token, in [0, 1]."""
    lam: float = 1.0
    """GAE's decay, in [0, 1]."""


def reinforce_pp(x: TokenRewards) -> Tensor:
    """`G_t = r_t + gamma G_{t+1}`, `[B, T]` (REINFORCE++, Hu 2025).

    Its baseline variant is this after grpo.advantage dr_grpo, which takes the mean of the group from each reward.
    """
    check(x)
    rewards = _clean(x.rewards, x.loss_mask)
    return _backwards(rewards, x.loss_mask, x.gamma).to(x.rewards.dtype)


def gae(x: TokenRewards) -> Tensor:
    """`A_t = delta_t + gamma lam A_{t+1}`, `delta = r + gamma V' - V`, `[B, T]` (Schulman et al. 2016).

    V' is the value at the next policy token, 0 behind the last. The critic's returns are `A + V`.
    """
    check(x)
    if x.values is None:
        raise SchemaError("values is missing; loss.token_advantages gae needs a critic; reinforce_pp needs none")
    values = _clean(x.values, x.loss_mask)
    deltas = _clean(x.rewards, x.loss_mask) + x.gamma * _next_values(values, x.loss_mask) - values
    return _backwards(deltas, x.loss_mask, x.gamma * x.lam).to(x.rewards.dtype)


TOKEN_ADVANTAGES: dict[str, Callable[[TokenRewards], Tensor]] = {
    "reinforce_pp": reinforce_pp,
    "gae": gae,
}
"""All of them are to be whitened over the batch."""


def check(x: TokenRewards) -> None:
    """Raises SchemaError for shapes that do not fit or a reward that is not finite, ConfigError for other values."""
    for name in ("gamma", "lam"):
        if not 0.0 <= getattr(x, name) <= 1.0:
            raise ConfigError(f"{name} must lie in [0, 1], got {getattr(x, name)}; 1 discounts nothing")
    if x.loss_mask.dtype != torch.bool or x.loss_mask.dim() != 2:
        raise SchemaError(f"loss_mask is {x.loss_mask.dtype} {list(x.loss_mask.shape)}, expected bool [B, T]")
    for name, value in (("rewards", x.rewards), ("values", x.values)):
        if value is not None and value.shape != x.loss_mask.shape:
            raise SchemaError(f"{name} has shape {list(value.shape)}, loss_mask {list(x.loss_mask.shape)}")
    bad = x.loss_mask & ~x.rewards.isfinite()
    if bool(bad.any()):
        row, token = bad.nonzero()[0].tolist()
        wrong = x.rewards[row, token].item()
        raise SchemaError(f"rewards[{row}, {token}] is {wrong}; a reward must be a finite number")


# --- rewards of episodes and turns -> of tokens


def spread(episodes: Tensor, loss_mask: Tensor, of_tokens: Tensor | None = None) -> Tensor:
    """What each token earned of what its episode did: `[B]`, and `[B, T]` where tokens are told apart -> `[B, T]`.

    What `of_tokens` leaves of an episode's number, all of it without them, stands at its last policy token.
    """
    if of_tokens is None:
        return episode_rewards(episodes, loss_mask)
    known = torch.where(loss_mask, of_tokens, 0.0)
    return known + episode_rewards(episodes - known.sum(dim=1), loss_mask)


def episode_rewards(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """The reward of an episode at its last policy token: `[B]` -> `[B, T]`, 0 elsewhere."""
    behind = loss_mask.flip(1).cumsum(dim=1).flip(1)  # policy tokens from here on
    return torch.where(loss_mask & (behind == 1), rewards[:, None], 0.0)


def turn_rewards(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """The reward of the k-th turn at its last policy token: `[B, K]` -> `[B, T]`, 0 elsewhere.

    A turn is a run of policy tokens. An episode of fewer than K turns has zeros in the rest of its row; raises
    SchemaError for more turns than K, and for a reward of a turn that is not there.
    """
    before = torch.nn.functional.pad(loss_mask, (1, 0))[:, :-1]
    after = torch.nn.functional.pad(loss_mask, (0, 1))[:, 1:]
    turns = (loss_mask & ~before).cumsum(dim=1)  # number of the turn, from 1
    counts = turns.amax(dim=1)
    extra = torch.arange(rewards.shape[1], device=rewards.device) >= counts[:, None]
    if bool((counts > rewards.shape[1]).any()) or bool((extra & (rewards != 0)).any()):
        raise SchemaError(f"rewards holds {rewards.shape[1]} turns, the episodes have {counts.tolist()}; give one each")
    picked = rewards.gather(1, (turns - 1).clamp(min=0))
    return torch.where(loss_mask & ~after, picked, 0.0)


def kl_penalised(
    rewards: Tensor, loss_mask: Tensor, logprobs: Tensor, ref_logprobs: Tensor, *, weight: float, estimator: str
) -> Tensor:
    """`r_t - weight * KL_t`, `[B, T]`, without gradient: the KL term in the reward; `weight` is loss.kl_weight."""
    gap = _clean(logprobs.detach(), loss_mask), _clean(ref_logprobs, loss_mask)
    kl = kl_divergence(*gap, estimator)
    return (_clean(rewards, loss_mask) - weight * torch.where(loss_mask, kl, 0.0)).to(rewards.dtype)


# --- whitening over the batch


def moments(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Count, mean, and summed squared distance from it of the policy tokens: float64 `[3]`."""
    picked = values[loss_mask].to(torch.float64)
    mean = picked.sum() / max(picked.numel(), 1)
    return torch.stack([torch.as_tensor(float(picked.numel())).to(mean), mean, (picked - mean).square().sum()])


def merge_moments(parts: Sequence[Tensor]) -> Tensor:
    """The moments of several micro-batches or ranks as one (Chan et al. 1979)."""
    count, mean, spread = torch.stack(list(parts)).unbind(dim=1)
    total = count.sum()
    middle = (count * mean).sum() / total.clamp(min=1)
    return torch.stack([total, middle, (spread + count * (mean - middle).square()).sum()])


def whiten(values: Tensor, loss_mask: Tensor, of_batch: Tensor | None = None) -> Tensor:
    """`(values - mean) rsqrt(var + 1e-8)` over policy tokens, sample variance (ddof 1); `[B, T]`, 0 elsewhere.

    `of_batch`: the merged moments of the whole batch; None: `values` is the whole batch.
    """
    count, mean, spread = (moments(values, loss_mask) if of_batch is None else of_batch).unbind()
    variance = spread / (count - 1).clamp(min=1)
    white = (_clean(values, loss_mask) - mean) * (variance + WHITEN_EPS).rsqrt()
    return torch.where(loss_mask, white, 0.0).to(values.dtype)


def _clean(values: Tensor, loss_mask: Tensor) -> Tensor:
    return torch.where(loss_mask, values.to(torch.float64), 0.0)


def _backwards(values: Tensor, loss_mask: Tensor, decay: float) -> Tensor:
    """`s_t = values_t + decay s_{t+1}` along policy tokens, float64 `[B, T]`."""
    out = torch.zeros_like(values)
    carry = torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        carry = torch.where(loss_mask[:, t], values[:, t] + decay * carry, carry)
        out[:, t] = torch.where(loss_mask[:, t], carry, 0.0)
    return out


def _next_values(values: Tensor, loss_mask: Tensor) -> Tensor:
    """The value at the next policy token of each token, 0 where there is none."""
    out = torch.zeros_like(values)
    carry = torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        out[:, t] = carry
        carry = torch.where(loss_mask[:, t], values[:, t], carry)
    return out
