"""Three things that a ratio of two probabilities mixes up, told apart. Pure functions of a masked LossInput.

    engine mismatch         trainer against generator at equal weights: kernels, dtypes, a forgotten temperature
    staleness ratio         how far the weights have moved since older tokens were sampled
    effective sample size   what share of the batch its importance weights leave

Each gives float64 `[2]`, a sum and its count, to be added over micro-batches and ranks and then divided.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.errors import SchemaError
from forge.kl import probability_ratio
from forge.loss_input import LossInput

RATIO_SQUARE = "extra/ratio_square"
"""Mean square of the ratio; only on its way to the effective sample size."""


@torch.no_grad()
def engine_mismatch(x: LossInput) -> Tensor:
    """Mean `|trainer - generator|` in nats over the tokens that the trainer's own version sampled.

    Needs token_versions and policy_version. The trainer's log-probs are proximal_logprobs where given, since
    policy_logprobs move within a step of several updates.
    """
    gap = (_trainer(x) - x.behavior_logprobs).abs()
    return masked_sum(gap, x.loss_mask & (_versions(x) == _version(x)))


@torch.no_grad()
def staleness_ratio(x: LossInput) -> Tensor:
    """Mean ratio of trainer to generator over the tokens that an older version sampled; needs what the above does."""
    ratio = probability_ratio(_trainer(x), x.behavior_logprobs)
    return masked_sum(ratio, x.loss_mask & (_versions(x) < _version(x)))


@torch.no_grad()
def ratio_square(x: LossInput) -> Tensor:
    """Mean of `exp(policy - behavior)^2`, for `effective_sample_size`."""
    ratio = probability_ratio(x.policy_logprobs, x.behavior_logprobs)
    return masked_sum(ratio.to(torch.float64).square(), x.loss_mask)


def effective_sample_size(mean_ratio: float, mean_square: float) -> float:
    """`(sum w)^2 / (N sum w^2)` over all policy tokens of a batch: 1 on policy, towards 0 far from it (Kish)."""
    return mean_ratio**2 / mean_square


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` under `mask`, and its count."""
    total = torch.where(mask, values.detach().to(torch.float64), 0.0).sum()
    return torch.stack([total, mask.sum().to(torch.float64)])


def _trainer(x: LossInput) -> Tensor:
    return x.policy_logprobs if x.proximal_logprobs is None else x.proximal_logprobs


def _versions(x: LossInput) -> Tensor:
    return x.need("token_versions", "engine mismatch and staleness ratio tell tokens apart by them")


def _version(x: LossInput) -> int:
    if x.policy_version is None:
        raise SchemaError("policy_version is missing; engine mismatch and staleness ratio compare token_versions to it")
    return x.policy_version
