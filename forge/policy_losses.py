"""The losses: what one token costs, and nothing else.

With `r = exp(policy - anchor)` and A the advantage. The anchor is behavior, or proximal under a correction
(`forge/corrections.py`). Clipping for A < 0 is not the mirror image of A > 0: `max` picks the larger cost of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge.corrections import anchor_logprobs, behavior_weights, proximal, sequence_mean
from forge.kl import bounded_exp, kl_divergence, probability_ratio
from forge.loss_input import LossInput, TokenLoss, needs
from forge.preference_losses import dpo

if TYPE_CHECKING:
    from forge.loss_config import LossConfig


def ppo_clip(x: LossInput, cfg: LossConfig) -> TokenLoss:
    """`max(-A r, -A clip(r, 1 - low, 1 + high))`; dual clip for A < 0: `min(that, -A c)`.

    Schulman et al. 2017; Ye et al. 2020 (dual clip). It is the loss of GRPO, Dr. GRPO, DAPO and RLOO too.
    """
    return _clipped(probability_ratio(x.policy_logprobs, anchor_logprobs(x, cfg)), x.advantages, cfg)


def decoupled_ppo(x: LossInput, cfg: LossConfig) -> TokenLoss:
    """PPO clip on `exp(policy - proximal)`, times `exp(proximal - behavior)` up to weight_high.

    Hilton et al. 2022; Fu et al. 2025. Raises SchemaError without proximal_logprobs.
    """
    ratio = probability_ratio(x.policy_logprobs, proximal(x, "loss.name decoupled_ppo"))
    weight = behavior_weights(x, cfg)
    loss, metrics = _clipped(ratio, x.advantages, cfg)
    return weight * loss, {**metrics, "extra/behavior_weight": weight, "extra/dropped": weight == 0}


def gspo(x: LossInput, cfg: LossConfig) -> TokenLoss:
    """PPO clip on one ratio for a sequence, the geometric mean of its tokens' (Zheng et al. 2025).

    `s = exp(mean(policy - anchor))`; the gradient runs through `stopgrad(s) exp(policy - stopgrad(policy))`.
    Aggregate with seq_mean_token_mean; usual clipping is 3e-4 and 4e-4.
    """
    with torch.no_grad():
        ratio = bounded_exp(sequence_mean(x.policy_logprobs - anchor_logprobs(x, cfg), x.loss_mask))
    return _clipped(ratio * (x.policy_logprobs - x.policy_logprobs.detach()).exp(), x.advantages, cfg)


def cispo(x: LossInput, cfg: LossConfig) -> TokenLoss:
    """`-stopgrad(clip(r, 1 - low, 1 + high)) A policy`: no token loses its gradient (MiniMax 2025)."""
    ratio = probability_ratio(x.policy_logprobs, anchor_logprobs(x, cfg)).detach()
    weight = ratio.clamp(1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
    return -weight * x.advantages * x.policy_logprobs, {"ratio/clip_fraction": weight != ratio}


def reinforce(x: LossInput, cfg: LossConfig) -> TokenLoss:
    """`-A policy` (Williams 1992). Knows nothing of who sampled the token, unless a correction does."""
    return -x.advantages * x.policy_logprobs, {}


def nll(x: LossInput, cfg: LossConfig) -> TokenLoss:
    """`-policy`: maximum likelihood of the tokens as they stand, the loss of supervised fine-tuning."""
    return -x.policy_logprobs, {}


@needs(reference=True)
def reverse_kl(x: LossInput, cfg: LossConfig) -> TokenLoss:
    """PPO clip with `A = stopgrad(ref - policy)`: the student samples, the reference is its teacher.

    On policy its gradient is that of KL(student || teacher) at each token, given what came before (Agarwal et al. 2024;
    Lu et al. 2025). Reads no reward. loss/kl is that KL, by `kl_estimator`.
    """
    ref = x.need("ref_logprobs", "loss.name reverse_kl takes them for the teacher's")
    ratio = probability_ratio(x.policy_logprobs, anchor_logprobs(x, cfg))
    loss, metrics = _clipped(ratio, (ref - x.policy_logprobs).detach(), cfg)
    return loss, {**metrics, "loss/kl": kl_divergence(x.policy_logprobs, ref, cfg.kl_estimator)}


LOSSES: dict[str, Callable[[LossInput, LossConfig], TokenLoss]] = {
    "ppo_clip": ppo_clip,
    "decoupled_ppo": decoupled_ppo,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "nll": nll,
    "dpo": dpo,
    "reverse_kl": reverse_kl,
}


def _clipped(ratio: Tensor, advantages: Tensor, cfg: LossConfig) -> TokenLoss:
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
    loss = torch.maximum(plain, clipped)
    if cfg.dual_clip is not None:
        bounded = torch.minimum(loss, -advantages * cfg.dual_clip)
        loss = torch.where(advantages < 0, bounded, loss)
    return loss, {"ratio/clip_fraction": clipped > plain}


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """`max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2`, `[B, T]` (Schulman et al. 2017)."""
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2.0
