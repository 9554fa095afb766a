"""Corrections: how much a token counts, when the policy that sampled it is not the one at the start of the step.

    behavior --(correction: how much the token counts)--> proximal --(loss: how far to move)--> policy

With a correction, the loss takes its ratio against `proximal_logprobs`, and its value is multiplied by a weight
without gradient, made of the gap `proximal - behavior`. Without one, the ratio is against `behavior_logprobs` and
accounts for the whole gap itself, so that nothing is ever counted twice. A weight of 0 leaves the token in every
denominator. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge.kl import bounded_exp
from forge.loss_input import LossInput

if TYPE_CHECKING:
    from forge.loss_config import LossConfig


def tis(gap: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """`min(exp(gap), high)`, truncated importance sampling. `[B, T]` -> `[B, T]`."""
    return bounded_exp(gap).clamp(max=high)


def seq_tis(gap: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """`min(exp(sum of gap), high)`, one weight for a sequence. `[B, T]` -> `[B, 1]`."""
    return bounded_exp(gap.sum(dim=1, keepdim=True)).clamp(max=high)


def icepop(gap: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """`exp(gap)` where it lies in [low, high], else 0. `[B, T]` -> `[B, T]`."""
    weight = bounded_exp(gap)
    return weight * _inside(weight, low, high)


def seq_mask(gap: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """1 for a sequence whose product of ratios lies in [low, high], else 0. `[B, T]` -> `[B, 1]`."""
    return _inside(bounded_exp(gap.sum(dim=1, keepdim=True)), low, high)


def geo_mask(gap: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """1 for a sequence whose geometric mean of ratios lies in [low, high], else 0. `[B, T]` -> `[B, 1]`."""
    return _inside(bounded_exp(sequence_mean(gap, mask)), low, high)


@dataclass(frozen=True)
class Correction:
    """A function of `proximal - behavior` (0 outside the mask), the mask and two limits; and its usual limits."""

    weights: Callable[[Tensor, Tensor, float, float], Tensor]
    high: float
    low: float | None = None

    def limits(self, low: float | None, high: float | None) -> tuple[float, float]:
        """Those of the configuration; the usual ones where it has none."""
        return (self.low or 0.0) if low is None else low, self.high if high is None else high


CORRECTIONS: dict[str, Correction] = {
    "tis": Correction(tis, high=2.0),
    "seq_tis": Correction(seq_tis, high=2.0),
    "icepop": Correction(icepop, low=0.5, high=5.0),
    "seq_mask": Correction(seq_mask, low=0.5, high=2.0),
    "geo_mask": Correction(geo_mask, low=0.99, high=1.01),
}
"""What `loss.correction` may name besides none."""

DECOUPLED_HIGH = 5.0
"""The usual cap of decoupled_ppo's behaviour weight."""


def anchor_logprobs(x: LossInput, cfg: LossConfig) -> Tensor:
    """What a loss takes its ratio against, `[B, T]`: proximal under a correction, else behavior.

    Raises SchemaError when proximal_logprobs is needed and missing.
    """
    if cfg.correction == "none":
        return x.behavior_logprobs
    return proximal(x, f"loss.correction {cfg.correction}")


def proximal(x: LossInput, who: str) -> Tensor:
    """`x.proximal_logprobs` without gradient, for `who`. Raises SchemaError when it is None."""
    why = f"{who} compares them with behavior_logprobs; supply them or set it otherwise"
    return x.need("proximal_logprobs", why).detach()


@torch.no_grad()
def correction_weights(x: LossInput, cfg: LossConfig) -> Tensor:
    """The weight of each token, `[B, T]`, without gradient; `cfg.correction` is not none."""
    correction = CORRECTIONS[cfg.correction]
    low, high = correction.limits(cfg.weight_low, cfg.weight_high)
    gap = anchor_logprobs(x, cfg) - x.behavior_logprobs
    return correction.weights(gap, x.loss_mask, low, high).expand_as(x.loss_mask)


@torch.no_grad()
def behavior_weights(x: LossInput, cfg: LossConfig) -> Tensor:
    """`exp(proximal - behavior)` of decoupled PPO, `[B, T]`, without gradient.

    Above weight_high a token gets 0, or weight_high itself with weight_over clamp (Fu et al. 2025, AReaL).
    """
    high = cfg.weight_high if cfg.weight_high is not None else DECOUPLED_HIGH
    weight = bounded_exp(proximal(x, "loss.name decoupled_ppo") - x.behavior_logprobs)
    return weight.clamp(max=high) if cfg.weight_over == "clamp" else weight * (weight <= high)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the policy tokens of each sequence; `values` is 0 elsewhere. `[B, T]` -> `[B, 1]`, 0 for none."""
    return values.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
